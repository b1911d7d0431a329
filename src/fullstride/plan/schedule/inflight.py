"""How many micro-batches' activations are alive at the peak, by schedule.

A micro-batch is alive on a chunk from its forward until the gradients of that chunk's weights are made from it.
"""

from __future__ import annotations

from functools import lru_cache

from fullstride.plan.schedule.generators import FINAL
from fullstride.plan.schedule.orders import ORDERS, rounds
from fullstride.plan.schedule.placement import placement_of, stage_sizes


def in_flight(schedule: str, pp: int, chunks: int, micro_batches: int, pp_rank: int) -> tuple[float, ...]:
    """Micro-batches alive on each chunk of a rank, at the first moment when most are alive in all.

    Closed forms: GPipe and breadth-first m; 1F1B min(m, p - i); ZB-H1 min(m, p) on every rank; interleaved the
    2(p - i - 1) + (v - 1)p + 1 first forwards, which on rank 0 is 1 + (p - 1)/(pv) times p whole ranks' worth (Narayanan
    et al., 2021; Korthikanti et al., 2022); ZB-V 2p - 1 - i and i + 1.

    Args:
        schedule: as in `generate`.
        pp: ranks of the pipeline.
        chunks: stages on each rank.
        micro_batches: of a step, the same for all stages.
        pp_rank: which rank.
    """
    if schedule in ("gpipe", "bfs"):
        return (float(micro_batches),) * chunks
    if schedule == "interleaved":
        return _interleaved(pp, chunks, micro_batches, pp_rank)
    if schedule == "zb-v":
        return float(min(micro_batches, 2 * pp - 1 - pp_rank)), float(min(micro_batches, pp_rank + 1))
    return (float(min(micro_batches, pp if schedule == "zb-h1" else pp - pp_rank)),)


def _interleaved(pp: int, chunks: int, micro_batches: int, pp_rank: int) -> tuple[float, ...]:
    """Fill the chunks in the order of forward, until the warm-up and one more are done."""
    parts = rounds(micro_batches, pp)
    left = 2 * (pp - 1 - pp_rank) + (chunks - 1) * max(len(part) for part in parts) + 1
    alive = [0] * chunks
    for part in parts:
        for chunk in range(chunks):
            alive[chunk] += min(left, len(part))
            left -= min(left, len(part))
        if not left:
            break
    return tuple(float(count) for count in alive)


@lru_cache(maxsize=512)
def samples_in_flight(schedule: str, pp: int, chunks: int, samples: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Samples alive on each chunk of each rank when most are, where stages cut the samples differently; from the lists.

    Args:
        schedule: as in `generate`.
        pp: ranks of the pipeline.
        chunks: stages on each rank.
        samples: of the step on this pipeline.
        sizes: samples of a micro-batch on each stage.

    Raises:
        RuleBroken: sizes that the schedule cannot work with.
    """
    placement = placement_of(schedule, pp, chunks)
    orders = ORDERS[schedule](placement, samples, stage_sizes(placement, samples, sizes))
    peaks = []
    for order in orders:
        alive, most = [0] * chunks, tuple([0] * chunks)
        for kind, chunk, lo, hi in order:
            if kind == "forward":
                alive[chunk] += hi - lo
                most = tuple(alive) if sum(alive) > sum(most) else most
            elif kind in FINAL:
                alive[chunk] -= hi - lo
        peaks.append(most)
    return tuple(peaks)
