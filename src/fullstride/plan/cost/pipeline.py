"""Terms of the pipeline: the bubble, and messages between stages."""

from __future__ import annotations

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.compute import term
from fullstride.plan.cost.inside import ranks_inside
from fullstride.plan.cost.lanes import ranks
from fullstride.plan.cost.pieces import local_tokens
from fullstride.plan.estimate import Term
from fullstride.plan.facts import compute_bytes
from fullstride.plan.plan import Plan
from fullstride.plan.stages import chunks_of

BUBBLE_OF_1F1B = {"zb-h1": 1 / 3, "zb-v": 1 / 6}
"""Of the bubble of 1F1B, with forward and both halves of backward alike (Qi et al., arXiv 2401.10241 and 2405.15362)."""
HIDDEN_SENDS = 0.8
"""Share of messages that interleaved schedules hide, which receive a chunk ahead (Megatron's overlap_p2p_comm); assumed."""


def bubble(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """The busiest rank waits while the pipeline fills and drains: one micro-batch on each of the other ranks, over the chunks
    where they interleave (Narayanan et al., arXiv 2104.04473, where all are alike: p - 1 of them).
    """
    stages, schedule = plan.layout.pp, plan.pipeline.schedule
    if stages == 1:
        return term("pipeline bubble", "bubble", 0.0, "one stage", "modelled")
    found = ranks(plan, spec, cluster)
    share = BUBBLE_OF_1F1B.get(schedule, 1.0)
    if schedule in ("interleaved", "bfs"):
        share /= chunks_of(plan)
    waiting = share * (sum(found.filling) - found.filling[found.seconds.index(max(found.seconds))])
    return term("pipeline bubble", "bubble", waiting, f"the other {stages - 1} stages x {share:.3g}, {schedule}", "modelled")


def sends(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Activations to the next stage and gradients back, for each micro-batch and chunk, and along the way while it fills."""
    layout, chunks = plan.layout, chunks_of(plan)
    if layout.pp == 1:
        return term("messages between stages", "comm", 0.0, "one stage", "modelled")
    cut = layout.tp if layout.sequence_parallel else 1
    size = local_tokens(plan) * spec.hidden_size * compute_bytes(plan) / cut
    near = ranks_inside(plan, cluster, "pp")
    rate = rates.collective_seconds(cluster, "send_recv", size, 2, per_node=2 if near > 1 else 1)
    steady = 2 * chunks * plan.batch.accumulation * rate.seconds
    filling = 2 * (layout.pp - 1) * rate.seconds
    hidden = HIDDEN_SENDS if plan.pipeline.schedule in ("interleaved", "bfs", "zb-v") else 0.0
    source = f"{size / 2**20:.1f} MiB a message, {rate.source}"
    return term("messages between stages", "comm", steady + filling, source, rate.confidence, steady * (1 - hidden) + filling)
