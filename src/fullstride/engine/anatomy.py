"""Where a model's parts are: embedding, blocks, final norm, head. The model itself is only looked at.

Parts that the user names (`[model]` in a plan) are taken from there (`anatomy_named.py`); the others are looked for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from fullstride.engine.anatomy_named import LISTS, blocks_named, part_named
from fullstride.errors import BadInput
from fullstride.plan.plan import ModelRef

Role = Literal["embedding", "block", "head"]
_UNNAMED = ModelRef(source="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Paths of the parts, as `model.get_submodule` takes them."""

    embedding: str
    """The token embedding."""
    block_list: str
    """The list that holds the blocks alone; empty where they are named one by one."""
    blocks: tuple[str, ...]
    final_norm: str
    """The last norm between the last block and the head. Empty if there is none."""
    head: str
    """The linear layer that makes logits; empty if none was found."""
    tied: bool
    """Head and embedding are one parameter."""
    late_norms: tuple[str, ...] = ()
    """Norms between the last block and the final norm, seldom any."""

    @property
    def inside(self) -> tuple[str, ...]:
        """Below these paths is what blocks hold."""
        return (self.block_list,) if self.block_list else self.blocks

    @property
    def stack(self) -> str:
        """The blocks, in words."""
        return self.block_list or (f"{self.blocks[0]} to {self.blocks[-1]}" if len(self.blocks) > 1 else self.blocks[0])

    def holds(self, path: str) -> bool:
        """Whether a module lies in the blocks."""
        return any(f"{path}.".startswith(f"{each}.") for each in self.inside)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules whose weights are made, sharded and gathered together."""

    role: Role
    name: str
    """`embedding`, `head`, `root`, or the block's path."""
    modules: tuple[nn.Module, ...]
    paths: tuple[str, ...]


def find(model: nn.Module, named: ModelRef | None = None) -> Anatomy:
    """Find the parts of a causal language model.

    Args:
        model: on meta or real.
        named: which parts the user has named; none by default.

    Raises:
        BadInput: no list of blocks, no embedding, or no part of a given name; says which names were looked at.
    """
    named = named or _UNNAMED
    block_list, blocks = blocks_named(model, named.blocks) if named.blocks else ("", ())
    block_list = block_list if blocks else _find_blocks(model)
    blocks = blocks or tuple(f"{block_list}.{name}" for name, _ in model.get_submodule(block_list).named_children())
    inside = (block_list,) if block_list else blocks
    outside = [(p, m) for p, m in model.named_modules() if p and not any(f"{p}.".startswith(f"{each}.") for each in inside)]
    embedding = part_named(model, "embedding", named.embedding, inside) or _find_embedding(model, outside)
    head = part_named(model, "head", named.head, inside) or _find_head(model, outside, embedding)
    norms = [p for p, m in outside if "norm" in type(m).__name__.lower() and any(True for _ in m.parameters())]
    last = part_named(model, "final_norm", named.final_norm, inside)
    if last or (norms and not (len(norms) == 1 and hasattr(model, "get_input_embeddings"))):
        norms = _behind_blocks(model, list(dict.fromkeys((*norms, *([last] if last else ())))), blocks[-1], head)
    if last:  # what runs behind it belongs to the head's part
        norms = [*norms[: norms.index(last)], last] if last in norms else [last]
    tied = bool(head) and _weight(model, head) is _weight(model, embedding)
    return Anatomy(
        embedding=embedding,
        block_list=block_list,
        blocks=blocks,
        final_norm=norms[-1] if norms else "",
        head=head,
        tied=tied,
        late_norms=tuple(norms[:-1]),
    )


def _behind_blocks(model: nn.Module, norms: list[str], last: str, head: str) -> list[str]:
    """The norms that run between the last block and the head, in their order; seen in a copy without memory.

    Where that does not run, it is the last one that the model's code registers.
    """
    twin, ran = meta_twin(model), list[str]()
    for path in dict.fromkeys((*norms, last, *([head] if head else []))):
        twin.get_submodule(path).register_forward_pre_hook(lambda _module, _args, path=path: ran.append(path))
    args, kwargs = meta_inputs(model)
    with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        twin(*args, **kwargs)
    if last not in ran:
        return norms[-1:]
    behind = ran[len(ran) - ran[::-1].index(last) :]
    return list(dict.fromkeys(behind[: behind.index(head)] if head in behind else behind))


def _weight(model: nn.Module, path: str) -> object:
    return getattr(model.get_submodule(path), "weight", None)


def _find_blocks(model: nn.Module) -> str:
    """The outermost list of the most parameters; lists of single layers (a head of two, say) only where there is no other."""
    sizes: dict[str, tuple[bool, bool, int]] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in sizes)
        children = list(module.children())
        if path and not inside and isinstance(module, LISTS) and all(_has_parameters(m) for m in children):
            sizes[path] = (all(map(_is_compound, children)), len(children) > 1, sum(p.numel() for p in module.parameters()))
    sizes = {path: size for path, size in sizes.items() if size[2]}
    best = max(sizes, key=lambda path: sizes[path], default="")
    inner = _repeated(model, best, set(sizes))
    if not best or inner:
        seen = ", ".join(inner or [f"{n} ({type(m).__name__})" for n, m in list(model.named_modules())[1:9]])
        what = "these modules are alike, and in no list" if inner else "no ModuleList, Sequential or ModuleDict of blocks among"
        raise BadInput(
            f"{type(model).__name__}: {what}{':' if inner else ''} {seen or 'no modules'}",
            fix='keep the repeated blocks in an nn.ModuleList, or name them in order, such as model.blocks = ["b0", "b1"]',
        )
    return best


