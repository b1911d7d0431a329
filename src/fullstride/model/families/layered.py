"""Blocks with LayerNorm: GPT-2, GPT-NeoX, Phi."""

from __future__ import annotations

from fullstride.model.families import parts
from fullstride.model.families.shape import Shape
from fullstride.model.spec import Attention
from fullstride.model.tape import Tape, Tensor


def _core(tape: Tape, q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Tensor:
    tape.at("attn.core", "attention")
    sizes = Attention(num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, value_dim=shape.head_dim)
    return tape.attention(q, k, v, sizes, head_major=shape.rejoined)


def gpt2_block(tape: Tape, shape: Shape) -> None:
    """GPT-2: one fused projection, products as Conv1D."""
    hidden = shape.hidden
    x = parts.stream(tape, hidden)
    tape.at("norm1", "norm")
    normed = parts.norm(tape, x, "ln_1", hidden, "layer")
    tape.at("attn.qkv", "linear")
    qkv = tape.linear(normed, "attn.c_attn", 3 * hidden, hidden, bias=True, conv1d=True)
    q, k, v = (tape.view(qkv, hidden) for _ in range(3))
    context = _core(tape, q, k, v, shape)
    tape.at("attn.out", "linear")
    out = tape.linear(context, "attn.c_proj", hidden, hidden, bias=True, conv1d=True)
    tape.at("residual1", "residual")
    x = tape.add(tape.dropout(out, shape.dropout), x)
    tape.at("norm2", "norm")
    normed = parts.norm(tape, x, "ln_2", hidden, "layer")
    out = _mlp(tape, normed, shape, "mlp.c_fc", "mlp.c_proj", conv1d=True)
    tape.at("residual2", "residual")
    tape.add(x, tape.dropout(out, shape.dropout))


def gpt2_embedding(tape: Tape, shape: Shape) -> None:
    """Token and learned position embeddings."""
    parts.embedding(tape, shape, "transformer.wte")
    tape.at("positions", "embedding")
    tape.parameter("transformer.wpe.weight", (shape.max_positions, shape.hidden), "embedding")
    ids = tape.source("position_ids", 1, "int64", per="position", grad=False)
    table = tape.source("table", 0, tape.weights, counted=False)
    tape.op("looked_up", (table, ids), shape.hidden, dtype=table.dtype, saves=(ids,), per="position")
    tokens = tape.source("embedded", shape.hidden, tape.weights, counted=False)
    tape.dropout(tape.add(tokens), shape.embed_dropout)


def neox_block(tape: Tape, shape: Shape) -> None:
    """GPT-NeoX: attention and MLP side by side, or one after the other."""
    hidden = shape.hidden
    x = parts.stream(tape, hidden)
    tape.at("norm1", "norm")
    normed = parts.norm(tape, x, "input_layernorm", hidden, "layer")
    tape.at("attn.qkv", "linear")
    qkv = tape.linear(normed, "attention.query_key_value", 3 * hidden, hidden, bias=shape.qkv_bias)
    tape.at("attn.rotary", "rotary")
    tables = parts.rotary_tables(tape, shape)
    q, k = (
        parts.rotate(tape, tape.view(qkv, hidden), shape.rotary_dim, shape.head_dim, tables, rejoined=True) for _ in range(2)
    )
    context = _core(tape, q, k, tape.view(qkv, hidden), shape)
    tape.at("attn.out", "linear")
    attn = tape.dropout(tape.linear(context, "attention.dense", hidden, hidden, bias=shape.qkv_bias), shape.dropout)
    if not shape.parallel:
        tape.at("residual1", "residual")
        x = attn = tape.add(attn, x)
    tape.at("norm2", "norm")
    normed = parts.norm(tape, x, "post_attention_layernorm", hidden, "layer")
    out = tape.dropout(_mlp(tape, normed, shape, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), shape.dropout)
    tape.at("residual2", "residual")
    out = tape.add(out, attn)
    if shape.parallel:
        tape.add(out, x)


def phi_block(tape: Tape, shape: Shape) -> None:
    """Phi: one norm for attention and MLP, side by side."""
    hidden, q_size, kv_size = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    x = parts.stream(tape, hidden)
    tape.at("norm1", "norm")
    normed = parts.norm(tape, x, "input_layernorm", hidden, "layer")
    tape.at("attn.qkv", "linear")
    sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
    q, k, v = (tape.linear(normed, f"self_attn.{n}", s, hidden, bias=True) for n, s in sizes)
    if shape.qk_norm != "none":
        tape.at("attn.qk_norm", "norm")
        q = parts.norm(tape, q, "self_attn.q_layernorm", hidden // shape.heads, "layer")
        k = parts.norm(tape, k, "self_attn.k_layernorm", hidden // shape.heads, "layer")
    tape.at("attn.rotary", "rotary")
    tables = parts.rotary_tables(tape, shape)
    q, k = (parts.rotate(tape, t, shape.rotary_dim, shape.head_dim, tables, rejoined=True) for t in (q, k))
    context = _core(tape, q, k, v, shape)
    tape.at("attn.out", "linear")
    attn = tape.dropout(tape.linear(context, "self_attn.dense", hidden, q_size, bias=True), shape.dropout)
    out = tape.dropout(_mlp(tape, normed, shape, "mlp.fc1", "mlp.fc2"), shape.dropout)
    tape.at("residual", "residual")
    tape.add(tape.add(attn, out), x)


def _mlp(tape: Tape, x: Tensor, shape: Shape, up: str, down: str, *, conv1d: bool = False) -> Tensor:
    tape.at("mlp.up", "linear")
    wide = tape.linear(x, up, shape.ffn, shape.hidden, bias=True, conv1d=conv1d)
    tape.at("mlp.activation", "activation")
    wide = parts.activation(tape, wide, shape.activation)
    tape.at("mlp.down", "linear")
    return tape.linear(wide, down, shape.hidden, shape.ffn, bias=True, conv1d=conv1d)
