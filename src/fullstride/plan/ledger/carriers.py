"""Rows for what carriers and libraries hold: gathered weights, reduction buffers, casts, context."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import BYTES, compute_bytes, num_resharded, weight_bytes
from fullstride.plan.ledger.activations import num_again
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import STANDING, assumed, row
from fullstride.plan.ledger.states import whole_weights

CUDA_CONTEXT_BYTES = 600 * 2**20
NCCL_BYTES = 900 * 2**20
"""1.3 to 1.6 GiB were seen for both together at BigScience; current drivers load kernels lazily and take less."""
CPU_CONTEXT_BYTES = 450 * 2**20
"""Resident memory of a Python process with torch and transformers loaded."""


def gathered(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Whole weights that stand under FSDP2: all of them below ZeRO-3, else those in flight and those not freed."""
    plan = local.plan
    if plan.shard.carrier != "fsdp2":
        return ()
    block, pieces = local.largest_block, local.parts
    standing: tuple[MomentName, ...] = STANDING
    if plan.shard.stage < 3:
        if plan.batch.accumulation > 1:  # they stay to the last micro-batch's backward
            standing = (*standing, "backward_end")
        source = "all, from first forward to last backward"
        return (row("gathered weights", "gathered", whole_weights(local), source, standing),)
    kept = sum((p.count - num_resharded(plan, p)) * p.parameters * weight_bytes(plan, p) for p in pieces)
    last = local.head
    head = last.parameters * weight_bytes(plan, last) if num_resharded(plan, last) else 0
    freed = sum(num_resharded(plan, part) for part in pieces if part.group == "blocks")
    ahead = max(1, plan.overlap.prefetch)
    flight = min(freed, 1 + ahead) * block
    first = local.embedding.parameters * weight_bytes(plan, local.embedding) + block
    return (
        row("gathered weights", "gathered", kept + head, "parts that are kept, and the head", ("forward_end", "loss")),
        row(
            "gathered weights in backward",
            "gathered",
            kept + flight,
            f"kept parts, {1 + ahead} blocks in flight",
            ("backward",),
        ),
        row("gathered weights of the first parts", "gathered", first, "embedding and one block", ("backward_end",)),
    )


def gather_buffer(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """FSDP2 gathers into a flat buffer, then copies out."""
    plan = local.plan
    if plan.shard.carrier != "fsdp2":
        return ()
    moments: tuple[MomentName, ...] = ("forward_end", "backward", "backward_end") if plan.shard.stage == 3 else ("forward_end",)
    return (row("all-gather buffer", "communication", local.largest_block, "one block, flat", moments),)


def reduce_buffers(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Whole gradients of the part being reduced, and the flat input of reduce-scatter."""
    plan = local.plan
    if plan.shard.carrier != "fsdp2":
        return ()
    wide = BYTES[plan.precision.reduction]
    size = max(part.trainable * (weight_bytes(plan, part) + wide) for part in local.parts)
    source = f"the largest part, as computed and x {wide} B flat"
    found = [row("gradients being reduced", "communication", size, source, ("backward", "backward_end"))]
    if plan.batch.accumulation > 1 and plan.shard.stage > 1:  # the last reduction's input is let go when the next one starts
        first = local.embedding.trainable * wide
        found.append(
            row("input of the last reduction", "communication", first, f"the embedding x {wide} B", ("forward_end", "loss"))
        )
    return tuple(found)


def autocast_casts(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Narrow copies of weights that autocast makes once a forward and backward needs again.

    They live in autocast's cache to the end of forward, and in the saved tensors of products to their backward; blocks
    that are made again cast again.
    """
    plan = local.plan
    if plan.precision.cast != "autocast":
        return ()
    size, kept, total = compute_bytes(plan), 0, 0
    for part in local.parts:
        total += part.count * part.matmul_weights
        kept += (part.count - num_again(local, part)) * part.matmul_weights
    found = [
        row("autocast's copies of weights", "temporary", total * size, f"weights of products x {size} B", ("forward_end",))
    ]
    if kept:
        found.append(
            row("autocast's copies, saved", "temporary", kept * size, "until their products' backward", ("loss", "backward"))
        )
    return tuple(found)


def context(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What the driver and the communication library take before the first tensor."""
    if cluster.device.kind == "cpu":
        return (assumed("Python, torch and libraries", "context", CPU_CONTEXT_BYTES, "assumed"),)
    found = [assumed("CUDA context", "context", CUDA_CONTEXT_BYTES, "assumed")]
    if local.plan.layout.world_size > 1:
        found.append(assumed("NCCL buffers", "context", NCCL_BYTES, "assumed"))
    return tuple(found)
