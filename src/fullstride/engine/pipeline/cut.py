"""A rank's stages out of an unmodified model.

The model's own forward runs on every stage, so that masks, rotary tables and positions are its own. Blocks of other stages
are replaced by modules that hand the hidden state on, what runs before the blocks by zeros without memory, what runs after
them by nothing. A received hidden state is put in where the last foreign block before the stage's own ones stood, and the
result is caught where the first one after them stood. Weights of other stages are never made.

At rest the model holds this rank's own blocks, of all its chunks, under their own names, and the embedding, norm and head if
they are its own: whatever looks at parameters then sees one model. While a chunk runs, the model shows that chunk alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.pipeline.look import Form, Look, look
from fullstride.errors import RuleBroken
from fullstride.plan.schedule.placement import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """One of a rank's stages."""

    stage: int
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the head."""
    blocks: tuple[str, ...]
    """Paths."""


class _Foreign(nn.Module):
    """Stands where a block of another stage stood."""

    def __init__(self, block: nn.Module, form: Form) -> None:
        super().__init__()
        for name, value in vars(block).items():  # a model's loop may ask a block for its kind of attention
            if not name.startswith("_") and not isinstance(value, nn.Module | torch.Tensor) and not callable(value):
                self.__dict__.setdefault(name, value)
        self.form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the hidden state on."""
        return self.form.output(self.form.hidden(args, kwargs))


class _Entry(_Foreign):
    """The last foreign block before the stage: what has been received comes out of it."""

    received: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand out what was received."""
        assert self.received is not None, "a stage after the first was run without a hidden state"
        return self.form.output(self.received)


class _Exit(_Foreign):
    """The first foreign block after the stage: what goes in is the stage's result."""

    caught: torch.Tensor | None = None
    shape: tuple[int, int] = (0, 0)
    """Samples and tokens, as the model's own code expects them, whatever the stage has cut the sequence into."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the result; what follows sees zeros that take no memory."""
        self.caught = self.form.hidden(args, kwargs)
        return self.form.output(self.caught.new_zeros(()).expand(*self.shape, self.form.width))


class _Zeros(nn.Module):
    """Stands where a module before the blocks stood; returns zeros that take no memory."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, value: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Zeros of the shape that the module would have returned."""
        shape = value.shape[:-1] if value.is_floating_point() else value.shape
        return torch.zeros((), dtype=self.dtype, device=value.device).expand(*shape, self.width)


