"""The ledger: all rows of a Plan, and what they add up to at each moment of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Moment, Row
from fullstride.plan.ledger import activations, carriers, states
from fullstride.plan.plan import Plan

RowMaker: TypeAlias = Callable[[Plan, ModelSpec, Cluster], tuple[Row, ...]]

MAKERS: tuple[RowMaker, ...] = (
    states.weights,
    states.optimizer_states,
    states.gradients,
    states.early_gradients,
    activations.activations,
    activations.block_inputs,
    activations.recomputed,
    activations.block_gradients,
    activations.logits,
    carriers.gathered,
    carriers.gather_buffer,
    carriers.reduce_buffers,
    carriers.autocast_casts,
    states.optimizer_temporaries,
    carriers.context,
)
"""Everything that takes memory, one function each."""

OUTSIDE = ("context", "fragmentation")
"""Kinds that torch's allocator does not report."""
FRAGMENTATION = 0.03
"""Share of the allocated peak that the allocator holds in pieces of the wrong size; modelled."""


def ledger(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """Every row of the fullest rank; the last is fragmentation, a share of the peak of the others."""
    rows = [item for make in MAKERS for item in make(plan, spec, cluster)]
    peak = peak_of(moments_of(tuple(rows), inside=True))
    rows.append(
        states.row(
            "fragmentation",
            "fragmentation",
            FRAGMENTATION * peak.bytes,
            f"{FRAGMENTATION:.0%} of the allocated peak",
            states.ALL,
        )
    )
    return tuple(rows)


def moments_of(rows: tuple[Row, ...], *, inside: bool = False) -> tuple[Moment, ...]:
    """The sum of the rows at each moment; `inside` counts what torch's allocator reports."""
    sums = dict.fromkeys(states.ALL, 0)
    for item in rows:
        if inside and item.kind in OUTSIDE:
            continue
        for name in item.moments:
            sums[name] += item.bytes
    return tuple(Moment(name=name, bytes=size) for name, size in sums.items())


def peak_of(moments: tuple[Moment, ...]) -> Moment:
    """The fullest moment."""
    return max(moments, key=lambda moment: moment.bytes)
