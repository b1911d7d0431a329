"""Rows for what torch's caching allocator reserves beyond what stands allocated.

Three causes were found in runs on one and two GPUs (`benchmarks/results`) and in torchtitan's published figures, which are of
reserved bytes: a freed block that is too small for what is asked next and stays; blocks of other streams, which have free lists
of their own (c10/cuda/CUDACachingAllocator.cpp); and a rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import BYTES, weight_bytes
from fullstride.plan.ledger.cuts import padded_vocabulary
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import ALL, row

FRAGMENTATION = 0.01
"""Share of the allocated peak in pieces of the wrong size: 0 to 0.3 % on one GPU, 0.5 to 3 % with FSDP2."""
GATHERS = "all-gather buffer"
SHARDS = "gradients (shards)"
"""Rows of what FSDP2 makes on streams of its own (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""


def reserved(local: Local, rows: Sequence[Row], peak: int, moment: MomentName) -> tuple[Row, ...]:
    """What is held beyond the `peak` bytes that stand allocated at `moment`; the share comes last."""
    found = [item for item in (_narrow_logits(local), *_other_streams(local, rows, moment)) if item.bytes > 0]
    source = f"{FRAGMENTATION:.0%} of the allocated peak"
    return (*found, row("fragmentation", "fragmentation", FRAGMENTATION * peak, source, ALL))


def _narrow_logits(local: Local) -> Row:
    """Logits as the head makes them, freed once widened: no copy in the wider dtype fits in their block."""
    plan = local.plan
    narrow, wide = BYTES[plan.precision.head], BYTES[plan.precision.loss]
    own = plan.loss.kind == "model" and plan.shard.carrier not in ("megatron", "deepspeed")
    freed = plan.layout.tp == 1 or plan.loss.fused == "operators"  # else they stay to the loss's backward
    there = own and freed and local.head.count and narrow < wide
    count = local.micro_tokens * padded_vocabulary(plan, local.spec.vocab_size) / plan.layout.tp if there else 0.0
    source = f"tokens x vocabulary x {narrow} B: free, too small for the next"
    return row("block of narrow logits", "fragmentation", count * narrow, source, ALL)


def _other_streams(local: Local, rows: Sequence[Row], moment: MomentName) -> tuple[Row, ...]:
    """Gradient shards and gathered buffers of FSDP2 cannot lie in blocks that activations and logits have freed."""
    if local.plan.shard.carrier != "fsdp2":
        return ()
    shards = sum(item.bytes for item in rows if item.name == SHARDS and moment not in item.moments)
    units = [part.parameters * weight_bytes(local.plan, part) for part in local.parts for _ in range(min(2, part.count))]
    ahead = max((left + right for left, right in pairwise(units)), default=sum(units))
    gathers = ahead - sum(item.bytes for item in rows if item.name == GATHERS and moment in item.moments)
    return (
        row("pool of gradient shards", "fragmentation", shards, "made on a stream of their own, absent at the peak", ALL),
        row("pool of all-gathers", "fragmentation", gathers, "two units in turn, on a stream of their own", ALL),
    )
