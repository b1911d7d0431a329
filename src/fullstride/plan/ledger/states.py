"""Rows for what stays between steps: weights, masters, gradients, optimizer states (ZeRO, arXiv 1910.02054, section 3)."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import MomentName, Row, RowKind
from fullstride.plan.facts import BYTES, master_bytes, steps_in_one_pass, weight_bytes
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import ALL, LAST, row

PIECE_ELEMENTS = 64 * 2**20
"""Gradients that must be widened for the step are, this many elements at a time."""


def on_device(local: Local) -> float:
    """Share of masters and moments that is not in host memory or on disk."""
    optimizer = local.plan.optimizer
    return 1.0 - optimizer.cpu_share - optimizer.nvme_share


def mastered(local: Local) -> int:
    """Elements that have a master weight: with adapters, the trained ones."""
    return local.trainable if local.plan.adapter.rank else local.count


def mastered_share(local: Local) -> float:
    """Of those, what the fullest rank holds."""
    return local.fullest_share(trainable=local.plan.adapter.rank > 0)


def weights(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What forward reads and what is kept of it: the compute copy (one rank, cast weights), else the weights themselves.

    FSDP2 keeps fp32 shards only, which are the masters; the compute copies are gathered (see `carriers.gathered`).
    """
    plan, count, name = local.plan, mastered(local), local.plan.precision.cast
    wide, found = master_bytes(plan), list(frozen(local))
    if plan.shard.carrier == "fsdp2":
        size = mastered_share(local) * wide
        source = f"P x {wide} B / {local.shards}: FSDP2's shards are the masters"
        kind: RowKind = "master" if name == "weights" else "weights"
        return (*found, row("weights (shards)", kind, size * on_device(local), source, ALL, exact=True))
    if name != "weights":
        return (*found, row("weights", "weights", count * wide, f"P x {wide} B", ALL, exact=True))
    trained = whole_weights(local) if not plan.adapter.rank else adapters(local)
    return (
        *found,
        row("weights (compute copy)", "weights", trained, "each part in its compute dtype", ALL, exact=True),
        row("weights (masters)", "master", count * wide * on_device(local), f"P x {wide} B", ALL, exact=True),
    )


def whole_weights(local: Local) -> int:
    """Bytes of this rank's weights as they are computed with."""
    return sum(part.count * part.parameters * weight_bytes(local.plan, part) for part in local.parts)


def adapters(local: Local) -> int:
    """Bytes of the adapters as they are computed with."""
    return sum(part.count * part.adapters * weight_bytes(local.plan, part) for part in local.parts)


def frozen(local: Local) -> tuple[Row, ...]:
    """Weights under adapters: one copy in the compute dtype; no gradients, masters or moments."""
    if not local.plan.adapter.rank:
        return ()
    plan = local.plan
    shards = local.shards if plan.shard.stage == 3 or plan.shard.carrier == "fsdp2" else 1
    size = (whole_weights(local) - adapters(local)) / shards
    if plan.shard.carrier == "fsdp2" and plan.layout.tp == 1:
        size = sum(part.count * local.whole_rows(part, False) * weight_bytes(plan, part) for part in local.parts)
    return (row("frozen weights", "weights", size, f"(P - adapters) in the compute dtype / {shards}", ALL, exact=True),)


def optimizer_states(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """AdamW's two moments, made before the first step."""
    each = BYTES[local.plan.precision.optimizer_state]
    size = local.fullest_share(trainable=True) * 2 * each * on_device(local)
    return (row("AdamW moments", "optimizer", size, f"P x 2 x {each} B / {local.shards}", ALL, exact=True),)


def gradients(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Gradients as they are stored: all at the end of backward, throughout when several micro-batches are summed."""
    plan, count, accumulate = local.plan, local.trainable, local.plan.batch.accumulation > 1
    each = BYTES[plan.precision.gradient]
    throughout: tuple[MomentName, ...] = ("forward_end", "loss", "backward", "backward_end", "optimizer")
    if plan.shard.carrier == "ddp":
        source = f"P x {each} B, views of buckets that stay"
        return (row("gradients (DDP's buckets)", "gradients", count * each, source, throughout, exact=True),)
    if plan.shard.carrier == "none":
        buffers = plan.precision.cast == "weights" and plan.precision.gradient != plan.precision.block
        source = f"P x {each} B" + (", in buffers that stay: wider than the weights" if buffers else "")
        if buffers or accumulate:
            return (row("gradients", "gradients", count * each, source, ALL if buffers else throughout, exact=True),)
        late = 0 if local.spec.tied_embeddings else local.embedding.trainable  # made last, when no block's activations stand
        first = row("gradients", "gradients", (count - late) * each, source, LAST, exact=True)
        embedding = row("gradient of the embedding", "gradients", late * each, "made last", ("optimizer",), exact=True)
        return (first, embedding) if late else (first,)
    held = master_bytes(plan)
    sharded = row(
        "gradients (shards)",
        "gradients",
        local.fullest_share(trainable=True) * held,
        f"P x {held} B / {local.shards}",
        throughout if accumulate and plan.shard.stage > 1 else LAST,
        exact=True,
    )
    if plan.shard.stage == 1 and accumulate:
        wide = BYTES[plan.precision.reduction]
        source = f"P x {wide} B: without reduction FSDP2 sums whole gradients in the reduction dtype"
        moments: tuple[MomentName, ...] = ("forward_end", "loss", "backward")
        return (row("gradients (whole, between reductions)", "gradients", count * wide, source, moments), sharded)
    return (sharded,)


def early_gradients(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """The head's gradient, which is there while all activations still are."""
    plan = local.plan
    stored = plan.precision.cast == "weights" and plan.precision.gradient != plan.precision.block
    if plan.shard.carrier != "none" or plan.batch.accumulation > 1 or stored:
        return ()
    head = local.embedding.trainable if local.spec.tied_embeddings else local.head.trainable
    size = head * BYTES[plan.precision.gradient]
    return (row("gradient of the head", "gradients", size, "made first, before any block's", ("backward",)),)


def optimizer_temporaries(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What the step itself needs: widened gradients under cast weights, and foreach's copies."""
    plan, count, wide, found = local.plan, local.trainable, master_bytes(local.plan), []
    narrow = plan.precision.gradient != plan.precision.master and not steps_in_one_pass(plan, cluster)
    if plan.shard.carrier == "none" and narrow:
        piece = min(count, max(PIECE_ELEMENTS, local.largest_tensor))
        source = f"{piece} elements at a time x {wide} B: the fused step takes one dtype"
        found.append(row("gradients widened for AdamW", "temporary", piece * wide, source, ("optimizer",)))
    if plan.optimizer.implementation == "foreach":
        size = local.over_shards(count * wide, local.experts * wide)
        source = "one copy of exp_avg_sq (its square root)"
        found.append(row("foreach temporaries", "temporary", size, source, ("optimizer",)))
    if plan.optimizer.implementation == "loop":
        largest = local.largest_tensor * wide / local.shards
        found.append(row("loop temporaries", "temporary", 2 * largest, "two copies of the largest tensor", ("optimizer",)))
    return tuple(found)
