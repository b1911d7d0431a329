"""What torch's caching allocator adds to tensors that it counts as allocated.

Requests of 1 to 10 MiB share segments of 20 MiB; a rest of up to 1 MiB is not split off and counts with the tensor before it
(c10/cuda/CUDACachingAllocator.cpp, `should_split`). Optimizer states are one tensor a parameter, so this adds up.
"""

from __future__ import annotations

from fullstride.plan.ledger.cuts import local_elements
from fullstride.plan.ledger.local import Local

MIB = 2**20
SMALL, MEDIUM, SEGMENT = MIB, 10 * MIB, 20 * MIB


def held(local: Local) -> float:
    """Bytes counted beyond the tensors themselves, over masters and both moments of plain data parallelism."""
    if local.plan.shard.stage or not local.parts:
        return 0.0
    sizes = []
    for part in local.parts:
        for _ in range(part.count):
            for sublayer in part.sublayers:
                sizes += [4 * local_elements(p, sublayer, local.plan, local.spec.vocab_size) for p in sublayer.parameters]
    return waste(sizes) + waste([size for size in sizes for _ in range(2)])


def waste(sizes: list[int]) -> float:
    """Bytes that tensors of these sizes, made one after the other, are counted with beyond their own."""
    free: list[int] = []
    total = 0
    for size in sizes:
        if size > MEDIUM:  # a segment of its own in whole 2 MiB
            rest = -size % (2 * MIB)
            total += rest if rest <= SMALL else 0
            continue
        if size <= SMALL:
            total += -size % 512
            continue
        best = min((block for block in free if block >= size), default=None)
        if best is None:
            best = SEGMENT
        else:
            free.remove(best)
        if best - size > SMALL:
            free.append(best - size)
        else:
            total += best - size
    return float(total)
