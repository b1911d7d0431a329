"""Rows for what forward leaves for backward, sublayer by sublayer, and for logits.

Counted tensor by tensor from the ModelSpec, not from a formula of the hidden size (Korthikanti et al., arXiv 2205.05198,
gives the method; its 34sbh is for a GELU model with dropout).
"""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import (
    BYTES,
    Part,
    compute_bytes,
    fixed_bytes,
    master_bytes,
    micro_tokens,
    num_recomputed,
    once,
    parts,
    product_bytes,
    residual_bytes,
)
from fullstride.plan.ledger.states import row
from fullstride.plan.plan import Plan

STANDING: tuple[MomentName, ...] = ("forward_end", "loss", "backward")


def activations(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """One row a sublayer, over all blocks that keep it; blocks made again keep their input, or their products too."""
    return once(spec, ("activations", _shape(plan)), lambda: _activations(plan, spec))


def _shape(plan: Plan) -> tuple[object, ...]:
    """All of a plan that activations depend on."""
    p, again = plan.precision, plan.recompute
    size = (plan.batch.micro_batch, plan.workload.sequence_length)
    return (*size, p.cast, p.block, p.master, plan.compile.mode, again.mode, again.every)


def _activations(plan: Plan, spec: ModelSpec) -> tuple[Row, ...]:
    sizes: dict[str, float] = {}
    for part in parts(spec):
        again = num_recomputed(plan, part)
        for sublayer in part.sublayers:
            if sublayer.kind == "loss":  # see `logits`
                continue
            size = (part.count - again) * fixed_bytes(sublayer, plan)
            if again and plan.recompute.mode == "norm_activation":
                size += again * product_bytes(sublayer, plan)
            name = sublayer.name if part.group == "blocks" else f"{part.group}: {sublayer.name}"
            sizes[name] = sizes.get(name, 0.0) + size
    source = "tensors saved for backward, " + {"off": "eager", "block": "compiled"}[plan.compile.mode]
    return tuple(row(name, "activations", size, source, STANDING) for name, size in sizes.items() if size)


def block_inputs(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """Inputs of blocks that are made again."""
    again = sum(num_recomputed(plan, part) for part in parts(spec))
    if not again:
        return ()
    size = again * micro_tokens(plan) * spec.hidden_size * residual_bytes(plan)
    return (row("block inputs", "activations", size, f"{again} blocks x tokens x hidden x {residual_bytes(plan)} B", STANDING),)


def recomputed(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """The one block whose activations stand again while its backward runs."""
    sizes = [_made_again(plan, part) for part in parts(spec) if num_recomputed(plan, part)]
    if not sizes:
        return ()
    return (
        row(
            "one block made again",
            "recompute",
            max(sizes),
            "all that it saves, less what was kept",
            ("backward", "backward_end"),
        ),
    )


def _made_again(plan: Plan, part: Part) -> float:
    whole = sum(fixed_bytes(s, plan) for s in part.sublayers)
    kept = sum(product_bytes(s, plan) for s in part.sublayers) if plan.recompute.mode == "norm_activation" else 0.0
    return max(0.0, whole - kept)


def block_gradients(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """Gradients of activations in the block whose backward runs: its widest product's (what they replace is
    let go as they are made), and the stream's.
    """
    blocks = [part for part in parts(spec) if part.group == "blocks"]
    widest = max((m.n * m.rows_per_token for part in blocks for s in part.sublayers for m in s.matmuls), default=0.0)
    stream = 2 * spec.hidden_size * residual_bytes(plan)
    size = micro_tokens(plan) * (widest * compute_bytes(plan) + stream)
    return (
        row(
            "gradients of one block's activations",
            "temporary",
            size,
            "widest product + 2 x residual stream",
            ("backward", "backward_end"),
        ),
    )


def logits(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """Logits and the softmax's copies; by chunks, one chunk's and the sums that it leaves."""
    head, wide = BYTES[plan.precision.head], BYTES[plan.precision.loss]
    copy = wide if head != wide else 0
    if plan.loss.kind == "model":
        count = micro_tokens(plan) * spec.vocab_size
        forward = row(
            "logits, widened, log-softmax",
            "logits",
            count * (head + copy + wide),
            f"tokens x vocabulary x ({head} + {copy} + {wide}) B",
            ("forward_end",),
        )
        backward = row(
            "log-softmax and two gradients",
            "logits",
            count * 3 * wide,
            f"tokens x vocabulary x 3 x {wide} B",
            ("loss",),
        )
        return (forward, backward)
    chunk = min(plan.loss.chunk_tokens, micro_tokens(plan)) * spec.vocab_size
    each = 2 * head if plan.compile.mode == "block" else max(head + copy, 2 * wide)  # logsumexp makes a copy
    narrow = head if plan.precision.cast == "autocast" else 0  # the weight's own copy, made once
    weight, hidden = spec.vocab_size * spec.hidden_size, micro_tokens(plan) * spec.hidden_size
    return (
        row("one chunk of logits", "logits", chunk * each, f"chunk x vocabulary x {each} B", ("forward_end",)),
        row(
            "gradient of the head's weight",
            "logits",
            weight * (max(4, master_bytes(plan)) + narrow),
            "vocabulary x hidden, summed in fp32",
            ("forward_end", "loss"),
        ),
        row("gradient of the head's input", "logits", hidden * compute_bytes(plan), "tokens x hidden", ("forward_end", "loss")),
    )
