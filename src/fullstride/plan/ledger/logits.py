"""Rows for logits and loss, on the stage that has the head; cut by tensor parallelism along the vocabulary."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import BYTES, compute_bytes, master_bytes
from fullstride.plan.ledger.cuts import padded_vocabulary
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import LATE, row
from fullstride.plan.plan import Plan

AHEAD: tuple[MomentName, ...] = ("forward_end",)


def logits(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Logits and the softmax's copies; by chunks, one chunk's and the sums that it leaves."""
    plan = local.plan
    if not local.head.count:
        return ()
    vocabulary = padded_vocabulary(plan, local.spec.vocab_size) // plan.layout.tp
    if plan.loss.kind == "chunked":
        return _chunked(local, vocabulary)
    if plan.shard.carrier == "megatron":
        return _megatron(local, vocabulary)
    count = local.micro_tokens * vocabulary
    forward, loss = copies_of(plan)
    ahead = row("logits, widened, log-softmax", "logits", count * forward, f"tokens x vocabulary x {forward} B", AHEAD)
    return (ahead, row("logits and gradients", "logits", count * loss, f"tokens x vocabulary x {loss} B", ("loss",)))


def copies_of(plan: Plan) -> tuple[int, int]:
    """Bytes of all copies of a logit at the end of forward and in the loss's backward.

    Whole: log-softmax and two gradients of it. Cut over ranks: the logits as they are, one wide copy, and what is made of it
    (`engine/loss.py`); torch's `loss_parallel` (torch/distributed/tensor/parallel/loss.py) holds four wide ones.
    """
    head, wide = BYTES[plan.precision.head], BYTES[plan.precision.loss]
    copy = wide if head != wide else 0
    if plan.layout.tp == 1:
        return head + copy + wide, 3 * wide
    if plan.loss.fused == "operators":
        return head + copy + 2 * wide, 4 * wide
    return head + copy + wide, head + copy + wide


def _chunked(local: Local, vocabulary: int) -> tuple[Row, ...]:
    plan = local.plan
    head, wide = BYTES[plan.precision.head], BYTES[plan.precision.loss]
    copy = wide if head != wide else 0
    chunk = min(plan.loss.chunk_tokens, local.micro_tokens) * vocabulary
    each = 2 * head if plan.compile.mode == "block" else max(head + copy, 2 * wide)  # logsumexp makes a copy
    narrow = head if plan.precision.cast == "autocast" else 0  # the weight's own copy, made once
    weight, hidden = vocabulary * local.spec.hidden_size, local.micro_tokens * local.spec.hidden_size
    held = weight * (max(4, master_bytes(plan)) + narrow) if not plan.adapter.rank else weight * narrow
    moments: tuple[MomentName, ...] = (*AHEAD, "loss")
    return (
        row("one chunk of logits", "logits", chunk * each, f"chunk x vocabulary x {each} B", AHEAD),
        row("gradient of the head's weight", "logits", held, "vocabulary x hidden, summed in fp32", moments),
        row("gradient of the head's input", "logits", hidden * compute_bytes(plan), "tokens x hidden", moments),
    )


def predictions(local: Local) -> int:
    """Further tokens that are predicted at once, each with logits of its own."""
    return len({s.name.split(".")[0] for s in local.head.sublayers if s.name.startswith("mtp")})


def _megatron(local: Local, vocabulary: int) -> tuple[Row, ...]:
    """Vocabulary-parallel cross entropy (megatron/core/tensor_parallel/cross_entropy.py): one fp32 copy, then all in place.

    The scripted fusion (core/fusions) makes a second fp32 copy; Transformer Engine's kernel works in the logits themselves.
    """
    plan, count = local.plan, local.micro_tokens * vocabulary * (1 + predictions(local))
    head = BYTES[plan.precision.head]
    wide = {"script": 8, "native": 0}.get(plan.loss.fused, 4 if head < 4 else 0)
    source = f"tokens x padded vocabulary / tp x ({head} + {wide}) B"
    found = [row("logits and fp32 copies", "logits", count * (head + wide), source, (*AHEAD, "loss"))]
    if plan.loss.fused == "native" and not plan.kernels.gradient_fusion:  # made while logits still stand
        weight = vocabulary * local.spec.hidden_size * head
        found.append(row("gradient of the head's weight", "logits", weight, "vocabulary x hidden", ("loss",)))
    if (waiting := min(plan.overlap.deferred_head, plan.batch.accumulation - 1)) > 0 and plan.layout.pp > 1:
        each = count * head + local.micro_tokens * local.spec.hidden_size * head
        moments: tuple[MomentName, ...] = (*AHEAD, "loss", "backward", "backward_end")
        source = f"{waiting} x (gradient of logits + input of the head)"
        found.append(row("deferred gradients of the head", "logits", waiting * each, source, moments))
    shared = local.spec.family == "megatron-local" and plan.kernels.attention != "sdpa"  # scores stand in the same buffer
    if plan.layout.tp > 1 and plan.layout.sequence_parallel and not shared:
        whole = local.micro_tokens * local.spec.hidden_size * compute_bytes(plan)
        source = "tokens x hidden, in a global buffer that stays"
        found.append(row("gathered input of the head", "communication", whole, source, LATE))
    return tuple(found)
