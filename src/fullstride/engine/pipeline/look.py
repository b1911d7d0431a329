"""How a model's own forward uses its blocks, seen on a copy without memory: what a pipeline has to know to cut it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves  # has no public path

from fullstride.engine.anatomy import Anatomy, meta_inputs
from fullstride.errors import BadInput, FullstrideError

_FIX = "use layout.pp = 1 for this model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How the blocks of a model are called, and what they return."""

    keyword: str
    """Name under which the hidden state is handed in; empty if it is the first argument."""
    outputs: int
    """Length of the tuple that a block returns; 0 if it returns the hidden state itself."""
    width: int
    """Last dim of the hidden state."""

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden state among a block's arguments."""
        found: torch.Tensor = kwargs[self.keyword] if self.keyword else args[0]
        return found

    def output(self, hidden: torch.Tensor) -> Any:
        """What a block returns that leaves the hidden state as it is."""
        return (hidden, *(None,) * (self.outputs - 1)) if self.outputs else hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen."""

    form: Form
    before: dict[str, int]
    """Modules with parameters that run before the first block, with the last dim of what they return."""
    after: tuple[str, ...]
    """Modules with parameters that run after the last block."""


class _Watch:
    """Hooks on a twin; `order` holds what ran, block numbers among paths."""

    def __init__(self, twin: nn.Module, anatomy: Anatomy) -> None:
        self.order: list[str] = []
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        self.widths: dict[str, int] = {}
        for path, module in twin.named_modules():
            if path in anatomy.blocks:
                module.register_forward_hook(self._block(path), with_kwargs=True)
            elif path and not anatomy.holds(path) and any(True for _ in module.parameters(recurse=False)):
                module.register_forward_hook(self._outside(path))

    def _block(self, path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.order.append(path)
            self.calls.append((args, kwargs, output))

        return hook

    def _outside(self, path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self.order.append(path)
            self.widths[path] = int(output.shape[-1]) if isinstance(output, torch.Tensor) and output.ndim else 0

        return hook


def look(model: nn.Module, anatomy: Anatomy) -> Look:
    """Call a copy of the model on the meta device and see how its blocks follow each other.

    Raises:
        BadInput: the model does not run there, or its blocks are no plain chain: something stands between two of them, or
            hands a block more than the hidden state of the one before and what tokens' positions decide.
    """
    twin, watch = _watched(model, anatomy)
    if [path for path in watch.order if path in anatomy.blocks] != list(anatomy.blocks):
        raise BadInput(f"{type(model).__name__} does not call its {len(anatomy.blocks)} blocks once each, in order", fix=_FIX)
    form = _chain(watch, anatomy)
    first, last = watch.order.index(anatomy.blocks[0]), watch.order.index(anatomy.blocks[-1])
    between = [path for path in watch.order[first:last] if path not in anatomy.blocks]
    before, after = watch.order[:first], watch.order[last + 1 :]
    odd = between or [path for path in after if path in before and path != anatomy.embedding]
    if odd:
        raise BadInput(f"{odd[0]} of {type(model).__name__} runs between blocks, or before and after them", fix=_FIX)
    _all_called(twin, anatomy, set(before) | set(after))
    return Look(
        form=form,
        before={path: watch.widths[path] for path in dict.fromkeys(before)},
        after=tuple(dict.fromkeys(after)),
    )


def _watched(model: nn.Module, anatomy: Anatomy) -> tuple[nn.Module, _Watch]:
    """Call a copy; in bf16 where it will not be called in its own dtypes (grouped products on meta take nothing else)."""
    args, kwargs = meta_inputs(model)
    said = ""
    for dtype in (None, torch.bfloat16):
        twin = _twin(model, dtype)
        watch = _Watch(twin, anatomy)
        try:
            twin(*args, **kwargs)
        except FullstrideError:
            raise
        except Exception as error:
            said = said or f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        else:
            return twin, watch
    raise BadInput(f"{type(model).__name__} cannot be cut into stages: called on meta it ends with {said}", fix=_FIX)


def _chain(watch: _Watch, anatomy: Anatomy) -> Form:
    """The one form of all calls; each block takes what the one before returned, and nothing else that depends on weights."""
    forms, before = set(), None
    for path, (args, kwargs, output) in zip(anatomy.blocks, watch.calls, strict=True):
        keyword = "" if args and isinstance(args[0], torch.Tensor) else next(iter(kwargs), "")
        hidden = args[0] if not keyword and args else kwargs.get(keyword)
        state = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(hidden, torch.Tensor) or not isinstance(state, torch.Tensor) or hidden.shape != state.shape:
            raise BadInput(f"{path} does not map its first argument to a tensor of the same shape", fix=_FIX)
        if before is not None and hidden is not before:
            raise BadInput(f"{path} does not take what the block before it returned", fix=_FIX)
        others = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t is not hidden]
        if any(tensor.requires_grad for tensor in others):
            raise BadInput(f"{path} takes more than the hidden state from what ran before it", fix=_FIX)
        forms.add(Form(keyword=keyword, outputs=len(output) if isinstance(output, tuple) else 0, width=int(hidden.shape[-1])))
        before = state
    if len(forms) != 1:
        raise BadInput(f"the blocks {anatomy.stack} are not called alike", fix=_FIX)
    return forms.pop()


def _all_called(twin: nn.Module, anatomy: Anatomy, called: set[str]) -> None:
    """Every parameter outside the blocks belongs to a module that was called, under one of its names."""
    names: dict[int, list[str]] = {}
    for path, module in twin.named_modules():
        if not anatomy.holds(path):
            for name, param in module.named_parameters(recurse=False):
                names.setdefault(id(param), []).append(f"{path}.{name}" if path else name)
    for where in names.values():
        if not any(name.rpartition(".")[0] in called for name in where):
            raise BadInput(f"{where[0]} belongs to no module that is called, so no stage can be told to own it", fix=_FIX)


def _twin(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy on meta whose parameters want gradients, so that what depends on them can be told."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)
        memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo).eval()
