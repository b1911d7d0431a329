"""Terms of computation: products, attention, memory-bound operators, recompute, loss, optimizer."""

from __future__ import annotations

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.pieces import Piece, gradient_traffic, pieces, thread_factor
from fullstride.plan.estimate import Confidence, Term, TermKind
from fullstride.plan.facts import BYTES, Part, micro_tokens, num_recomputed, num_trainable, shards
from fullstride.plan.plan import Plan


def term(name: str, kind: TermKind, seconds: float, source: str, confidence: Confidence, exposed: float | None = None) -> Term:
    """A Term; all of it adds to the step unless `exposed` says less."""
    shown = seconds if exposed is None else exposed
    return Term(name=name, kind=kind, seconds=seconds, exposed_seconds=shown, source=source, confidence=confidence)


def products(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Matrix products: forward, and two of the same size in backward, looked up by shape."""
    found = pieces(plan, spec, cluster)
    seconds = sum(p.count * (piece.products_forward + piece.products_backward) for p, piece in found)
    trust: Confidence = "assumed" if any(piece.confidence == "assumed" for _, piece in found) else "modelled"
    source = next((piece.source for p, piece in found if p.group == "blocks"), "")
    return term("matrix products", "compute", seconds * plan.batch.accumulation, source, trust)


def attention(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Scaled-dot-product attention, forward and backward (FlashAttention-2, arXiv 2307.08691, for the work)."""
    found = pieces(plan, spec, cluster)
    seconds = sum(p.count * (piece.attention_forward + piece.attention_backward) for p, piece in found)
    trust: Confidence = "modelled" if cluster.attentions else "assumed"
    source = "measured attention table" if cluster.attentions else "roofline"
    return term("attention", "attention", seconds * plan.batch.accumulation, source, trust)


def memory_bound(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Norms, activation products, rotary, residuals; casts of weights and sums of gradients."""
    found = pieces(plan, spec, cluster)
    seconds = sum(p.count * (piece.bound_forward + piece.bound_backward) for p, piece in found) * plan.batch.accumulation
    rate = rates.copy_seconds(cluster, gradient_traffic(plan, spec) or 1.0)
    seconds += rate.seconds
    how = "each operator" if plan.compile.mode == "off" else "fused operators"
    return term("memory-bound operators", "memory_bound", seconds, f"bytes of {how} over {rate.source}", rate.confidence)


def recompute(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Forward work that is done again in backward."""
    seconds = sum(num_recomputed(plan, part) * again(plan, part, piece) for part, piece in pieces(plan, spec, cluster))
    what = {"none": "nothing", "norm_activation": "memory-bound operators", "full": "all of forward"}[plan.recompute.mode]
    return term("recompute", "recompute", seconds * plan.batch.accumulation, f"{what}, again", "modelled")


def again(plan: Plan, part: Part, piece: Piece) -> float:
    """What one block made again costs."""
    return {"none": 0.0, "norm_activation": piece.bound_forward, "full": piece.forward}[plan.recompute.mode]


def loss(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Passes over logits: widening, log-softmax, its backward, narrowing; the head's products are counted with the products."""
    head, wide, tokens = BYTES[plan.precision.head], BYTES[plan.precision.loss], micro_tokens(plan)
    narrow = 2 * (head + wide) if head != wide else 0  # widen and narrow again
    each = narrow + 6 * wide  # log-softmax reads and writes; nll's gradient; its backward reads two and writes one
    extra = 0.0
    if plan.loss.kind == "chunked":
        each = 3 * head if plan.compile.mode == "block" else narrow + 10 * wide
        chunks = -(-tokens // plan.loss.chunk_tokens)
        extra = (chunks * 8.0 + 6.0) * spec.vocab_size * spec.hidden_size  # the weight's gradient: summed in fp32, scaled once
    rate = rates.copy_seconds(cluster, tokens * spec.vocab_size * each + extra)
    seconds = rate.seconds * plan.batch.accumulation
    return term("logits and loss", "loss", seconds, f"{each} B a logit over {rate.source}", rate.confidence)


def optimizer(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """AdamW as bytes: g, m, v and p read, m, v and p written; the norm reads g; clipping is part of the fused step."""
    wide = BYTES[plan.precision.optimizer_state]
    each = 7.0 * wide
    if plan.optimizer.implementation != "fused":
        each *= 2.6  # some fourteen separate passes (measured on CPU: 3.8 times the time of the fused step)
        each += 2.0 * wide if plan.recipe.clip_norm else 0.0  # the fused step clips on its way
    each += wide  # the norm, taken in any case
    if plan.precision.cast == "weights" and plan.shard.carrier == "none":
        narrow = BYTES[plan.precision.block]
        each += (wide + narrow) * (2 if plan.precision.gradient != plan.precision.master else 1)  # widen, copy back
    count = num_trainable(spec) / shards(plan)
    rate = rates.copy_seconds(cluster, count * each)
    return term(
        "optimizer",
        "optimizer",
        rate.seconds * max(1.0, thread_factor(plan, cluster)),
        f"{each:.0f} B a parameter over {rate.source}",
        rate.confidence,
    )
