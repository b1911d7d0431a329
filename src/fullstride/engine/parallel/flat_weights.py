"""Weights and AdamW on flat shards: a parameter is a run of a shard, a step is two kernels a unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from fullstride.engine.optimizer import AdamW
from fullstride.engine.parallel.flat_unit import FlatUnit, Slot
from fullstride.engine.precision import Weights
from fullstride.plan.flat import aligned
from fullstride.plan.plan import Plan, Recipe


class Laid(Protocol):
    """A model on flat buffers, as its weights and its optimizer see it: `flat.Flat`."""

    units: list[FlatUnit]

    def finish(self) -> None:
        """Let the device wait for all gradients."""

    def stepping(self, unit: FlatUnit) -> AbstractContextManager[None]:
        """Around a unit's optimizer step."""
        ...

    def publish(self, unit: FlatUnit, *, all_regions: bool = False) -> None:
        """Make a unit's masters the weights of the next forward."""

    def ready(self) -> None:
        """Let the device wait for all steps and gathers."""

    def reshard(self) -> None:
        """Free what was gathered."""

    def forget(self) -> None:
        """Drop all gradients."""

    def close(self) -> None:
        """Take the hooks off."""


class FlatWeights(Weights):
    """The parameters of a model in flat buffers; masters, gradients and moments are 1-D runs of the shards, some empty.

    Attributes:
        flat: the carrier.
    """

    def __init__(self, flat: Laid, model: Any, plan: Plan, *rest: Any) -> None:
        """As `Weights`, of a model that `flat` carries."""
        self.flat = flat
        self._where: dict[int, tuple[FlatUnit, int, Slot]] = {
            id(slot.param): (unit, number, slot)
            for unit in flat.units
            for region in unit.regions
            for number, slot in enumerate(region.slots)
        }
        super().__init__(model, plan, *rest)

    def _make_masters(self, plan: Plan, roles: Any) -> None:
        self.cast = plan.precision.cast == "weights"
        masters, pieces = [], []
        for param, piece in zip(self.params, self.pieces, strict=True):
            unit, _, slot = self._where[id(param)]
            region = unit.trained if param.requires_grad else unit.frozen
            assert region is not None
            a, b = region.within(slot)
            lo = a + region.lo - slot.offset if a < b else 0
            masters.append(region.master[a:b])
            pieces.append(dataclasses.replace(piece, lo=lo, hi=lo + b - a))
        self.masters, self.pieces = tuple(masters), tuple(pieces)
        self._counted = {id(p): piece.counted for p, piece in zip(self.params, self.pieces, strict=True)}

    def gradient(self, index: int) -> torch.Tensor | None:
        """This rank's run of a gradient, after `finish`; None if no rank ever had one."""
        unit, number, slot = self._where[id(self.params[index])]
        if unit.trained is None or not slot.param.requires_grad or unit.gradient is None or number in unit.dormant:
            return None
        a, b = unit.trained.within(slot)
        return unit.gradient[a:b]

    def counted(self) -> list[torch.Tensor]:
        """Whole runs of the shards, so that the norm reads a unit at once."""
        return [
            unit.gradient[a:b]
            for unit in self.flat.units
            if unit.gradient is not None
            for a, b, kind in self.runs(unit)
            if kind[1]
        ]

    def runs(self, unit: FlatUnit) -> Iterator[tuple[int, int, tuple[bool, bool]]]:
        """A unit's shard as few runs: where each lies, whether it is decayed, whether it counts in the norm.

        Parameters without a gradient are left out; holes belong to the parameter before them.
        """
        region = unit.trained
        assert region is not None
        found: list[list[Any]] = []
        for number, slot in enumerate(region.slots):
            lo, hi = slot.offset, slot.offset + aligned(slot.count)
            kind = (slot.decayed, self._counted[id(slot.param)])
            if number in unit.dormant:
                continue
            if found and found[-1][1] == lo and found[-1][2] == kind:
                found[-1][1] = hi
            else:
                found.append([lo, hi, kind])
        for lo, hi, kind in found:
            a, b = max(lo, region.lo) - region.lo, min(hi, region.hi) - region.lo
            if a < b:
                yield a, b, kind

    def publish(self, indices: list[int] | None = None) -> None:
        """Gather all weights from the masters, queued; forward waits for them."""
        for unit in self.flat.units:
            self.flat.publish(unit, all_regions=True)

    def ready(self) -> None:
        """Let the device wait for what is still being stepped."""
        self.flat.ready()

    def clear(self) -> None:
        """Forget the gradients."""
        super().clear()
        self.flat.forget()

    def close(self) -> None:
        """Take the hooks off."""
        self.flat.close()


