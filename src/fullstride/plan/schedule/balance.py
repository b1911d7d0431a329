"""How many blocks each stage gets, by cost and not by count: the slowest stage sets the pace of a pipeline."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from fullstride.errors import DoesNotFit, RuleBroken

_SLACK = 1e-12
"""Relative difference that is rounding."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Sums from the first block on, and what single stages add."""

    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    extra: tuple[float, ...]
    limits: tuple[float, ...]

    def cost(self, stage: int, lo: int, hi: int) -> float:
        """Seconds of blocks [lo, hi) as that stage."""
        return self.seconds[hi] - self.seconds[lo] + self.extra[stage]

    def last(self, stage: int, lo: int, most: float) -> int:
        """The largest end of a stage that starts at `lo`, takes at most `most` seconds and fits."""
        time = self.seconds[lo] + (most - self.extra[stage]) * (1 + _SLACK)
        size = self.bytes[lo] + self.limits[stage] * (1 + _SLACK)
        return min(bisect_right(self.seconds, time), bisect_right(self.bytes, size)) - 1


def balance_stages(
    block_seconds: tuple[float, ...],
    *,
    pp: int,
    chunks: int = 1,
    embedding_seconds: float = 0.0,
    head_seconds: float = 0.0,
    block_bytes: tuple[float, ...] = (),
    stage_limits: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """Blocks of each stage, first to last, such that the slowest stage is as fast as it can be.

    Exact, by dynamic programming over where stages end; among equals the stages are as equal as they can be (least sum of
    squared seconds). Every stage gets a block at least.

    Args:
        block_seconds: of each block, forward and backward of one sample.
        pp: ranks of the pipeline.
        chunks: stages on each rank.
        embedding_seconds: what the first stage does beside its blocks.
        head_seconds: what the last stage does beside its blocks, loss included.
        block_bytes: of each block, with the micro-batches in flight; empty for no limit.
        stage_limits: bytes that blocks may take on each stage; empty for no limit.

    Raises:
        RuleBroken: fewer blocks than stages.
        DoesNotFit: no split keeps to the limits.
    """
    stages, num = pp * chunks, len(block_seconds)
    if num < stages:
        raise RuleBroken(f"{num} blocks on {stages} stages: each needs one", fix="use fewer ranks or chunks")
    sizes, limits = block_bytes or (0.0,) * num, stage_limits or (math.inf,) * stages
    if len(sizes) != num or len(limits) != stages:
        raise RuleBroken(
            f"{len(sizes)} sizes for {num} blocks, {len(limits)} limits for {stages} stages", fix="give one for each"
        )
    extra = [0.0] * stages
    extra[0] += embedding_seconds
    extra[-1] += head_seconds
    work = _Work(
        seconds=tuple(accumulate(block_seconds, initial=0.0)),
        bytes=tuple(accumulate(sizes, initial=0.0)),
        extra=tuple(extra),
        limits=limits,
    )
    slowest = _slowest(work, stages, num)
    if math.isinf(slowest):
        raise DoesNotFit(f"no split of {num} blocks over {stages} stages keeps to their limits", fix="use more ranks")
    return _most_even(work, stages, num, slowest)


def _slowest(work: _Work, stages: int, num: int) -> float:
    """Seconds of the slowest stage in the best split; infinite if none fits."""
    bound = _even_bound(work, stages, num)
    best = [0.0] + [math.inf] * num
    for stage in range(stages):
        after = [math.inf] * (num + 1)
        for lo in range(num):
            if math.isinf(best[lo]):
                continue
            for hi in range(lo + 1, work.last(stage, lo, bound) + 1):
                worst = max(best[lo], work.cost(stage, lo, hi))
                after[hi] = min(after[hi], worst)
        best = after
    return best[num]


def _even_bound(work: _Work, stages: int, num: int) -> float:
    """Seconds that the best split does not exceed: those of the split by count, if that fits."""
    ends = [stage * num // stages for stage in range(stages + 1)]
    fits = all(work.last(stage, ends[stage], math.inf) >= ends[stage + 1] for stage in range(stages))
    return max(work.cost(stage, ends[stage], ends[stage + 1]) for stage in range(stages)) if fits else math.inf


def _most_even(work: _Work, stages: int, num: int, slowest: float) -> tuple[int, ...]:
    """Of the splits whose slowest stage takes `slowest`, the one with the least sum of squares."""
    best = [0.0] + [math.inf] * num
    began: list[list[int]] = []
    for stage in range(stages):
        after, source = [math.inf] * (num + 1), [0] * (num + 1)
        for lo in range(num):
            if math.isinf(best[lo]):
                continue
            for hi in range(lo + 1, work.last(stage, lo, slowest) + 1):
                total = best[lo] + work.cost(stage, lo, hi) ** 2
                if total < after[hi] * (1 - _SLACK):
                    after[hi], source[hi] = total, lo
        best = after
        began.append(source)
    counts, end = [], num
    for source in reversed(began):
        counts.append(end - source[end])
        end = source[end]
    return tuple(reversed(counts))
