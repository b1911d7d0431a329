"""The Llama line: Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3, OLMo 2, and their mixtures of experts."""

from __future__ import annotations

from fullstride.model.families import latent, moe, parts
from fullstride.model.families.mlp import gated_mlp
from fullstride.model.families.shape import Shape
from fullstride.model.spec import Attention
from fullstride.model.tape import Tape, Tensor


def block(tape: Tape, shape: Shape, *, window: int, sparse: bool) -> None:
    """One decoder layer, in the order of the unmodified code."""
    x = parts.stream(tape, shape.hidden)
    names = _norm_names(shape)
    branch = x
    if names[0]:
        tape.at("norm1", "norm")
        branch = parts.norm(tape, x, names[0], shape.hidden, shape.norm)
    branch = latent.attention(tape, branch, shape) if shape.latent else attention(tape, branch, shape, window)
    x = _join(tape, x, branch, shape, names[1], 1)
    branch = x
    if names[2]:
        tape.at("norm2", "norm")
        branch = parts.norm(tape, x, names[2], shape.hidden, shape.norm)
    branch = moe.experts(tape, branch, shape) if sparse else gated_mlp(tape, branch, shape, shape.ffn)
    _join(tape, x, branch, shape, names[3], 2)


def _norm_names(shape: Shape) -> tuple[str, str, str, str]:
    """Parameter paths of the norms before and after attention, before and after the MLP; empty where there is none."""
    if shape.placement == "post":
        return "", "post_attention_layernorm", "", "post_feedforward_layernorm"
    if shape.placement == "sandwich":
        after = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        return "input_layernorm", "post_attention_layernorm", *after
    return "input_layernorm", "", "post_attention_layernorm", ""


def _join(tape: Tape, x: Tensor, branch: Tensor, shape: Shape, post_norm: str, number: int) -> Tensor:
    if post_norm:
        tape.at(f"post_norm{number}", "norm")
        branch = parts.norm(tape, branch, post_norm, shape.hidden, shape.norm)
    tape.at(f"residual{number}", "residual")
    return tape.add(x, tape.dropout(branch, shape.dropout))


def attention(tape: Tape, x: Tensor, shape: Shape, window: int) -> Tensor:
    """Grouped-query attention with rotary positions."""
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tape.at("attn.qkv", "linear")
    if shape.fused_projections:
        qkv = tape.linear(x, "self_attn.qkv_proj", q_size + 2 * kv_size, shape.hidden)
        q, k, v = tape.view(qkv, q_size), tape.view(qkv, kv_size), tape.view(qkv, kv_size)
    else:
        sizes = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        q, k, v = (tape.linear(x, f"self_attn.{n}", s, shape.hidden, bias=shape.qkv_bias) for n, s in sizes)
    if shape.qk_norm != "none":
        tape.at("attn.qk_norm", "norm")
        full = shape.qk_norm == "full"
        q = parts.norm(tape, q, "self_attn.q_norm", q_size if full else shape.head_dim, shape.norm)
        k = parts.norm(tape, k, "self_attn.k_norm", kv_size if full else shape.head_dim, shape.norm)
    tape.at("attn.rotary", "rotary")
    tables = parts.rotary_tables(tape, shape)
    back = shape.family == "olmo2"
    q, k = (parts.rotate(tape, t, shape.rotary_dim, shape.head_dim, tables, back=back, rejoined=shape.rejoined) for t in (q, k))
    tape.at("attn.core", "attention")
    sizes_of = Attention(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        value_dim=shape.head_dim,
        window=window,
    )
    if shape.eager_scores:
        context = parts.scored_attention(tape, q, k, v, sizes_of, cap=shape.score_cap)
    else:
        context = tape.attention(q, k, v, sizes_of, head_major=shape.rejoined)
    tape.at("attn.out", "linear")
    return tape.linear(context, "self_attn.o_proj", shape.hidden, q_size, bias=shape.out_bias)
