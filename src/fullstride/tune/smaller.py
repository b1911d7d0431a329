"""The next smaller plan after one that ran out of memory."""

from __future__ import annotations

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.pipeline import sizes_of
from fullstride.plan.plan import Plan
from fullstride.tune.levers import LEVERS, Move, micro_batches, replaced, with_micro_batch
from fullstride.tune.stages import refused


def smaller(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Move | None:
    """About half the micro-batch; at one sample full recompute; then ZeRO-3. None where nothing is left, or not allowed."""
    largest = max(sizes_of(plan))
    sizes = [size for size in micro_batches(plan) if size * 2 <= largest]
    moves: list[Move] = []
    if sizes:
        moves.append(with_micro_batch(plan, sizes[-1]))
    elif plan.recompute.mode != "full":
        new = msgspec.structs.replace(plan.recompute, mode="full", every=1)
        moves.append(Move(plan=replaced(plan, recompute=new), words=f"recompute {plan.recompute.mode} -> full"))
    elif plan.shard.stage != 3:
        zero = next(lever for lever in LEVERS if lever.name == "zero")
        moves += [move for move in zero.changes(plan, spec, cluster) if move.plan.shard.stage == 3]
    return next((move for move in moves if not refused(move.plan, spec, cluster)), None)
