"""How many micro-batches stand between forward and backward on a pipeline rank, for each of its chunks."""

from __future__ import annotations

from fullstride.plan.plan import Plan
from fullstride.plan.schedule.inflight import in_flight
from fullstride.plan.stages import chunks_of


def alive(plan: Plan, rank: int) -> tuple[float, ...]:
    """Micro-batches whose activations stand at once, chunk by chunk; 1 without a pipeline.

    A schedule that knows no chunks keeps as many on each.
    """
    pp, chunks, schedule = plan.layout.pp, chunks_of(plan), plan.pipeline.schedule
    if pp == 1:
        return (1.0,)
    found = in_flight("1f1b" if schedule == "none" else schedule, pp, chunks, plan.batch.accumulation, rank)
    return found if len(found) == chunks else found[:1] * chunks
