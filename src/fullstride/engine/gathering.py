"""Whole parameters out of the pieces that ranks hold, one parameter at a time, whatever the layout.

found = Gathering(run.pieces(), run.device)       collective
for name in found.names:                          the same on all ranks, the union over pipeline stages
whole = found.whole(name, local.get(name), torch.float32)    collective; on_all=False: None but on rank 0
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullstride.engine.pieces import Piece, fill


@dataclasses.dataclass(frozen=True)
class Held:
    """A piece and the rank of the group that shows it to the others."""

    piece: Piece
    rank: int


class Gathering:
    """Who holds what, exchanged once.

    Attributes:
        names: of all parameters of all ranks, in the order of ranks and of each rank's own; equal on all ranks.
    """

    def __init__(
        self, pieces: Mapping[str, Piece], device: torch.device | str = "cpu", group: dist.ProcessGroup | None = None
    ) -> None:
        """Exchange pieces; called by all ranks of the group.

        Args:
            pieces: this rank's, by name; may be none.
            device: where its tensors lie, and where whole ones are made.
            group: of all ranks that hold parts; None for the world, or for this rank alone where there is no world.
        """
        self._group = group
        self._device = torch.device(device)
        self._alone = not dist.is_initialized() or dist.get_world_size(group) == 1
        self.rank = 0 if self._alone else dist.get_rank(group)
        everybody: list[dict[str, Piece]] = [dict(pieces)]
        if not self._alone:
            found: list[dict[str, Piece] | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, dict(pieces), group=group)
            everybody = [item for item in found if item is not None]
        self._held = holders(everybody)
        self.names = tuple(self._held)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self._held[name][0].piece.shape

    def whole(self, name: str, local: torch.Tensor | None, dtype: torch.dtype, *, on_all: bool = True) -> torch.Tensor | None:
        """The whole parameter, a fresh tensor on the device; called by all ranks for the same names in the same order.

        Args:
            name: one of `names`.
            local: this rank's elements (or a DTensor of them); None where it holds none.
            dtype: of the result, equal on all ranks; senders convert.
            on_all: give it to every rank, else to rank 0 of the group alone (None elsewhere).
        """
        mine = None if local is None else _local(local)
        keeps = on_all or self.rank == 0
        made = torch.empty(self.shape(name), dtype=dtype, device=self._device) if keeps else None
        for held in self._held[name]:
            flat = self._pass_on(held, mine, dtype, on_all)
            if made is not None and flat is not None:
                fill(made, held.piece, flat)
        return made

    def dtypes(self, local: Mapping[str, torch.dtype]) -> dict[str, torch.dtype]:
        """The dtype of every parameter, from the first rank that says one; called by all ranks."""
        everybody = [dict(local)]
        if not self._alone:
            everybody *= dist.get_world_size(self._group)
            dist.all_gather_object(everybody, dict(local), group=self._group)
        return {name: dtype for said in reversed(everybody) for name, dtype in said.items()}

    def all(self, local: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that some rank has an entry for, whole, on all ranks; to be run to its end by all of them."""
        there = [set(local)]
        if not self._alone:
            there = [set()] * dist.get_world_size(self._group)
            dist.all_gather_object(there, set(local), group=self._group)
        for name in self.names:
            if any(name in names for names in there):
                whole = self.whole(name, local.get(name), dtype)
                assert whole is not None
                yield name, whole

    def _pass_on(self, held: Held, mine: torch.Tensor | None, kind: torch.dtype, on_all: bool) -> torch.Tensor | None:
        """One piece's elements from its holder to whoever is to have them."""
        piece, holds = held.piece, held.rank == self.rank
        flat = None
        if holds:
            assert mine is not None, f"{piece.name}: this rank said that it holds it"
            flat = mine.reshape(-1).to(self._device, kind)
            assert flat.numel() == piece.count, f"{piece.name}: {flat.numel()} elements, the piece has {piece.count}"
        if self._alone:
            return flat
        if on_all:
            flat = flat if flat is not None else torch.empty(piece.count, dtype=kind, device=self._device)
            dist.broadcast(flat, group=self._group, group_src=held.rank)
        elif held.rank == 0:
            return flat
        elif holds:
            dist.send(flat, group=self._group, group_dst=0)  # type: ignore[arg-type]  # not None where it is held
        elif self.rank == 0:
            flat = torch.empty(piece.count, dtype=kind, device=self._device)
            dist.recv(flat, group=self._group, group_src=held.rank)
        return flat


def holders(everybody: list[dict[str, Piece]]) -> dict[str, list[Held]]:
    """By name, each distinct counted piece and the first rank that holds it; their order is equal on all ranks.

    Args:
        everybody: the pieces of each rank by name.
    """
    found: dict[str, dict[tuple[object, ...], Held]] = {}
    for rank, pieces in enumerate(everybody):
        for name, piece in pieces.items():
            seen = found.setdefault(name, {})
            if piece.counted and piece.count:
                seen.setdefault((piece.cut, piece.lo, piece.end), Held(piece, rank))
            elif not piece.count and not math.prod(piece.shape):
                seen.setdefault(("empty",), Held(piece, rank))
    return {name: list(seen.values()) for name, seen in found.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            part: torch.Tensor = tensor.to_local()
        return part.detach()
    return tensor.detach()