def _is_compound(module: nn.Module) -> bool:
    """Whether it is more than one of torch's own layers."""
    return not type(module).__module__.startswith("torch.nn.") or any(True for _ in module.children())


def _repeated(model: nn.Module, best: str, lists: set[str]) -> list[str]:
    """Modules of one class and one parent that each hold a list such as the best: blocks that are attributes, it seems."""
    words = best.split(".")
    for place in range(len(words) - 1):
        parent, own = ".".join(words[:place]), model.get_submodule(".".join(words[: place + 1]))
        like = [name for name, m in model.get_submodule(parent).named_children() if type(m) is type(own)]
        ends = {".".join((*words[:place], name, *words[place + 1 :])) for name in like}
        if len(like) > 1 and ends <= lists:
            return [f"{parent}.{name}".lstrip(".") for name in like]
    return []


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _asked(model: nn.Module, method: str) -> str:
    """The path of what the model itself names by a method of transformers; empty if it does not."""
    ask: Any = getattr(model, method, None)
    wanted = ask() if callable(ask) else None
    return next((path for path, module in model.named_modules() if path and module is wanted), "")


def _find_embedding(model: nn.Module, outside: list[tuple[str, nn.Module]]) -> str:
    found = _asked(model, "get_input_embeddings")
    if found:
        return found
    wide = {m.out_features for _, m in outside if isinstance(m, nn.Linear)}  # positions may be more than words
    tables = [((m.num_embeddings in wide, m.num_embeddings), path) for path, m in outside if isinstance(m, nn.Embedding)]
    if not tables:
        seen = ", ".join(path for path, _ in outside[:8])
        raise BadInput(
            f"{type(model).__name__}: no nn.Embedding outside the blocks among {seen or 'no modules'}",
            fix="use an nn.Embedding for the tokens, or name their table in model.embedding",
        )
    return max(tables, key=lambda pair: pair[0])[1]


def _find_head(model: nn.Module, outside: list[tuple[str, nn.Module]], embedding: str) -> str:
    found = _asked(model, "get_output_embeddings")
    if found:
        return found
    vocab = model.get_parameter(f"{embedding}.weight").shape[0]
    heads = [path for path, m in outside if isinstance(m, nn.Linear) and m.out_features == vocab]
    return heads[-1] if heads else ""


def units(model: nn.Module, anatomy: Anatomy, *, table_apart: bool = False) -> tuple[Unit, ...]:
    """The model cut into embedding, blocks, head (with the final norm) and the rest, in the order of execution.

    Tied embedding and head fall into the rest, whose weights stay together: they are one parameter. The last unit is the
    root; its modules are the model itself, and what other units own does not belong to it. With `table_apart` a tied head is a
    unit by itself: it is sharded as its other end is, which is a unit by itself on another pipeline stage.
    """
    get = model.get_submodule
    made: list[Unit] = []
    if anatomy.embedding and not anatomy.tied:
        made.append(_unit("embedding", "embedding", (anatomy.embedding,), model))
    made += [_unit("block", path, (path,), model) for path in anatomy.blocks]
    if not anatomy.tied and anatomy.head:
        paths = tuple(path for path in (anatomy.final_norm, anatomy.head) if path)
        made.append(_unit("head", "head", paths, model))
    if anatomy.tied and table_apart:
        made.append(_unit("head", "head", (anatomy.embedding, anatomy.head), model))
    made.append(Unit(role="head", name="root", modules=(get(""),), paths=("",)))
    return tuple(made)


def _unit(role: Role, name: str, paths: tuple[str, ...], model: nn.Module) -> Unit:
    return Unit(role=role, name=name, modules=tuple(model.get_submodule(path) for path in paths), paths=paths)


def logits_of(output: object) -> torch.Tensor:
    """The logits in what a model returned: `.logits`, the first of a tuple, or the tensor itself.

    Raises:
        BadInput: none of these.
    """
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if found is None:
        found = output
    if not isinstance(found, torch.Tensor):
        raise BadInput(f"the model returned a {type(output).__name__} without logits", fix="return logits")
    return found


def head_is_last(model: nn.Module, anatomy: Anatomy) -> bool | None:
    """Whether the head's output is returned as the logits, untouched; None if it could not be decided.

    A copy of the model on the meta device is called on two tokens, and the head's own output is compared with what comes
    back. Nothing is computed. Models that refuse to run on meta are checked at their first real call instead.
    """
    if not anatomy.head:
        return None
    twin = meta_twin(model)
    seen: list[torch.Tensor] = []
    twin.get_submodule(anatomy.head).register_forward_hook(lambda _m, _i, out: seen.append(out))
    args, kwargs = meta_inputs(model)
    try:
        with torch.no_grad():
            logits = logits_of(twin(*args, **kwargs))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, BadInput):
        return None
    return len(seen) == 1 and logits is seen[0]


def meta_inputs(model: nn.Module, count: int = 2) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Some tokens on the meta device, as the model takes them."""
    tokens = torch.zeros(1, count, dtype=torch.int64, device="meta")
    if not hasattr(model, "get_input_embeddings"):
        return (tokens,), {}
    # A ready mask, so that no value has to be looked at.
    mask = torch.zeros(1, 1, count, count, dtype=torch.bool, device="meta")
    return (), {"input_ids": tokens, "attention_mask": mask, "position_ids": tokens}


def meta_twin(model: nn.Module) -> nn.Module:
    """A copy without memory: parameters and buffers on meta, whatever the original's are on."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo).eval()
