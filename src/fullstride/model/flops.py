"""Arithmetic of one token, in both conventions; a multiplication and an addition are two operations."""

from __future__ import annotations

from fullstride.model.spec import Attention, FlopConvention, ModelSpec, Sublayer


def attended_tokens(attention: Attention, sequence_length: int, convention: FlopConvention) -> float:
    """Keys that an average query is counted with.

    `full`: all of them, whatever mask or window (PaLM, arXiv 2204.02311 appendix B; torchtitan). `causal`: half of the square
    (Megatron-LM), or what a window w < T leaves of it: w - w^2 / 2T.
    """
    if convention == "full":
        return float(sequence_length)
    window = attention.window if 0 < attention.window < sequence_length else sequence_length
    if not attention.causal:
        return float(window)
    return window - window * window / (2 * sequence_length)


def sublayer_flops_per_token(sublayer: Sublayer, sequence_length: int, convention: FlopConvention) -> float:
    """Forward FLOP of one token in one sublayer: matrix products, and both products of attention."""
    total = sum(2.0 * m.n * m.k * m.rows_per_token for m in sublayer.matmuls)
    if sublayer.attention is not None:
        a = sublayer.attention
        keys = attended_tokens(a, sequence_length, convention)
        total += 2.0 * keys * a.num_heads * (a.head_dim + a.value_dim)
    return total


def forward_flops_per_token(spec: ModelSpec, sequence_length: int, convention: FlopConvention) -> float:
    """Forward FLOP of one token; the embedding's look-up is not counted, the head is.

    Args:
        spec: the network.
        sequence_length: tokens of a sample.
        convention: how attention is counted, see `attended_tokens`.
    """
    ends = sum(sublayer_flops_per_token(s, sequence_length, convention) for s in (*spec.embedding, *spec.tail))
    blocks = sum(
        stack.count * sum(sublayer_flops_per_token(s, sequence_length, convention) for s in stack.sublayers)
        for stack in spec.stacks
    )
    return ends + blocks


def train_flops_per_token(spec: ModelSpec, sequence_length: int, convention: FlopConvention) -> float:
    """Three times the forward: backward makes two products for each one, and recomputation is not useful work."""
    return 3.0 * forward_flops_per_token(spec, sequence_length, convention)
