"""Multi-head latent attention, as DeepSeek-V3 trains it: keys and values made whole (arXiv 2405.04434, 2412.19437)."""

from __future__ import annotations

from fullstride.model.families import parts
from fullstride.model.families.shape import Shape
from fullstride.model.spec import Attention
from fullstride.model.tape import Tape, Tensor


def attention(tape: Tape, x: Tensor, shape: Shape) -> Tensor:
    """The query through a low-rank pair, k and v from one latent; rotary on a part of each head."""
    mla = shape.latent
    assert mla is not None, "a latent family has its sizes"
    query = _query(tape, x, shape, shape.heads * (mla.nope_dim + mla.rope_dim))
    tape.at("attn.kv_a", "linear")
    packed = tape.linear(x, "self_attn.kv_a_proj_with_mqa", mla.kv_rank + mla.rope_dim, shape.hidden, bias=shape.qkv_bias)
    tape.at("attn.kv_norm", "norm")
    low = parts.norm(tape, tape.view(packed, mla.kv_rank), "self_attn.kv_a_layernorm", mla.kv_rank, shape.norm)
    tape.at("attn.rotary", "rotary")
    tables = parts.rotary_tables(tape, shape)
    q_rot = _interleaved(tape, tape.view(query, shape.heads * mla.rope_dim), tables)
    k_rot = _interleaved(tape, tape.view(packed, mla.rope_dim), tables)
    q = tape.cat((tape.view(query, shape.heads * mla.nope_dim), q_rot), name="query")
    tape.at("attn.kv_b", "linear")
    both = tape.linear(low, "self_attn.kv_b_proj", shape.heads * (mla.nope_dim + mla.value_dim), mla.kv_rank)
    tape.at("attn.expand", "other")
    k_parts = (tape.view(both, shape.heads * mla.nope_dim), tape.view(k_rot, shape.heads * mla.rope_dim))
    k = tape.op("key", k_parts, shape.heads * (mla.nope_dim + mla.rope_dim), dtype=both.dtype, launches=2)
    v = tape.view(both, shape.heads * mla.value_dim)
    tape.at("attn.core", "attention")
    sizes = Attention(
        num_heads=shape.heads, num_kv_heads=shape.heads, head_dim=mla.nope_dim + mla.rope_dim, value_dim=mla.value_dim
    )
    context = tape.attention(q, k, v, sizes, head_major=True)
    tape.at("attn.out", "linear")
    return tape.linear(context, "self_attn.o_proj", shape.hidden, shape.heads * mla.value_dim, bias=shape.out_bias)


def _query(tape: Tape, x: Tensor, shape: Shape, width: int) -> Tensor:
    mla = shape.latent
    assert mla is not None, "a latent family has its sizes"
    tape.at("attn.q", "linear")
    if mla.q_rank is None:
        return tape.linear(x, "self_attn.q_proj", width, shape.hidden)
    low = tape.linear(x, "self_attn.q_a_proj", mla.q_rank, shape.hidden, bias=shape.qkv_bias)
    tape.at("attn.q_norm", "norm")
    low = parts.norm(tape, low, "self_attn.q_a_layernorm", mla.q_rank, shape.norm)
    tape.at("attn.q_b", "linear")
    return tape.linear(low, "self_attn.q_b_proj", width, mla.q_rank)


def _interleaved(tape: Tape, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotation on even and odd slices, then joined."""
    cos, sin = (tape.view(t, t.elements / 2) for t in tables)
    even, odd = tape.view(x, x.elements / 2), tape.view(x, x.elements / 2)
    first = tape.add(tape.mul(even, cos), tape.mul(odd, sin))
    second = tape.add(tape.mul(odd, cos), tape.mul(even, sin))
    return tape.cat((first, second), name="rotated")
