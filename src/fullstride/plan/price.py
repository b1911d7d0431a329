"""What a Plan is predicted to cost on a Cluster: the ledger and the terms, and what they come to."""

from __future__ import annotations

import math
from typing import NamedTuple

from fullstride.cluster.cluster import Cluster
from fullstride.model.flops import train_flops_per_token
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.table import terms
from fullstride.plan.estimate import Estimate
from fullstride.plan.facts import once
from fullstride.plan.ledger.table import ledger, moments_of, peak_of
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


def score(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Score:
    """The totals of `price` alone, for a search that compares thousands of plans."""
    cluster = slowest(cluster)
    peak = peak_of(moments_of(ledger(plan, spec, cluster))).bytes
    capacity = int(cluster.device.memory_bytes.value)
    if peak > capacity:
        return Score(peak, capacity, math.inf)
    return Score(peak, capacity, sum(item.exposed_seconds for item in terms(plan, spec, cluster)))


def price(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Estimate:
    """Predict bytes and seconds of one step.

    MFU is None where the device's peak in the blocks' dtype is not known. On uneven nodes the slowest counts. The plan is
    expected to pass `rules.check`;
    settings without effect become warnings.
    """
    cluster = slowest(cluster)
    rows = ledger(plan, spec, cluster)
    moments = moments_of(rows)
    costs = terms(plan, spec, cluster)
    seconds = sum(item.exposed_seconds for item in costs)
    tokens = plan.workload.samples_per_step * plan.workload.sequence_length
    rate = tokens / seconds
    full, causal = _mfu(plan, spec, cluster, rate)
    return Estimate(
        plan_hash=plan.plan_hash,
        rows=rows,
        terms=costs,
        moments=moments,
        peak_allocated_bytes=peak_of(moments_of(rows, inside=True)).bytes,
        peak_device_bytes=peak_of(moments).bytes,
        capacity_bytes=int(cluster.device.memory_bytes.value),
        step_seconds=seconds,
        tokens_per_second=rate,
        mfu_full=full,
        mfu_causal=causal,
        warnings=inert(plan),
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
        ("flops", length),
        lambda: (train_flops_per_token(spec, length, "full"), train_flops_per_token(spec, length, "causal")),
    )
    return rate * full / whole, rate * causal / whole
