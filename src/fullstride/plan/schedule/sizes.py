"""A micro-batch size for each stage, chosen by simulation under a memory limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.files import Value
from fullstride.plan.schedule.placement import placement_of
from fullstride.plan.simulate import Durations, simulate_schedule
from fullstride.units import format_bytes

Sizes: TypeAlias = tuple[int, ...]
DurationsOf: TypeAlias = Callable[[Sizes], Durations]
"""Durations a sample for given micro-batch sizes, since kernels on more samples at once are more efficient."""


class SizeTrial(Value, frozen=True, kw_only=True):
    """Sizes, and what the simulator says of them."""

    sizes: tuple[int, ...]
    """Samples of a micro-batch on each stage."""
    step_seconds: float
    bubble_share: float
    peak_bytes: tuple[float, ...]
    """Of each rank."""
    excess_bytes: float
    """Over the limit, on the rank where most; 0 if it fits."""


class SizeChoice(Value, frozen=True, kw_only=True):
    """The best sizes, and what they were compared with."""

    best: SizeTrial
    uniform: SizeTrial | None
    """The best with one size on all stages; None if none fits."""
    proportional: SizeTrial | None
    """`proportional_micro_batches` from the best uniform size; None where the schedule cannot work with it."""
    tried: int
    """Simulations."""
    exhaustive: bool
    """Whether all sizes that divide the samples were tried; else neighbours of the best, until none was better."""


@dataclass(slots=True)
class _Search:
    """The question, and the answers so far."""

    schedule: str
    pp: int
    chunks: int
    samples: int
    durations: DurationsOf
    limits: tuple[float, ...]
    trials: dict[Sizes, SizeTrial | None] = field(default_factory=dict)

    def trial(self, sizes: Sizes) -> SizeTrial | None:
        """Simulate; None where the schedule refuses the sizes."""
        if sizes not in self.trials:
            self.trials[sizes] = self._simulated(sizes)
        return self.trials[sizes]

    def _simulated(self, sizes: Sizes) -> SizeTrial | None:
        if any(max(pair) % min(pair) for pair in itertools.pairwise(sizes)):
            return None
        try:
            found = simulate_schedule(self.schedule, self.pp, self.chunks, self.samples, sizes, self.durations(sizes))
        except RuleBroken:
            return None
        peaks = tuple(rank.peak_bytes for rank in found.ranks)
        over = [peak - limit for peak, limit in zip(peaks, self.limits, strict=True)] if self.limits else [0.0]
        return SizeTrial(
            sizes=sizes,
            step_seconds=found.step_seconds,
            bubble_share=found.bubble_share,
            peak_bytes=peaks,
            excess_bytes=max(0.0, *over),
        )


def choose_micro_batches(
    schedule: str,
    pp: int,
    chunks: int,
    samples: int,
    durations: Durations | DurationsOf,
    *,
    limits: tuple[float, ...] = (),
    largest: int = 0,
    most_tries: int = 300,
) -> SizeChoice:
    """The sizes with the shortest step that fit; with equal steps, those with the lower peak.

    Args:
        schedule: as in `generate`.
        pp: ranks of the pipeline.
        chunks: stages on each rank.
        samples: samples of the step on this pipeline; sizes are its divisors.
        durations: of the stages, or a function that gives them for given sizes.
        limits: bytes that each rank has; empty for no limit.
        largest: no size above this; 0 for no bound.
        most_tries: simulations up to which all combinations are tried; beyond, single stages and ends of the pipeline are
            changed as long as that helps.

    Raises:
        RuleBroken: the schedule does not exist in this form with any size.
        DoesNotFit: no sizes that were tried fit.
    """
    num_stages = placement_of(schedule, pp, chunks).num_stages
    if limits and len(limits) != pp:
        raise RuleBroken(f"{len(limits)} memory limits for {pp} ranks", fix="give one for each rank")
    of = durations if callable(durations) else lambda _: durations
    search = _Search(schedule, pp, chunks, samples, of, limits)
    top = min(samples, largest or samples)
    allowed = [size for size in range(1, top + 1) if samples % size == 0]
    uniform = _best(search.trial((size,) * num_stages) for size in allowed)
    if uniform is None:
        raise RuleBroken(
            f"{samples} samples are too few for schedule {schedule} on {pp} ranks", fix="use more samples or another schedule"
        )
    exhaustive = len(allowed) ** num_stages <= most_tries
    if exhaustive:
        best = _best(search.trial(sizes) for sizes in itertools.product(allowed, repeat=num_stages))
    else:
        best = _climb(search, uniform, allowed, most_tries)
    assert best is not None
    if best.excess_bytes:
        over = format_bytes(math.ceil(best.excess_bytes))
        raise DoesNotFit(
            f"no micro-batch sizes fit: the closest, {best.sizes}, exceed the limit by {over}", fix="use more ranks"
        )
    each = [stage.forward_seconds + stage.input_grad_seconds + stage.weight_grad_seconds for stage in of(uniform.sizes).stages]
    return SizeChoice(
        best=best,
        uniform=None if uniform.excess_bytes else uniform,
        proportional=search.trial(proportional_micro_batches(uniform.sizes[0], tuple(each))),
        tried=len(search.trials),
        exhaustive=exhaustive,
    )


def proportional_micro_batches(base: int, stage_seconds: tuple[float, ...]) -> Sizes:
    """A rule of thumb for comparison: sizes in proportion to each stage's compute, by powers of two.

    It gives the largest micro-batches to the stages with the most compute, which then also hold the most activations, and
    does not shorten their work: the simulator's choice is the one to use.

    Args:
        base: samples of a micro-batch on a stage of mean cost.
        stage_seconds: compute of each stage for one sample.
    """
    mean = sum(stage_seconds) / len(stage_seconds)
    sizes = [base * 2.0 ** round(math.log2(seconds / mean)) if seconds > 0 else 1.0 for seconds in stage_seconds]
    return tuple(max(1, int(size)) for size in sizes)


def _better(one: SizeTrial, two: SizeTrial) -> bool:
    """Whether the first fits better, is faster, or is as fast with a lower peak."""
    if one.excess_bytes != two.excess_bytes:
        return one.excess_bytes < two.excess_bytes
    if not math.isclose(one.step_seconds, two.step_seconds, rel_tol=1e-9):
        return one.step_seconds < two.step_seconds
    return max(one.peak_bytes) < max(two.peak_bytes) * (1 - 1e-9)


def _best(trials: Iterator[SizeTrial | None]) -> SizeTrial | None:
    best: SizeTrial | None = None
    for trial in trials:
        if trial is not None and (best is None or _better(trial, best)):
            best = trial
    return best


def _climb(search: _Search, start: SizeTrial, allowed: list[int], most_tries: int) -> SizeTrial:
    """Change one stage, the stages up to one or those from one on, as long as that helps."""
    best, before = start, None
    while best is not before and len(search.trials) < most_tries:
        before = best
        for sizes in _neighbours(best.sizes, allowed):
            trial = search.trial(sizes) if len(search.trials) < most_tries else None
            if trial is not None and _better(trial, best):
                best = trial
    return best


def _neighbours(sizes: Sizes, allowed: list[int]) -> Iterator[Sizes]:
    num = len(sizes)
    parts = {
        *((place, place + 1) for place in range(num)),
        *((0, end) for end in range(1, num)),
        *((at, num) for at in range(1, num)),
    }
    for lo, hi in sorted(parts, key=lambda part: (part[0] - part[1], part)):
        for size in reversed(allowed):
            yield (*sizes[:lo], *(size,) * (hi - lo), *sizes[hi:])
