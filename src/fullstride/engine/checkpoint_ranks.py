"""The ranks that save and load together, and how they agree on what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullstride.errors import BadInput, EnvironmentFault

WAIT_SECONDS = 3600.0
"""Longest wait for a save that is being written."""


class Ranks:
    """Who takes part in saving and loading."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Those of a gloo group; None for this rank alone."""
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.count = dist.get_world_size(group) if group else 1

    def exchange(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        if not self.group:
            return [item]
        items = [None] * self.count
        dist.all_gather_object(items, item, group=self.group)
        return items

    def agree(self, error: BadInput | None) -> None:
        """Raise on every rank what one of them found."""
        told = [e for e in self.exchange((error.message, error.fix) if error else None) if e]
        if told:
            raise BadInput(told[0][0], fix=told[0][1])


_groups: dict[int, dist.ProcessGroup] = {}
"""By the world they belong to."""


def own_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks, made once, for saves that a user's own loop asks for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    world = id(dist.group.WORLD)
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    return _groups[world]


def all_do(work: Callable[[], Any], ranks: Ranks) -> list[Any]:
    """What every rank's work returned.

    Raises:
        EnvironmentFault: the disk refused one of them, on all of them.
    """
    found, problem = None, ""
    try:
        found = work()
    except OSError as error:
        problem = error.strerror or str(error)
    except EnvironmentFault as error:
        problem = error.message
    told = ranks.exchange((found, problem))
    for rank, (_, said) in enumerate(told):
        if said:
            raise EnvironmentFault(said if ranks.count == 1 else f"rank {rank}: {said}")
    return [item for item, _ in told]
