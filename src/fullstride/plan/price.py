"""What a Plan is predicted to cost on a Cluster: the ledger and the terms, and what they come to."""

from __future__ import annotations

import math
from typing import NamedTuple

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.adapted import step_flops_per_token
from fullstride.plan.cost.table import terms
from fullstride.plan.estimate import Estimate, Term
from fullstride.plan.facts import once
from fullstride.plan.ledger.table import ledger, moments_of, peak_device_bytes
from fullstride.plan.ledger.totals import Totals, totals
from fullstride.plan.placement import slowest
from fullstride.plan.plan import Plan
from fullstride.plan.rules import inert


class Score(NamedTuple):
    """What a search compares: bytes, and seconds where the plan fits."""

    peak_bytes: int
    capacity_bytes: int
    seconds: float
    """Infinite where the plan does not fit: what does not run is not timed."""

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.peak_bytes <= self.capacity_bytes


def score(plan: Plan, spec: ModelSpec, cluster: Cluster, bar: float = math.inf) -> Score | None:
    """The totals of `price` alone, for a search that compares thousands of plans.

    With a `bar` in seconds the time comes first, and None is returned where it does not stay under the bar: the memory of a
    plan that is not fast enough need not be known.
    """
    cluster = slowest(cluster)
    seconds = math.inf
    if bar < math.inf:
        seconds = _seconds(plan, spec, cluster)
        if seconds >= bar:
            return None
    peak = peak_device_bytes(plan, spec, cluster)
    capacity = int(cluster.device.memory_bytes.value)
    if peak > capacity:
        return Score(peak, capacity, math.inf)
    return Score(peak, capacity, seconds if bar < math.inf else _seconds(plan, spec, cluster))


def _seconds(plan: Plan, spec: ModelSpec, cluster: Cluster) -> float:
    return sum(item.exposed_seconds for item in terms(plan, spec, cluster))


def price(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Estimate:
    """Predict bytes and seconds of one step.

    MFU is None where the device's peak in the blocks' dtype is not known. On uneven nodes the slowest counts. The plan is
    expected to pass `rules.check`; settings without effect become warnings.
    """
    cluster = slowest(cluster)
    rows = ledger(plan, spec, cluster)
    sums = totals(rows, cluster)
    costs = (*terms(plan, spec, cluster), *_crowded(plan, sums, cluster))
    seconds = sum(item.exposed_seconds for item in costs)
    tokens = plan.workload.samples_per_step * plan.workload.sequence_length
    rate = tokens / seconds
    full, causal = _mfu(plan, spec, cluster, rate)
    return Estimate(
        plan_hash=plan.plan_hash,
        rows=rows,
        terms=costs,
        moments=moments_of(rows),
        peak_allocated_bytes=sums.peak_allocated_bytes,
        peak_reserved_bytes=sums.peak_reserved_bytes,
        peak_device_bytes=sums.peak_device_bytes,
        out_of_memory_probability=sums.out_of_memory_probability,
        host_bytes=sums.host_bytes,
        disk_bytes=sums.disk_bytes,
        capacity_bytes=int(cluster.device.memory_bytes.value),
        step_seconds=seconds,
        tokens_per_second=rate,
        mfu_full=full,
        mfu_causal=causal,
        warnings=inert(plan),
    )


REMAPPED_BYTES_PER_SECOND = 2e11
"""How fast a CUDA allocator gives cached memory back and takes it anew; from one run of an 8B model that filled its H200."""


def _crowded(plan: Plan, sums: Totals, cluster: Cluster) -> tuple[Term, ...]:
    """What an allocator at the end of its memory costs: it empties its cache and fills it again in every micro-batch.

    It is expected as often as the device is too small for what would be reserved on a larger one; a plan that is expected to
    fit is priced without it, and so is one on a CPU.
    """
    chance = sums.out_of_memory_probability
    if cluster.device.kind == "cpu" or chance <= 0.5:
        return ()
    cached = sums.peak_reserved_bytes - sums.peak_allocated_bytes
    seconds = chance * plan.batch.accumulation * cached / REMAPPED_BYTES_PER_SECOND
    source = "chance that the device is too small x micro-batches x cached bytes / 200 GB/s"
    return (
        Term(
            name="allocator at its limit",
            kind="host",
            seconds=seconds,
            exposed_seconds=seconds,
            source=source,
            confidence="assumed",
        ),
    )


def _mfu(plan: Plan, spec: ModelSpec, cluster: Cluster, rate: float) -> tuple[float | None, float | None]:
    """Share of the dense peak that the model's own work takes, in both conventions; work made again does not count."""
    peak = cluster.device.peak_flops.get(plan.precision.block)
    if peak is None:
        return None, None
    length = plan.workload.sequence_length
    whole = peak.value * plan.layout.world_size
    full, causal = once(
        spec,
        ("flops", length, plan.adapter),
        lambda: (step_flops_per_token(plan, spec, "full"), step_flops_per_token(plan, spec, "causal")),
    )
    return rate * full / whole, rate * causal / whole