class _Through(nn.Module):
    """Stands where a module after the blocks stood."""

    def forward(self, value: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """The input."""
        return value


class Cut:
    """A model that holds this rank's stages alone.

    Attributes:
        anatomy: of what this rank holds; embedding, norm and head are empty where they are another's.
        chunks: this rank's stages.
        width: last dim of the hidden state.
        tied: name of the weight that the first and the last stage, on two ranks, both hold; empty if there is none.
        counts_tied: whether this rank counts it.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, placement: Placement, rank: int, layers: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Cut the model, in place.

        Args:
            model: unmodified.
            anatomy: of the whole model.
            placement: where the stages stand.
            rank: this rank's place in the pipeline.
            layers: blocks of each stage; empty for as even as possible, the first ones taking what is left over.
            dtype: of the hidden state before the first block.

        Raises:
            BadInput: the model's blocks are no plain chain.
            RuleBroken: its blocks do not go with the stages.
        """
        seen = look(model, anatomy)
        ends = _ends(len(anatomy.blocks), placement.num_stages, layers)
        self.width = seen.form.width
        self.chunks = tuple(_chunk(anatomy, placement.stage(rank, chunk), ends) for chunk in range(placement.chunks))
        first, last = (any(getattr(chunk, end) for chunk in self.chunks) for end in ("first", "last"))
        split = anatomy.tied and placement.home(0)[0] != placement.home(placement.num_stages - 1)[0]
        names = {id(p): name for name, p in model.named_parameters()}
        weight = names.get(id(getattr(model.get_submodule(anatomy.embedding), "weight", None)), "")
        self.tied = weight if split and (first or last) else ""
        self.counts_tied = first
        keeps_table = first or (anatomy.tied and last)
        own = {path for chunk in self.chunks for path in chunk.blocks}
        self._places = _Places(model, anatomy.blocks)
        self._slots = _slots(model, seen, dtype)
        self._views = [_view(model, anatomy, chunk, seen.form) for chunk in self.chunks]
        rest = {path: model.get_submodule(path) for path in anatomy.blocks if path in own}
        self._places.show(rest)
        for slot in self._slots:
            slot.owned = (first if slot.before else last) or (keeps_table and slot.path == anatomy.embedding)
            slot.show(slot.owned)
        self.anatomy = dataclasses.replace(
            anatomy,
            embedding=anatomy.embedding if keeps_table else "",
            blocks=tuple(path for path in anatomy.blocks if path in own),
            final_norm=anatomy.final_norm if last else "",
            late_norms=anatomy.late_norms if last else (),
            head=anatomy.head if last else "",
            tied=anatomy.tied and last,
        )
        self._rest = rest

    def run(
        self, index: int, shape: tuple[int, int], received: torch.Tensor | None, call: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run one chunk's forward.

        Args:
            index: which chunk.
            shape: samples and tokens that the model is called with.
            received: the hidden state that goes in; None on the first stage.
            call: calls the model and returns what counts on the last stage.

        Returns:
            What `call` returned on the last stage, elsewhere the hidden state after the chunk's own blocks.
        """
        leaves = self._views[index][2]
        if leaves is not None:
            leaves.shape = shape
        with self._showing(index, received):
            result = call()
        if leaves is None:
            return result
        caught, leaves.caught = leaves.caught, None
        assert caught is not None, "the model did not call its blocks"
        return caught

    @contextlib.contextmanager
    def _showing(self, index: int, received: torch.Tensor | None) -> Iterator[None]:
        chunk, (modules, enters, _) = self.chunks[index], self._views[index]
        if enters is not None:
            enters.received = received
        self._places.show(modules)
        for slot in self._slots:
            slot.show(chunk.first if slot.before else chunk.last)
        try:
            yield
        finally:
            self._places.show(self._rest)
            for slot in self._slots:
                slot.show(slot.owned)
            if enters is not None:
                enters.received = None


@dataclasses.dataclass
class _Slot:
    """A place for a module outside the blocks, or its stand-in."""

    path: str
    parent: nn.Module
    name: str
    real: nn.Module
    stand_in: nn.Module
    before: bool
    owned: bool = False

    def show(self, real: bool) -> None:
        self.parent._modules[self.name] = self.real if real else self.stand_in


def _slots(model: nn.Module, seen: Look, dtype: torch.dtype) -> list[_Slot]:
    found = []
    for path in (*seen.before, *(path for path in seen.after if path not in seen.before)):
        parent, _, name = path.rpartition(".")
        before = path in seen.before
        stand_in: nn.Module = _Zeros(seen.before[path], dtype) if before else _Through()
        found.append(_Slot(path, model.get_submodule(parent), name, model.get_submodule(path), stand_in, before))
    return found


_View = tuple[dict[str, nn.Module], _Entry | None, _Exit | None]


def _view(model: nn.Module, anatomy: Anatomy, chunk: Chunk, form: Form) -> _View:
    """The blocks while a chunk runs, by path."""
    begin = anatomy.blocks.index(chunk.blocks[0])
    end = begin + len(chunk.blocks)
    modules: dict[str, nn.Module] = {}
    enters: _Entry | None = None
    leaves: _Exit | None = None
    for place, path in enumerate(anatomy.blocks):
        block = model.get_submodule(path)
        if place == begin - 1:
            block = enters = _Entry(block, form)
        elif place == end:
            block = leaves = _Exit(block, form)
        elif not begin <= place < end:
            block = _Foreign(block, form)
        modules[path] = block
    return modules, enters, leaves


class _Places:
    """Where a model keeps its blocks: one list, or several modules that may hold others beside them."""

    def __init__(self, model: nn.Module, blocks: tuple[str, ...]) -> None:
        parents = dict.fromkeys(path.rpartition(".")[0] for path in blocks)
        self._parents = {path: (model.get_submodule(path), tuple(model.get_submodule(path)._modules)) for path in parents}
        self._blocks = frozenset(blocks)

    def show(self, modules: dict[str, nn.Module]) -> None:
        """Let the model hold these blocks, by path, and no others; what stands beside them stays, and so does the order."""
        for parent, (holder, names) in self._parents.items():
            paths = {name: f"{parent}.{name}" if parent else name for name in names}
            kept = {name: holder._modules[name] for name in names if paths[name] not in self._blocks}
            shown = {name: modules[path] for name, path in paths.items() if path in modules}
            holder._modules.clear()
            holder._modules.update({name: {**kept, **shown}[name] for name in names if name in kept or name in shown})


def _ends(num_blocks: int, stages: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Where stages begin and end among the blocks."""
    each, over = divmod(num_blocks, stages)
    layers = layers or tuple(each + (stage < over) for stage in range(stages))
    if len(layers) != stages or min(layers) < 1 or sum(layers) != num_blocks:
        raise RuleBroken(
            f"{num_blocks} blocks on {stages} stages as {list(layers)}: each stage holds one at least, all of them all",
            fix="correct pipeline.layers_per_stage, or use fewer stages",
        )
    return tuple(sum(layers[:stage]) for stage in range(stages + 1))


def _chunk(anatomy: Anatomy, stage: int, ends: tuple[int, ...]) -> Chunk:
    blocks = anatomy.blocks[ends[stage] : ends[stage + 1]]
    return Chunk(stage=stage, first=stage == 0, last=stage == len(ends) - 2, blocks=blocks)
