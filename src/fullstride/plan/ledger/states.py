"""Rows for what stays between steps: weights, masters, gradients, optimizer states (ZeRO, arXiv 1910.02054, section 3)."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import MomentName, Row, RowKind
from fullstride.plan.facts import (
    BYTES,
    largest_tensor,
    master_bytes,
    num_parameters,
    num_trainable,
    parts,
    shards,
    whole_weights,
)
from fullstride.plan.plan import Plan

ALL: tuple[MomentName, ...] = ("load", "forward_end", "loss", "backward", "backward_end", "optimizer")
"""The moments that are told apart."""
PIECE_ELEMENTS = 64 * 2**20
"""Gradients that must be widened for the step are, this many elements at a time."""


def row(name: str, kind: RowKind, size: float, source: str, moments: tuple[MomentName, ...], *, exact: bool = False) -> Row:
    """A Row of whole bytes; `modelled` unless its formula counts every tensor."""
    return Row(
        name=name, kind=kind, bytes=round(size), source=source, confidence="exact" if exact else "modelled", moments=moments
    )


def weights(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """What forward reads and what is kept of it: the compute copy (one rank, cast weights), else the weights themselves.

    FSDP2 keeps fp32 shards only, which are the masters; the compute copies are gathered (see `carriers.gathered`).
    """
    count, name = num_parameters(spec), plan.precision.cast
    if plan.shard.carrier == "fsdp2":
        size = count * master_bytes(plan) / shards(plan)
        source = f"P x {master_bytes(plan)} B / {shards(plan)}: FSDP2's shards are the masters"
        return (row("weights (shards)", "master" if name == "weights" else "weights", size, source, ALL, exact=True),)
    if name != "weights":
        return (row("weights", "weights", count * master_bytes(plan), f"P x {master_bytes(plan)} B", ALL, exact=True),)
    return (
        row("weights (compute copy)", "weights", whole_weights(plan, spec), "each part in its compute dtype", ALL, exact=True),
        row("weights (masters)", "master", count * master_bytes(plan), f"P x {master_bytes(plan)} B", ALL, exact=True),
    )


def optimizer_states(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """AdamW's two moments, made before the first step."""
    each = BYTES[plan.precision.optimizer_state]
    size = num_trainable(spec) * 2 * each / shards(plan)
    return (row("AdamW moments", "optimizer", size, f"P x 2 x {each} B / {shards(plan)}", ALL, exact=True),)


def gradients(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """Gradients as they are stored: all at the end of backward, throughout when several micro-batches are summed."""
    count, accumulate = num_trainable(spec), plan.batch.accumulation > 1
    each = BYTES[plan.precision.gradient]
    throughout: tuple[MomentName, ...] = ("forward_end", "loss", "backward", "backward_end", "optimizer")
    last: tuple[MomentName, ...] = ("backward_end", "optimizer")
    if plan.shard.carrier == "ddp":
        return (
            row(
                "gradients (DDP's buckets)",
                "gradients",
                count * each,
                f"P x {each} B, views of buckets that stay",
                throughout,
                exact=True,
            ),
        )
    if plan.shard.carrier == "none":
        buffers = plan.precision.cast == "weights" and plan.precision.gradient != plan.precision.block
        source = f"P x {each} B" + (", in buffers that stay: wider than the weights" if buffers else "")
        if buffers or accumulate:
            return (row("gradients", "gradients", count * each, source, ALL if buffers else throughout, exact=True),)
        late = 0 if spec.tied_embeddings else parts(spec)[0].trainable  # made last, when no block's activations stand
        first = row("gradients", "gradients", (count - late) * each, source, last, exact=True)
        embedding = row("gradient of the embedding", "gradients", late * each, "made last", ("optimizer",), exact=True)
        return (first, embedding) if late else (first,)
    held = master_bytes(plan)
    sharded = row(
        "gradients (shards)",
        "gradients",
        count * held / shards(plan),
        f"P x {held} B / {shards(plan)}",
        throughout if accumulate and plan.shard.stage > 1 else last,
        exact=True,
    )
    if plan.shard.stage == 1 and accumulate:
        wide = BYTES[plan.precision.reduction]
        source = f"P x {wide} B: without reduction FSDP2 sums whole gradients in the reduction dtype"
        whole = row(
            "gradients (whole, between reductions)", "gradients", count * wide, source, ("forward_end", "loss", "backward")
        )
        return (whole, sharded)
    return (sharded,)


def early_gradients(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """The head's gradient, which is there while all activations still are."""
    stored = plan.precision.cast == "weights" and plan.precision.gradient != plan.precision.block
    if plan.shard.carrier != "none" or plan.batch.accumulation > 1 or stored:
        return ()
    head = parts(spec)[-1].trainable or parts(spec)[0].trainable  # tied: the embedding's
    size = head * BYTES[plan.precision.gradient]
    return (row("gradient of the head", "gradients", size, "made first, before any block's", ("backward",)),)


def optimizer_temporaries(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """What the step itself needs: widened gradients under cast weights, and foreach's copies."""
    count, wide, found = num_trainable(spec), master_bytes(plan), []
    if plan.shard.carrier == "none" and plan.precision.gradient != plan.precision.master:
        piece = min(count, max(PIECE_ELEMENTS, largest_tensor(spec)))
        source = f"{piece} elements at a time x {wide} B: the fused step takes one dtype"
        found.append(row("gradients widened for AdamW", "temporary", piece * wide, source, ("optimizer",)))
    if plan.optimizer.implementation == "foreach":
        found.append(
            row(
                "foreach temporaries",
                "temporary",
                count * wide / shards(plan),
                "one copy of exp_avg_sq (its square root)",
                ("optimizer",),
            )
        )
    if plan.optimizer.implementation == "loop":
        largest = largest_tensor(spec) * wide / shards(plan)
        found.append(row("loop temporaries", "temporary", 2 * largest, "two copies of the largest tensor", ("optimizer",)))
    return tuple(found)
