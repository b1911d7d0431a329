"""The cost: all terms of a Plan's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost import comm, compute, host, pipeline
from fullstride.plan.estimate import Term
from fullstride.plan.plan import Plan

TermMaker: TypeAlias = Callable[[Plan, ModelSpec, Cluster], Term]

DEVICE: tuple[TermMaker, ...] = (
    compute.products,
    compute.attention,
    compute.memory_bound,
    compute.recompute,
    compute.loss,
    compute.optimizer,
    comm.all_reduce,
    comm.own_reduce,
    comm.gather,
    comm.reduce,
    comm.copies,
    comm.tensor,
    comm.context,
    comm.experts,
    pipeline.sends,
    pipeline.bubble,
    host.offload,
)
"""What the device does, one function each."""


AFTER = ("bubble", "optimizer", "reduction of gradients", "offload")
"""Kinds and names of device work that does not hide launches: waiting, and what follows the last micro-batch."""


def terms(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Term, ...]:
    """Every term that takes time; the step is the sum of their exposed seconds."""
    work = [make(plan, spec, cluster) for make in DEVICE]
    busy = sum(item.exposed_seconds for item in work if item.kind not in AFTER and item.name not in AFTER)
    work.append(host.launches(plan, spec, cluster, busy))
    work.append(host.data(plan, spec, cluster))
    work.append(host.stragglers(plan, cluster, sum(item.exposed_seconds for item in work)))
    return tuple(item for item in work if item.seconds > 0)
