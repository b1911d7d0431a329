"""Pieces that many families share: norms, activations, rotary embedding, attention that keeps its scores, ends of the model."""

from __future__ import annotations

from fullstride.model.families.shape import ActivationKind, NormKind, Shape
from fullstride.model.spec import Attention
from fullstride.model.tape import Tape, Tensor


def stream(tape: Tape, hidden: int) -> Tensor:
    """The residual stream as a block receives it; kept by the block that needs it."""
    return tape.source("input", hidden, tape.weights)


def norm(tape: Tape, x: Tensor, path: str, size: int, kind: NormKind) -> Tensor:
    """RMSNorm as the unmodified code writes it (arXiv 1910.07467), or LayerNorm; over groups of `size` elements."""
    if kind == "layer":
        return tape.layer_norm(x, path, size)
    tape.parameter(f"{path}.weight", (size,), "norm")
    entry = x.dtype
    wide = tape.to(x, tape.fp32)
    groups = x.elements / size
    root = tape.unary("rstd", tape.add(tape.mean(tape.power(wide, name="square"), groups), name="variance"), keeps="result")
    normed = tape.mul(wide, root, name="normed")
    if kind == "gemma":  # output * (1 + weight.float()), then back to the stream's dtype
        return tape.to(tape.weighted(normed, dtype=tape.fp32), entry)
    if kind == "olmo2":
        return tape.to(tape.weighted(normed), entry)
    return tape.weighted(tape.to(normed, entry))


def activation(tape: Tape, x: Tensor, kind: ActivationKind) -> Tensor:
    """One of transformers' activations; `gelu_new` is written out in eight operators."""
    if kind != "gelu_new":
        return tape.unary(kind, x, keeps="result" if kind == "relu" else "input")
    half = tape.scale(x, name="half")
    inner = tape.scale(tape.add(x, tape.scale(tape.power(x, name="cube"), name="cubic")), name="inner")
    return tape.mul(half, tape.add(tape.unary("tanh", inner, keeps="result"), name="one_plus_tanh"), name="gelu")


def rotary_tables(tape: Tape, shape: Shape, number: int = 0) -> tuple[Tensor, Tensor]:
    """The cosines and sines as a block receives them: counted once, in the embedding part."""
    names = ("cos", "sin") if not number else (f"cos.{number}", f"sin.{number}")
    dtype = tape.fp32 if shape.wide_tables else tape.weights
    cos, sin = (tape.source(n, shape.rotary_dim, dtype, per="position", grad=False, counted=False) for n in names)
    return cos, sin


def rotate(
    tape: Tape, x: Tensor, dim: int, total: int, tables: tuple[Tensor, Tensor], *, back: bool = False, rejoined: bool = False
) -> Tensor:
    """Make x cos + rotate_half(x) sin on the first `dim` of each head's `total` elements (arXiv 2104.09864)."""
    cos, sin = tables
    share = dim / total
    part = x if dim == total else tape.view(x, x.elements * share)
    half = tape.view(part, part.elements / 2)
    turned = tape.cat((tape.scale(half, name="negated"), half), name="turned")
    out = tape.add(tape.mul(part, cos, name="cos_part"), tape.mul(turned, sin, name="sin_part"), name="rotated")
    if rejoined:
        out = tape.cat((out, tape.view(x, x.elements * (1 - share))), name="rejoined")
    return tape.to(out, x.dtype) if back else out


def scored_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, shape: Attention, *, cap: bool) -> Tensor:
    """Attention written out, scores kept: Gemma 2, whose soft cap no fused kernel takes."""
    tape.section.attention = shape
    repeats = shape.num_heads // shape.num_kv_heads
    if repeats > 1:
        k, v = (tape.op("repeated", (t,), t.elements * repeats) for t in (k, v))
    q, k = tape.autocast(q, "compute"), tape.autocast(k, "compute")
    width = shape.num_heads
    scores = tape.op("scores", (q, k), width, dtype=q.dtype, kind="heavy", saves=(q, k), per="pair")
    scores = tape.op("scaled", (scores,), width, per="pair")
    if cap:
        scores = tape.op("over_cap", (scores,), width, per="pair")
        scores = tape.op("capped", (scores,), width, keeps_result=True, per="pair")
        scores = tape.op("times_cap", (scores,), width, per="pair")
    scores = tape.op("masked", (scores,), width, per="pair")
    weights = tape.softmax(scores, per="pair")
    if weights.dtype != q.dtype:
        weights = tape.op("softmax.compute", (weights,), width, dtype=q.dtype, per="pair")
    v = tape.autocast(v, "compute")
    context = tape.op("context", (weights, v), width * shape.value_dim, dtype=q.dtype, kind="heavy", saves=(weights, v))
    return tape.op("context.contiguous", (context,), context.elements)


def embedding(tape: Tape, shape: Shape, path: str) -> None:
    """Token embedding, its scale, and the rotary tables of all blocks."""
    tape.at("embed", "embedding")
    tape.parameter(f"{path}.weight", (shape.vocab, shape.hidden), "embedding")
    ids = tape.source("input_ids", 1, "int64", grad=False)
    x = tape.gather(tape.source("table", 0, tape.weights, counted=False), ids, shape.hidden, name="embedded")
    if shape.embed_scale:
        x = tape.scale(x)
    tape.dropout(x, shape.embed_dropout)
    if not shape.rotary_dim:
        return
    tape.at("rotary_tables", "rotary")
    for number in range(shape.rotary_tables):
        for name in ("cos", "sin"):
            label = name if not number else f"{name}.{number}"
            dtype = tape.fp32 if shape.wide_tables else tape.weights
            table = tape.source(label, shape.rotary_dim, dtype, per="position", grad=False)
            tape.op(f"{label}.made", (table,), shape.rotary_dim, saves=(table,), per="position", launches=3)


def tail(tape: Tape, shape: Shape, norm_path: str, head_path: str = "lm_head", *, head_bias: bool = False) -> None:
    """Final norm, head, and the loss of transformers: logits widened to fp32, log-softmax kept."""
    tape.at("norm", "norm")
    x = norm(tape, stream(tape, shape.hidden), norm_path, shape.hidden, shape.norm)
    tape.at("head", "head")
    if not shape.tied:
        tape.parameter(f"{head_path}.weight", (shape.vocab, shape.hidden), "head")
    if head_bias:
        tape.parameter(f"{head_path}.bias", (shape.vocab,), "head")
    logits = tape.product(x, head_path, shape.vocab, shape.hidden, name="logits")
    if shape.logit_cap:
        logits = tape.scale(tape.unary("capped", tape.scale(logits), keeps="result"))
    tape.at("loss", "loss")
    labels = tape.source("labels", 1, "int64", grad=False)
    log_probs = tape.softmax(tape.to(logits, tape.fp32), name="log_softmax")
    tape.op("nll", (log_probs, labels), 1, saves=(log_probs, labels), kind="reduction")
