"""Where a model's parts are: embedding, list of blocks, final norm, head. The model itself is only looked at."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from fullstride.errors import BadInput

Role = Literal["embedding", "block", "head"]
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Paths of the parts, as `model.get_submodule` takes them."""

    embedding: str
    """The token embedding."""
    block_list: str
    blocks: tuple[str, ...]
    final_norm: str
    """The last norm between the last block and the head. Empty if there is none."""
    head: str
    """The linear layer that makes logits; empty if none was found."""
    tied: bool
    """Head and embedding are one parameter."""
    late_norms: tuple[str, ...] = ()
    """Norms between the last block and the final norm, seldom any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Modules whose weights are made, sharded and gathered together."""

    role: Role
    name: str
    """`embedding`, `head`, `root`, or the block's path."""
    modules: tuple[nn.Module, ...]
    paths: tuple[str, ...]


def find(model: nn.Module) -> Anatomy:
    """Find the parts of a causal language model.

    Raises:
        BadInput: no list of blocks or no embedding; says which names were looked at.
    """
    block_list = _find_blocks(model)
    blocks = tuple(f"{block_list}.{name}" for name, _ in model.get_submodule(block_list).named_children())
    outside = [(p, m) for p, m in model.named_modules() if p and not f"{p}.".startswith(f"{block_list}.")]
    embedding = _find_embedding(model, outside)
    head = _find_head(model, outside, embedding)
    norms = [p for p, m in outside if "norm" in type(m).__name__.lower() and any(True for _ in m.parameters())]
    if norms and not (len(norms) == 1 and hasattr(model, "get_input_embeddings")):
        norms = _behind_blocks(model, norms, blocks[-1], head)
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
    """The outermost list that holds the most parameters."""
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in sizes)
        if path and not inside and isinstance(module, _LISTS) and all(_has_parameters(m) for m in module.children()):
            sizes[path] = sum(p.numel() for p in module.parameters())
    sizes = {path: size for path, size in sizes.items() if size}
    if not sizes:
        seen = ", ".join(f"{n} ({type(m).__name__})" for n, m in list(model.named_modules())[1:9])
        raise BadInput(
            f"{type(model).__name__}: no ModuleList, Sequential or ModuleDict of blocks among {seen or 'no modules'}",
            fix="keep the repeated blocks in an nn.ModuleList",
        )
    return max(sizes, key=lambda path: sizes[path])


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
    tables = [(m.num_embeddings, path) for path, m in outside if isinstance(m, nn.Embedding)]
    if not tables:
        seen = ", ".join(path for path, _ in outside[:8])
        raise BadInput(
            f"{type(model).__name__}: no nn.Embedding outside the blocks among {seen or 'no modules'}",
            fix="use an nn.Embedding for the tokens",
        )
    return max(tables, key=lambda pair: pair[0])[1]


def _find_head(model: nn.Module, outside: list[tuple[str, nn.Module]], embedding: str) -> str:
    found = _asked(model, "get_output_embeddings")
    if found:
        return found
    vocab = getattr(model.get_submodule(embedding), "num_embeddings", None)
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
