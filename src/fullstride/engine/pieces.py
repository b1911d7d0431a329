"""Where the numbers that a rank holds lie in the unmodified model, whoever carries them.

A parameter is first cut along one dim by tensor parallelism (rows of several parts where a fused weight joins them), and
what is left is cut again, as a run of its elements in row-major order, by data parallelism: whole rows under FSDP2, any run
in a flat buffer. A `Piece` says both, so that clipping, checkpoints, export and parity need not know who cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, Shard


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of one dim that this rank's tensor-parallel share consists of."""

    dim: int
    ranges: tuple[tuple[int, int], ...]
    """[lo, hi) along `dim` of the whole parameter, in the order in which they lie in the local tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle of the whole parameter that lies in one run of the local elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First of its elements among the local ones."""

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What a rank holds of one parameter."""

    name: str
    """As in the unmodified model."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    cut: Cut | None = None
    lo: int = 0
    hi: int = -1
    """Elements [lo, hi) of the cut parameter in row-major order; -1: to its end."""
    counted: bool = True
    """Of the ranks that hold the same elements as parts of one copy of the model (tensor-parallel replicas, tied stages),
    one counts them: in the norm, and in what is written."""

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Shape after the tensor-parallel cut."""
        if self.cut is None:
            return self.shape
        width = sum(hi - lo for lo, hi in self.cut.ranges)
        return (*self.shape[: self.cut.dim], width, *self.shape[self.cut.dim + 1 :])

    @property
    def end(self) -> int:
        """`hi`, spelled out."""
        return math.prod(self.cut_shape) if self.hi < 0 else self.hi

    @property
    def count(self) -> int:
        """Elements held."""
        return self.end - self.lo

    def boxes(self) -> Iterator[Box]:
        """The piece as rectangles of the whole parameter, in the order of its elements; none if it is empty."""
        for offsets, sizes, start in _run(self.cut_shape, self.lo, self.end):
            yield from self._uncut(offsets, sizes, start - self.lo)

    def _uncut(self, offsets: tuple[int, ...], sizes: tuple[int, ...], start: int) -> Iterator[Box]:
        """A rectangle of the cut parameter in terms of the whole one: one for each range it meets.

        A rectangle across several ranges of an inner dim would not be one run of elements, so it goes row by row there.
        """
        if self.cut is None:
            yield Box(offsets=offsets, sizes=sizes, start=start)
            return
        dim, begun = self.cut.dim, 0
        lo, hi = offsets[dim], offsets[dim] + sizes[dim]
        met = []
        for low, high in self.cut.ranges:
            a, b = max(lo, begun), min(hi, begun + high - low)
            if a < b:
                met.append((low + a - begun, b - a))
            begun += high - low
        for outer in _rows(sizes[:dim]) if len(met) > 1 else [None]:
            for at, width in met:
                ahead = offsets[:dim] if outer is None else tuple(o + i for o, i in zip(offsets, outer, strict=False))
                box = Box(
                    offsets=(*ahead, at, *offsets[dim + 1 :]),
                    sizes=(*(sizes[:dim] if outer is None else (1,) * dim), width, *sizes[dim + 1 :]),
                    start=start,
                )
                yield box
                start += box.count


def _rows(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not sizes:
        yield ()
        return
    for first in range(sizes[0]):
        for rest in _rows(sizes[1:]):
            yield (first, *rest)


def _run(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Elements [lo, hi) of a tensor as (offsets, sizes, first element): part of a row, whole rows, part of a row."""
    if lo >= hi:
        return
    if not shape:
        yield (), (), lo
        return
    inner = math.prod(shape[1:])
    if inner == 0:
        return
    first, last = -(-lo // inner), hi // inner
    if first > last:  # within one row
        for offsets, sizes, start in _run(shape[1:], lo - last * inner, hi - last * inner):
            yield (last, *offsets), (1, *sizes), start + last * inner
        return
    if lo < first * inner:
        row = first - 1
        for offsets, sizes, start in _run(shape[1:], lo - row * inner, inner):
            yield (row, *offsets), (1, *sizes), start + row * inner
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * inner
    if hi > last * inner:
        for offsets, sizes, start in _run(shape[1:], 0, hi - last * inner):
            yield (last, *offsets), (1, *sizes), start + last * inner


def piece_of(name: str, shape: tuple[int, ...], tensor: torch.Tensor, cut: Cut | None = None, *, counted: bool = True) -> Piece:
    """The piece that a plain tensor or an FSDP2 DTensor is.

    Args:
        name: as in the unmodified model.
        shape: of the whole parameter.
        tensor: plain, or a DTensor cut on dim 0 over at most one axis of its mesh.
        cut: what tensor parallelism took before.
        counted: see `Piece`.
    """
    lo, hi = 0, -1
    if isinstance(tensor, DTensor):
        for axis, place in enumerate(tensor.placements):
            if isinstance(place, Shard):
                assert place.dim == 0, "FSDP2 cuts rows"
                rows, ranks = tensor.shape[0], tensor.device_mesh.size(axis)
                each, mine = -(-rows // ranks), tensor.device_mesh.get_local_rank(axis)
                inner = math.prod(tensor.shape[1:])
                lo, hi = min(mine * each, rows) * inner, min((mine + 1) * each, rows) * inner
    return Piece(name=name, shape=shape, cut=cut, lo=lo, hi=hi, counted=counted)


def fill(whole: torch.Tensor, piece: Piece, local: torch.Tensor) -> None:
    """Write a piece into the whole parameter.

    Args:
        whole: of the piece's global shape.
        piece: what `local` is.
        local: its elements, in any shape.
    """
    for part in parts(piece):
        part.of_whole(whole).copy_(part.of_local(local))


def take(whole: torch.Tensor, piece: Piece, local: torch.Tensor) -> None:
    """Read a piece out of the whole parameter; the other way round of `fill`."""
    for part in parts(piece):
        part.of_local(local).copy_(part.of_whole(whole))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A rectangle of the whole parameter, and where among a piece's local elements it lies, strided perhaps.

    A piece has few of them: at most 2 * dims - 1 for its run, times the ranges of its cut.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First local element of the rectangle of the cut parameter that this one is a part of."""
    around: tuple[int, ...]
    """Sizes of that rectangle."""
    dim: int
    at: int
    """Where this one begins in it, along `dim`."""

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """View of the whole parameter."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole

    def of_local(self, local: torch.Tensor) -> torch.Tensor:
        """View of a piece's elements, which lie in one run of memory, in any shape."""
        run = local.view(-1)[self.start : self.start + math.prod(self.around)].view(self.around)
        return run.narrow(self.dim, self.at, self.sizes[self.dim]) if self.around else run


def parts(piece: Piece) -> Iterator[Part]:
    """A piece as rectangles of the whole parameter, each a strided view of the local elements; none if it is empty."""
    cut = piece.cut
    for offsets, sizes, first in _run(piece.cut_shape, piece.lo, piece.end):
        start = first - piece.lo
        if cut is None:
            yield Part(offsets=offsets, sizes=sizes, start=start, around=sizes, dim=0, at=0)
            continue
        dim, begun = cut.dim, 0
        lo, hi = offsets[dim], offsets[dim] + sizes[dim]
        for low, high in cut.ranges:
            a, b = max(lo, begun), min(hi, begun + high - low)
            if a < b:
                yield Part(
                    offsets=(*offsets[:dim], low + a - begun, *offsets[dim + 1 :]),
                    sizes=(*sizes[:dim], b - a, *sizes[dim + 1 :]),
                    start=start,
                    around=sizes,
                    dim=dim,
                    at=a - lo,
                )
            begun += high - low
