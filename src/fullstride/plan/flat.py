"""Sizes of the flat buffers of carrier `flat`: one arithmetic for the engine, which makes them, and the ledger."""

from __future__ import annotations

from collections.abc import Iterable

ALIGN = 64
"""Elements: a parameter, and a rank's shard, begin at a multiple of it (128 bytes in bf16), as kernels and NCCL like it."""


def aligned(count: int) -> int:
    """Elements that a parameter takes in a buffer, the hole behind it included."""
    return -(-count // ALIGN) * ALIGN


def flat_size(counts: Iterable[int], shards: int) -> int:
    """Elements of the buffer of a unit.

    Args:
        counts: elements of its parameters (after a tensor-parallel cut).
        shards: ranks that share it; the size is a multiple of them.
    """
    total, step = sum(aligned(count) for count in counts), ALIGN * shards
    return -(-total // step) * step
