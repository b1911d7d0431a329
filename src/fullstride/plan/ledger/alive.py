"""How many micro-batches stand between forward and backward on a pipeline rank, for each of its chunks."""

from __future__ import annotations

from fullstride.plan.plan import Plan
from fullstride.plan.schedule.inflight import in_flight, samples_in_flight
from fullstride.plan.stages import chunks_of, place_of


def micro_batch_of(plan: Plan, rank: int) -> int:
    """Samples of the largest micro-batch that a pipeline rank works on."""
    sizes = plan.pipeline.micro_batch_per_stage
    here = [size for index, size in enumerate(sizes) if place_of(plan, index)[0] == rank]
    return max(here, default=plan.batch.micro_batch)


def alive(plan: Plan, rank: int) -> tuple[float, ...]:
    """Micro-batches (of `micro_batch_of` samples) whose activations stand at once, chunk by chunk; 1 without a pipeline.

    A schedule that knows no chunks keeps as many on each. Where stages cut the samples differently, they are counted from the
    schedule's own list.

    Raises:
        RuleBroken: micro-batches of stages that the schedule cannot work with.
    """
    pp, chunks = plan.layout.pp, chunks_of(plan)
    if pp == 1:
        return (1.0,)
    schedule = "1f1b" if plan.pipeline.schedule == "none" else plan.pipeline.schedule
    if sizes := plan.pipeline.micro_batch_per_stage:
        samples = plan.batch.micro_batch * plan.batch.accumulation
        counts = samples_in_flight(schedule, pp, chunks, samples, sizes)[rank]
        return tuple(count / micro_batch_of(plan, rank) for count in counts)
    found = in_flight(schedule, pp, chunks, plan.batch.accumulation, rank)
    return found if len(found) == chunks else found[:1] * chunks
