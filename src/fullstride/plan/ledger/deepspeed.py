"""Rows for DeepSpeed's ZeRO (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py; arXiv 1910.02054).

Weights and gradients in the compute dtype (2P + 2P), masters and moments in fp32 (12P), shared out by stage: 1 the states,
2 the gradients too, 3 the weights too. States are made when the engine starts.
"""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import BYTES, compute_bytes
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import ALL, LAST, STANDING, row
from fullstride.plan.ledger.states import adapters as adapter_bytes
from fullstride.plan.ledger.states import frozen, on_device, whole_weights

MADE: tuple[MomentName, ...] = tuple(name for name in ALL if name != "load")
"""For states: they are made after the weights were loaded and cast."""
OVERLAPPED = 2
"""Buckets of gradients: one fills while one is reduced."""


def weights(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Weights as they are computed with, whole below stage 3; masters in fp32 where those are narrower."""
    plan = local.plan
    whole: float = adapter_bytes(local) if plan.adapter.rank else whole_weights(local)
    share = local.over_shards(local.count, local.experts) / max(1, local.count) if plan.shard.stage == 3 else 1.0
    source = "P in the compute dtype" + (f" / {local.shards}" if plan.shard.stage == 3 else "")
    found = [*frozen(local), row("weights", "weights", whole * share, source, ALL, exact=True)]
    if compute_bytes(plan) < 4:
        size = local.over_shards(local.trainable * 4, local.experts * 4) * on_device(local)
        found.append(row("weights (masters)", "master", size, f"P x 4 B / {local.shards}", MADE, exact=True))
    return tuple(found)


def loading(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """The model as it is built, in fp32, before the engine casts it and makes the states.

    Stage 3 (`zero.Init`) builds and shares out part by part.
    """
    if compute_bytes(local.plan) == 4:
        return ()
    if local.plan.shard.stage == 3:
        block = max((part.parameters for part in local.parts), default=0) * 4
        return (row("the largest part, before its cast", "temporary", block, "its elements x 4 B", ("load",)),)
    return (row("weights before the cast", "temporary", local.count * 4, "P x 4 B: built in fp32", ("load",)),)


def optimizer_states(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """AdamW's two moments, made with the engine."""
    each = BYTES[local.plan.precision.optimizer_state]
    size = local.over_shards(local.trainable * 2 * each, local.experts * 2 * each) * on_device(local)
    return (row("AdamW moments", "optimizer", size, f"P x 2 x {each} B / {local.shards}", MADE, exact=True),)


def gradients(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Whole below stage 2; throughout when several micro-batches are summed."""
    plan = local.plan
    each = BYTES[plan.precision.gradient]
    size: float = local.trainable * each
    if plan.shard.stage >= 2:
        size = local.over_shards(size, local.experts * each)
    moments: tuple[MomentName, ...] = (*STANDING, *LAST) if plan.batch.accumulation > 1 else LAST
    source = f"P x {each} B" + (f" / {local.shards}" if plan.shard.stage >= 2 else "")
    found = [row("gradients", "gradients", size, source, moments, exact=True)]
    if each > compute_bytes(plan) and plan.shard.stage < 2:  # runtime/bf16_optimizer.py: the narrow ones are cleared in place
        narrow = local.trainable * compute_bytes(plan)
        source = f"P x {compute_bytes(plan)} B, zeroed and not freed"
        found.append(row("gradients as computed", "gradients", narrow, source, (*STANDING, *LAST, "checkpoint"), exact=True))
    return tuple(found)


def buckets(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Flat buffers that gradients are reduced in, and whole layers that stage 3 gathers."""
    plan = local.plan
    if not plan.shard.stage:
        return ()
    moments: tuple[MomentName, ...] = ("backward", "backward_end")
    size = OVERLAPPED * min(plan.overlap.bucket_bytes, local.trainable * BYTES[plan.precision.gradient])
    found = [row("gradient buckets", "buckets", size, f"{OVERLAPPED} x bucket size", moments)]
    if plan.shard.stage == 3:
        ahead = 1 + max(1, plan.overlap.prefetch)
        gathered = min(ahead, sum(part.count for part in local.blocks)) * local.largest_block
        source = f"{ahead} blocks: the one computed and those fetched ahead"
        found.append(row("gathered weights", "gathered", gathered, source, (*STANDING, "backward_end")))
    return tuple(found)
