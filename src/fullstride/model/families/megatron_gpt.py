"""Megatron-LM's GPT, by shape: what its layers keep with their hand-fused kernels (megatron/core/models/gpt, transformer).

For planning only: there are no weights to load. Norm, bias with GELU, SwiGLU, rotary embedding, and bias with dropout and
residual are one kernel each, so a block keeps `34 s b h` bytes with GELU of 4h, dropout and a flash kernel (Korthikanti et al.,
arXiv 2205.05198), scores apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import groupby

from msgspec.structs import replace

from fullstride.model.assemble import assemble
from fullstride.model.spec import Attention, ModelSpec, Stack, Sublayer
from fullstride.model.tape import Tape, Tensor


@dataclass(frozen=True)
class LatentSizes:
    """Multi-head latent attention, as Megatron's MLA has it."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class ExpertSizes:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    grouped: bool = True
    """One grouped product for all experts (`--moe-grouped-gemm`), not one after the other."""


@dataclass(frozen=True, kw_only=True)
class MegatronShape:
    """The arguments of Megatron-LM that decide a GPT's shape; defaults are Megatron's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0
    """0: as many as `heads`."""
    ffn: int = 0
    """0: 4 x hidden (a gated MLP: two thirds of it, to a multiple of 64)."""
    head_dim: int = 0
    """0: hidden / heads."""
    vocab: int = 50257
    positions: int = 1024
    """Longest sequence; with learned positions a table of that many rows."""
    rotary: bool = False
    gated: bool = False
    """SwiGLU instead of GELU."""
    rms_norm: bool = False
    bias: bool = True
    qkv_bias: bool = False
    """Biases of the query, key and value product alone (`--add-qkv-bias`)."""
    qk_norm: bool = False
    untied: bool = False
    dropout: float = 0.1
    implementation: str = "te"
    """`te` (Transformer Engine) or `local` (Megatron's own layers)."""
    experts: ExpertSizes | None = None
    expert_layers: tuple[bool, ...] = ()
    """Which layers are mixtures; empty for all when there are experts."""
    latent: LatentSizes | None = None
    predictions: int = 0
    """Layers of multi-token prediction after the last one, each with logits of its own (`--mtp-num-layers`)."""


def megatron_spec(shape: MegatronShape, name: str) -> ModelSpec:
    """The network that Megatron-LM's pretrain_gpt.py builds from these arguments, before padding of the vocabulary."""
    kinds = _kinds(shape)
    described = {kind: assemble(partial(_block, shape=shape, sparse=kind), compiles=False) for kind in dict.fromkeys(kinds)}
    stacks, first = [], 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        stacks.append(Stack(path="decoder.layers", first=first, count=count, sublayers=described[kind]))
        first += count
    return ModelSpec(
        name=name,
        family=f"megatron-{shape.implementation}",
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        max_sequence=shape.positions,
        tied_embeddings=not shape.untied,
        embedding=assemble(lambda tape: _embedding(tape, shape), compiles=False),
        stacks=tuple(stacks),
        tail=_tail(shape),
    )


def _kinds(shape: MegatronShape) -> list[bool]:
    if shape.experts is None:
        return [False] * shape.layers
    return list(shape.expert_layers) if shape.expert_layers else [True] * shape.layers


def ffn_of(hidden: int, *, gated: bool) -> int:
    """Width of the MLP where `--ffn-hidden-size` is not given: 4 x hidden, gated two thirds of it to a multiple of 64."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _norm(tape: Tape, x: Tensor, path: str, size: int, shape: MegatronShape) -> Tensor:
    """One kernel that keeps its input and a statistic or two for each row."""
    tape.parameter(f"{path}.weight", (size,), "norm")
    if not shape.rms_norm:
        tape.parameter(f"{path}.bias", (size,), "norm")
    names = ("rstd",) if shape.rms_norm else ("mean", "rstd")
    groups = x.elements / size
    statistics = [Tensor(n, groups, tape.fp32, "reduction", len(tape.sections) - 1, (x,)) for n in names]
    return tape.op("normed", (x,), x.elements, saves=(x, *statistics))


def _block(tape: Tape, shape: MegatronShape, *, sparse: bool) -> None:
    """One transformer layer, in the order of the code."""
    x = tape.source("input", shape.hidden, tape.weights)
    tape.at("norm1", "norm")
    normed = _norm(tape, x, "self_attention.linear_qkv.layer_norm", shape.hidden, shape)
    out = _latent(tape, normed, shape, shape.latent) if shape.latent else _attention(tape, normed, shape)
    tape.at("residual1", "residual")
    x = tape.add(x, tape.dropout(out, shape.dropout))
    tape.at("norm2", "norm")
    normed = _norm(tape, x, "mlp.linear_fc1.layer_norm", shape.hidden, shape)
    out = (
        _experts(tape, normed, shape)
        if sparse
        else _mlp(tape, normed, shape, (shape.ffn or ffn_of(shape.hidden, gated=shape.gated)), "mlp")
    )
    tape.at("residual2", "residual")
    tape.add(x, tape.dropout(out, shape.dropout))


def _attention(tape: Tape, x: Tensor, shape: MegatronShape) -> Tensor:
    size = shape.head_dim or shape.hidden // shape.heads
    kv_heads = shape.kv_heads or shape.heads
    q_size, kv_size = shape.heads * size, kv_heads * size
    tape.at("attn.qkv", "linear")
    bias = shape.bias or shape.qkv_bias
    qkv = tape.linear(x, "self_attention.linear_qkv", q_size + 2 * kv_size, shape.hidden, bias=bias)
    q, k, v = tape.view(qkv, q_size), tape.view(qkv, kv_size), tape.view(qkv, kv_size)
    if shape.qk_norm:
        tape.at("attn.qk_norm", "norm")
        q = _norm(tape, q, "self_attention.q_layernorm", size, shape)
        k = _norm(tape, k, "self_attention.k_layernorm", size, shape)
    if shape.rotary:
        tape.at("attn.rotary", "rotary")
        q = tape.op("q_rotated", (q,), q_size)
        k = tape.op("k_rotated", (k,), kv_size)
        v = tape.op("v_apart", (v,), kv_size)
    tape.at("attn.core", "attention")
    sizes = Attention(num_heads=shape.heads, num_kv_heads=kv_heads, head_dim=size, value_dim=size)
    context = tape.attention(q, k, v, sizes)
    tape.at("attn.out", "linear")
    return tape.linear(context, "self_attention.linear_proj", shape.hidden, q_size, bias=shape.bias)


def _latent(tape: Tape, x: Tensor, shape: MegatronShape, mla: LatentSizes) -> Tensor:
    """Down and up projections; query and key are joined from their two parts (core/transformer/multi_latent_attention.py)."""
    heads = shape.heads
    q_size = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank:
        tape.at("attn.q_a", "linear")
        low = tape.linear(x, "self_attention.linear_q_down_proj", mla.q_rank, shape.hidden)
        tape.at("attn.q_norm", "norm")
        low = _norm(tape, low, "self_attention.q_layernorm", mla.q_rank, shape)
        tape.at("attn.q_b", "linear")
        query = tape.linear(low, "self_attention.linear_q_up_proj", q_size, mla.q_rank)
    else:
        tape.at("attn.q", "linear")
        query = tape.linear(x, "self_attention.linear_q_proj", q_size, shape.hidden)
    tape.at("attn.kv_a", "linear")
    packed = tape.linear(x, "self_attention.linear_kv_down_proj", mla.kv_rank + mla.rope_dim, shape.hidden)
    tape.at("attn.kv_norm", "norm")
    low = _norm(tape, tape.view(packed, mla.kv_rank), "self_attention.kv_layernorm", mla.kv_rank, shape)
    tape.at("attn.kv_b", "linear")
    both = tape.linear(low, "self_attention.linear_kv_up_proj", heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    tape.at("attn.rotary", "rotary")
    q = tape.op("query", (query,), q_size)
    k = tape.op("key", (both, packed), q_size)
    v = tape.view(both, heads * mla.value_dim)
    tape.at("attn.core", "attention")
    sizes = Attention(num_heads=heads, num_kv_heads=heads, head_dim=mla.nope_dim + mla.rope_dim, value_dim=mla.value_dim)
    context = tape.attention(q, k, v, sizes)
    tape.at("attn.out", "linear")
    return tape.linear(context, "self_attention.linear_proj", shape.hidden, heads * mla.value_dim)


def _mlp(tape: Tape, x: Tensor, shape: MegatronShape, ffn: int, name: str) -> Tensor:
    tape.at(f"{name}.up", "linear")
    wide = tape.linear(x, f"{name}.linear_fc1", ffn * (2 if shape.gated else 1), shape.hidden, bias=shape.bias)
    tape.at(f"{name}.activation", "activation")
    product = tape.op("activated", (wide,), ffn, saves=(wide,))
    tape.at(f"{name}.down", "linear")
    return tape.linear(product, f"{name}.linear_fc2", shape.hidden, ffn, bias=shape.bias)


def _experts(tape: Tape, x: Tensor, shape: MegatronShape) -> Tensor:
    """Router, rows brought to their experts, grouped products, rows brought back and summed."""
    moe = shape.experts
    assert moe is not None, "a mixture has its sizes"
    k, ffn, hidden = moe.per_token, moe.ffn, shape.hidden
    tape.at("router", "router")
    tape.parameter("mlp.router.weight", (moe.count, hidden), "router")
    scores = tape.softmax(tape.product(x, "mlp.router", moe.count, hidden))
    tape.at("experts" if moe.grouped else "experts.apart", "experts")
    width = ffn * (2 if shape.gated else 1)
    tape.parameter("mlp.experts.linear_fc1.weight", (moe.count, width, hidden), "expert")
    tape.parameter("mlp.experts.linear_fc2.weight", (moe.count, hidden, ffn), "expert")
    places = tape.source("places", k, "int64", grad=False)
    rows = tape.gather(x, places, k * hidden, name="rows_sorted")
    wide = tape.product(rows, "mlp.experts.linear_fc1", width, hidden, rows=k, groups=moe.count)
    product = tape.op("activated", (wide, scores), k * ffn, saves=(wide,), dtype=wide.dtype)
    if not shape.gated:  # SwiGLU takes the router's weights into its kernel
        product = tape.op("weighted", (product, scores), k * ffn, saves=(product,), dtype=product.dtype)
    out = tape.product(product, "mlp.experts.linear_fc2", hidden, ffn, rows=k, groups=moe.count)
    back = tape.gather(out, places, hidden, name="rows_restored")
    if not moe.shared_ffn:
        return back
    shared = _mlp(tape, x, shape, moe.shared_ffn, "shared")
    tape.at("shared_join", "other")
    return tape.add(back, shared)


def _embedding(tape: Tape, shape: MegatronShape) -> None:
    tape.at("embed", "embedding")
    tape.parameter("embedding.word_embeddings.weight", (shape.vocab, shape.hidden), "embedding")
    ids = tape.source("input_ids", 1, "int64", grad=False)
    x = tape.gather(tape.source("table", 0, tape.weights, counted=False), ids, shape.hidden, name="embedded")
    if not shape.rotary:
        tape.at("positions", "embedding")
        tape.parameter("embedding.position_embeddings.weight", (shape.positions, shape.hidden), "embedding")
        x = tape.add(x)
    tape.dropout(x, shape.dropout)


def _ahead(shape: MegatronShape, number: int) -> tuple[Sublayer, ...]:
    """A layer that predicts one token further: norms of stream and embedding, joined by a product, then a layer."""

    def join(tape: Tape) -> None:
        hidden = shape.hidden
        tape.at("norms", "norm")
        x = _norm(tape, tape.source("input", hidden, tape.weights), "enorm", hidden, shape)
        y = _norm(tape, tape.source("other", hidden, tape.weights), "hnorm", hidden, shape)
        tape.at("eh_proj", "linear")
        tape.linear(tape.cat((x, y)), "eh_proj", hidden, 2 * hidden)
        tape.at("final_norm", "norm")
        _norm(tape, tape.source("last", hidden, tape.weights), "final_layernorm", hidden, shape)

    layer = assemble(partial(_block, shape=shape, sparse=bool(_kinds(shape)[-1])), compiles=False)
    return tuple(replace(s, name=f"mtp{number}.{s.name}") for s in (*assemble(join, compiles=False), *layer))


def _tail(shape: MegatronShape) -> tuple[Sublayer, ...]:
    ahead = [sublayer for number in range(shape.predictions) for sublayer in _ahead(shape, number)]

    def forward(tape: Tape) -> None:
        tape.at("norm", "norm")
        x = _norm(tape, tape.source("input", shape.hidden, tape.weights), "decoder.final_layernorm", shape.hidden, shape)
        tape.at("head", "head")
        if shape.untied:
            tape.parameter("output_layer.weight", (shape.vocab, shape.hidden), "head")
        logits = tape.product(x, "output_layer", shape.vocab, shape.hidden, name="logits")
        tape.at("loss", "loss")
        labels = tape.source("labels", 1, "int64", grad=False)
        wide = tape.softmax(tape.to(logits, tape.fp32))
        tape.op("nll", (wide, labels), 1, saves=(wide, labels), kind="reduction")

    return (*ahead, *assemble(forward, compiles=False))
