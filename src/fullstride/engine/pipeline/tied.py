"""A weight that the first and the last stage share: each makes its own gradient of it, and both need the sum."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from fullstride.engine.mesh import Mesh
from fullstride.plan.schedule.placement import Placement

_made: dict[tuple[int, tuple[int, int]], dist.ProcessGroup] = {}


def tied_group(mesh: Mesh, placement: Placement, timeout_seconds: float) -> dist.ProcessGroup | None:
    """The two ranks that hold the first and the last stage of this rank's pipeline; None if this rank is neither,
    or if they are one.

    Collective: groups are made for all pipelines. Who waits in one longer than the time-out is told of it; a group that is
    given none has the library's own, half an hour.
    """
    if placement.home(0)[0] == placement.home(placement.num_stages - 1)[0]:
        return None  # one rank holds both: its backwards add up by themselves
    first, last = placement.home(0)[0], placement.home(placement.num_stages - 1)[0]
    found = None
    for members in mesh.sets("pp"):
        pair = (members[first], members[last])
        key = (id(dist.group.WORLD), pair)
        if key not in _made:
            _made[key] = dist.new_group(list(pair), timeout=datetime.timedelta(seconds=timeout_seconds))
        if mesh.rank in pair:
            found = _made[key]
    return found


def sum_tied(gradient: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum this rank's part of the gradient over both stages, in place; both hold the same part."""
    dist.all_reduce(gradient, group=group)