class FlatAdamW(AdamW):
    """AdamW on each unit's shard; the gathering of a unit's weights is queued right behind its step."""

    def __init__(self, weights: FlatWeights, recipe: Recipe, implementation: Literal["fused", "foreach", "loop"]) -> None:
        """Make zero moments: one run a unit."""
        self._flat = weights
        self._scalars: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self._moments = {
            unit.position: (torch.zeros_like(unit.trained.master), torch.zeros_like(unit.trained.master))
            for unit in weights.flat.units
            if unit.trained is not None
        }
        super().__init__(weights, recipe, implementation)

    def _zero_moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        unit, _, slot = self._flat._where[id(self._weights.params[index])]
        assert unit.trained is not None
        a, b = unit.trained.within(slot)
        first, second = self._moments[unit.position]
        return first[a:b], second[a:b]

    @torch.no_grad()
    def update(self, divisor: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Update once, in the order in which the next forward needs the units."""
        flat = self._flat.flat
        flat.finish()
        if self._cannot_skip(found_inf):
            return
        flat.ready()  # the last step of a unit that no forward entered
        flat.reshard()
        self._scalars = divisor, found_inf  # read on another stream, after the caller has let go of them
        self._counts.fill_(self.num_steps)
        counts = iter(self._counts.unbind())  # the kernel counts up: each call has its own
        groups = {bool(self._weights.params[members[0]].ndim >= 2): number for number, members in enumerate(self._groups)}
        for unit in sorted(flat.units, key=lambda u: (u.name != "root", u.position)):
            if unit.trained is None or unit.gradient is None:
                continue
            with flat.stepping(unit):
                self._step_unit(unit, unit.gradient, groups, counts, divisor, found_inf)
            flat.publish(unit)
        self.num_steps += 1

    def _step_unit(
        self,
        unit: FlatUnit,
        gradient: torch.Tensor,
        groups: dict[bool, int],
        counts: Iterator[torch.Tensor],
        divisor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        region, number = unit.trained, self.num_steps + 1
        assert region is not None
        master, (first, second) = region.master, self._moments[unit.position]
        also = region.own if self._one_pass and unit.gathered and region.whole.dtype != master.dtype else None
        wide = gradient if self._one_pass else gradient.to(master.dtype)
        for a, b, decayed in self._merged(unit):
            group = self.param_groups[groups[decayed]]
            one = master[a:b], wide[a:b], first[a:b], second[a:b]
            if self._one_pass:
                self._one_pass(*one, None if also is None else also[a:b], group, number, divisor, found_inf)
            else:
                self._kernel(group, [one[0]], [one[1]], [one[2]], [one[3]], [next(counts)], divisor, found_inf)
        region.narrowed = also is not None

    def _merged(self, unit: FlatUnit) -> list[tuple[int, int, bool]]:
        """Runs of a unit's shard that are stepped alike: where each lies, and whether it is decayed."""
        merged: list[tuple[int, int, bool]] = []
        for a, b, (decayed, _) in self._flat.runs(unit):
            joins = merged and merged[-1][1:] == (a, decayed)
            merged.append((merged.pop()[0] if joins else a, b, decayed))
        return merged
