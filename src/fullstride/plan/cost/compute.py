"""Terms of computation on the busiest rank: products, attention, memory-bound operators, recompute, loss, optimizer."""

from __future__ import annotations

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.inside import expert_weights, trained_parameters
from fullstride.plan.cost.lanes import again, busiest
from fullstride.plan.cost.logits import loss_passes
from fullstride.plan.cost.pieces import FUSED, gradient_traffic, thread_factor
from fullstride.plan.estimate import Confidence, Term, TermKind
from fullstride.plan.facts import BYTES, experts_cut, steps_in_one_pass
from fullstride.plan.plan import Plan

SEPARATE_PASSES = {"megatron": 6.0, "deepspeed": 12.0}
"""Bytes a parameter that a framework's optimizer moves beside AdamW's own: narrow copy and cleared gradients (Megatron);
gradients read narrow and written wide, weights read wide and written narrow (DeepSpeed's fp16)."""


def term(name: str, kind: TermKind, seconds: float, source: str, confidence: Confidence, exposed: float | None = None) -> Term:
    """A Term; all of it adds to the step unless `exposed` says less."""
    shown = seconds if exposed is None else exposed
    return Term(name=name, kind=kind, seconds=seconds, exposed_seconds=shown, source=source, confidence=confidence)


def products(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Matrix products: forward, and two of the same size in backward, looked up by shape."""
    held = busiest(plan, spec, cluster)
    seconds = sum(h.many * (h.piece.products_forward + h.piece.products_backward) for h in held)
    trust: Confidence = "assumed" if any(h.piece.confidence == "assumed" for h in held) else "modelled"
    source = next((h.piece.source for h in held if h.part.group == "blocks"), "")
    return term("matrix products", "compute", seconds * plan.batch.accumulation, source, trust)


def attention(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Scaled-dot-product attention, forward and backward (FlashAttention-2, arXiv 2307.08691, for the work)."""
    seconds = sum(h.many * (h.piece.attention_forward + h.piece.attention_backward) for h in busiest(plan, spec, cluster))
    trust: Confidence = "modelled" if cluster.attentions else "assumed"
    source = "measured attention table" if cluster.attentions else "roofline"
    if plan.kernels.attention != "sdpa":
        source, trust = "two batched products and passes over whole scores", "assumed"
    return term("attention", "attention", seconds * plan.batch.accumulation, source, trust)


def memory_bound(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Norms, activation products, rotary, residuals, quantising; casts of weights and sums of gradients."""
    seconds = sum(h.many * (h.piece.bound_forward + h.piece.bound_backward) for h in busiest(plan, spec, cluster))
    seconds *= plan.batch.accumulation
    rate = rates.copy_seconds(cluster, gradient_traffic(plan, spec) or 1.0)
    seconds += rate.seconds
    how = "each operator" if plan.compile.mode == "off" and plan.shard.carrier not in FUSED else "fused operators"
    return term("memory-bound operators", "memory_bound", seconds, f"bytes of {how} over {rate.source}", rate.confidence)


def recompute(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Forward work that is done again in backward."""
    seconds = sum(h.recomputed * again(plan, h.piece) for h in busiest(plan, spec, cluster))
    what = {
        "none": "nothing",
        "norm_activation": "memory-bound operators",
        "attention": "the core of attention",
        "full": "all of forward",
    }[plan.recompute.mode]
    return term("recompute", "recompute", seconds * plan.batch.accumulation, f"{what}, again", "modelled")


def loss(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Passes over logits: widening, log-softmax, its backward, narrowing; the head's products are counted with the products."""
    if not any(h.part.group == "head" for h in busiest(plan, spec, cluster)):
        return term("logits and loss", "loss", 0.0, "on another stage", "modelled")
    passes = loss_passes(plan, spec, cluster)
    seconds = passes.seconds * plan.batch.accumulation
    source = f"{passes.each} B a logit over {passes.rate.source}"
    return term("logits and loss", "loss", seconds, source, passes.rate.confidence)


def stepped_parameters(plan: Plan, spec: ModelSpec, cluster: Cluster) -> float:
    """Elements that one rank's optimizer steps: what the busiest rank holds, over the ranks that share it."""
    layout, total = plan.layout, 0.0
    shared = layout.dp_shard * layout.cp if plan.shard.stage >= 1 else 1
    for h in busiest(plan, spec, cluster):
        if not h.part.parameters:
            continue
        here, cut = trained_parameters(h.part, plan), experts_cut(plan, layout.ep)
        sparse = 0.0 if plan.adapter.rank else expert_weights(h.part) / cut
        apart = min(sparse, here)
        total += h.many * ((here - apart) / shared + apart / max(1, shared * layout.tp // cut))
    return total


def _bytes_a_parameter(plan: Plan, cluster: Cluster) -> float:
    """What the step moves: g, m, v and p read, m, v and p written; the norm reads g; clipping is part of the fused step."""
    p, cast_here = plan.precision, plan.precision.cast == "weights" and plan.shard.carrier in ("none", "flat")
    wide = BYTES[p.optimizer_state]
    if steps_in_one_pass(plan, cluster) and cast_here:
        writes_weights = plan.shard.carrier == "none" or plan.shard.stage < 3
        return 6.0 * wide + 2.0 * BYTES[p.gradient] + (BYTES[p.block] if writes_weights else 0.0)
    each = 7.0 * wide
    if plan.optimizer.implementation != "fused":
        each *= 2.6  # some fourteen separate passes (measured on CPU: 3.8 times the time of the fused step)
        each += 2.0 * wide if plan.recipe.clip_norm else 0.0  # the fused step clips on its way
    each += wide + SEPARATE_PASSES.get(plan.shard.carrier, 0.0)  # the norm, taken in any case
    if cast_here and plan.shard.carrier == "none":
        each += (wide + BYTES[p.block]) * (2 if p.gradient != p.master else 1)  # widen, copy back
    return each


def optimizer(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """AdamW as bytes."""
    each = _bytes_a_parameter(plan, cluster)
    away = min(1.0, plan.optimizer.cpu_share + plan.optimizer.nvme_share)
    rate = rates.copy_seconds(cluster, stepped_parameters(plan, spec, cluster) * each * (1 - away))
    return term(
        "optimizer",
        "optimizer",
        rate.seconds * max(1.0, thread_factor(plan, cluster)),
        f"{each:.0f} B a parameter over {rate.source}",
        rate.confidence,
    )
