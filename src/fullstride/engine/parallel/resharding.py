"""When ZeRO-3 frees weights."""

from __future__ import annotations

from fullstride.engine.anatomy import Unit
from fullstride.plan.plan import Plan


def reshards(unit: Unit, plan: Plan) -> bool:
    """Whether a unit's weights are freed after forward: by its path, else by its group, else by the stage."""
    if plan.shard.stage < 3:
        return False
    groups = {"embedding": ("embedding",), "block": ("blocks",), "head": ("head", "embedding")}[unit.role]
    if unit.name == "head":
        groups = ("head",)
    for key in (unit.name, *unit.paths, *groups):
        if key in plan.shard.reshard:
            return plan.shard.reshard[key]
    return True
