"""Look-ups in a spec: bytes kept for backward, memory traffic and launches, for a precision cast and eager or compiled."""

from __future__ import annotations

from collections.abc import Iterable

from fullstride.model.spec import Cast, CastCost, Saved, SavedDType, Sublayer


def dtype_bytes(dtype: SavedDType, cast: Cast, compute_bytes: int) -> int:
    """Bytes of an element; `compute_bytes` is the width of the compute dtype (4 for fp32, 2 for bf16)."""
    if dtype == "compute":
        return compute_bytes
    if dtype == "residual":
        return 4 if cast == "autocast" else compute_bytes
    if dtype == "fp32":
        return max(4, compute_bytes)  # in fp64 nothing is narrowed to fp32
    return {"int64": 8, "bool": 1}[dtype]


def is_kept(saved: Saved, cast: Cast, *, compiled: bool) -> bool:
    """Whether this tensor is kept under that cast, eager or compiled."""
    return cast in saved.cast and saved.when in ("always", "compiled" if compiled else "eager")


def saved_bytes(
    sublayers: Iterable[Sublayer],
    *,
    cast: Cast,
    compute_bytes: int,
    compiled: bool = False,
    samples: int = 1,
    sequence_length: int,
) -> float:
    """Bytes kept from forward to backward by one run through these sublayers (one block, or an end of the model).

    Args:
        sublayers: in order of execution.
        cast: the plan's precision cast.
        compute_bytes: width of the compute dtype.
        compiled: whether the block is compiled.
        samples: samples of the micro-batch.
        sequence_length: tokens of a sample.
    """
    tokens = samples * sequence_length
    times = {"token": tokens, "position": sequence_length, "pair": tokens * sequence_length}
    return sum(
        kept.elements * times[kept.per] * dtype_bytes(kept.dtype, cast, compute_bytes)
        for sublayer in sublayers
        for kept in sublayer.saved
        if is_kept(kept, cast, compiled=compiled) and sequence_length > kept.beyond
    )


def cost_of(sublayer: Sublayer, cast: Cast) -> CastCost:
    """Traffic and launches under that cast; a spec without the table answers with its plain fields for every cast."""
    for cost in sublayer.costs:
        if cost.cast == cast:
            return cost
    return CastCost(
        cast=cast,
        moved_elements=sublayer.moved_elements,
        fused_elements=sublayer.fused_elements,
        operators=sublayer.operators,
        fused_operators=len(sublayer.matmuls) + (1 if sublayer.attention or sublayer.fused_elements else 0),
    )
