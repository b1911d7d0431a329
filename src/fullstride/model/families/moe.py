"""Mixtures of experts as transformers 5 runs them: rows sorted by expert, grouped products, weighted sum."""

from __future__ import annotations

from fullstride.model.families import parts
from fullstride.model.families.mlp import gated_mlp
from fullstride.model.families.shape import Experts, Shape
from fullstride.model.tape import Tape, Tensor


def experts(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """Router, experts, and the shared expert where there is one."""
    moe = shape.experts
    assert moe is not None, "a mixture has its sizes"
    shared = None
    if moe.shared_gate:  # Qwen2-MoE runs it first
        shared = gated_mlp(tape, x, shape, moe.shared_ffn, path="mlp.shared_expert", name="shared")
    weights = _router(tape, x, shape, moe)
    out = _grouped(tape, x, weights, shape, moe)
    if moe.shared_ffn and not moe.shared_gate:
        shared = gated_mlp(tape, x, shape, moe.shared_ffn, path="mlp.shared_experts", name="shared")
    if shared is None:
        return out
    tape.at("shared.join", "other")
    if moe.shared_gate:
        gate = tape.linear(x, "mlp.shared_expert_gate", 1, shape.hidden)
        shared = tape.mul(tape.unary("sigmoid", gate, keeps="result"), shared)
    return tape.add(out, shared)


def _router(tape: Tape, x: Tensor, shape: Shape, moe: Experts) -> Tensor:
    tape.at("router", "router")
    tape.parameter("mlp.gate.weight", (moe.count, shape.hidden), "router")
    if moe.style == "deepseek":
        # F.linear on fp32 copies of input and weight
        logits = tape.product(tape.to(x, tape.fp32), "mlp.gate", moe.count, shape.hidden)
        scores = tape.unary("sigmoid", logits, keeps="result")
    else:
        logits = tape.product(x, "mlp.gate", moe.count, shape.hidden)
        wide = tape.to(logits, tape.fp32) if moe.style == "mixtral" else logits
        scores = tape.softmax(wide)
    index = tape.source("top_k_index", moe.per_token, "int64", grad=False)
    top = tape.gather(scores, index, moe.per_token, name="top_k", launches=2)
    if moe.normalise:
        total = tape.mean(top, 1)
        top = tape.op("shares", (top, total), moe.per_token, saves=(top, total))
    if moe.style == "deepseek":
        return tape.scale(top)
    return tape.to(top, logits.dtype) if moe.style == "qwen" else top


def _grouped(tape: Tape, x: Tensor, weights: Tensor, shape: Shape, moe: Experts) -> Tensor:
    """Grouped products over rows sorted by expert; `k` rows for each token."""
    k, ffn, hidden = moe.per_token, moe.ffn, shape.hidden
    tape.at("experts", "experts")
    tape.parameter("mlp.experts.gate_up_proj", (moe.count, 2 * ffn, hidden), "expert")
    tape.parameter("mlp.experts.down_proj", (moe.count, hidden, ffn), "expert")
    # Sort by expert, count, sum up, divide, number and scatter the places: small integers, but six launches.
    tape.op("places", (), k, dtype="int64", kind="reduction", grad=False, launches=6)
    rows, order = (tape.source(n, k, "int64", grad=False) for n in ("rows", "order"))
    inverse = tape.source("inverse", k, "int64", grad=False)
    picked = tape.gather(x, rows, k * hidden, name="rows_sorted")
    shares = tape.gather(weights, order, k, name="shares_sorted")
    both = tape.product(picked, "mlp.experts.gate_up_proj", 2 * ffn, hidden, rows=k, groups=moe.count)
    gate, up = tape.view(both, k * ffn), tape.view(both, k * ffn)
    product = tape.mul(parts.activation(tape, gate, shape.activation), up)
    out = tape.product(product, "mlp.experts.down_proj", hidden, ffn, rows=k, groups=moe.count)
    out = tape.gather(tape.mul(out, shares), inverse, k * hidden, name="rows_restored")
    return tape.to(tape.op("summed", (out,), hidden, kind="reduction"), x.dtype)
