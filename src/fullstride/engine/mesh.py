"""The process group, and the axes of ranks that a Plan asks for."""

from __future__ import annotations

import datetime
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullstride.errors import BadInput, EnvironmentFault
from fullstride.plan.plan import Axis, Comm, Layout, Plan

_made: dict[tuple[int, tuple[tuple[int, ...], ...], int, datetime.timedelta], dist.ProcessGroup] = {}
"""Groups by the world they belong to, the ranks they are cut into, their limit of CTAs and how long they wait: a worker that
builds plan after plan makes each once."""


def pick_device(device: str | torch.device | None = None) -> torch.device:
    """The device of this rank: the one given, else the GPU with this rank's local number, else the CPU."""
    asked = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if asked.type == "cuda" and asked.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return asked


def join(plan: Plan, device: torch.device) -> int:
    """Join the process group if there is one to join; returns the number of ranks.

    Where torchrun's variables are set and no group was made yet, one is made: gloo on CPU, NCCL beside gloo on GPUs.

    Raises:
        BadInput: the Plan was made for another number of ranks.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=plan.comm.timeout_seconds)
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != plan.layout.world_size:
        raise BadInput(
            f"layout: the plan is for {plan.layout.world_size} ranks, but {ranks} are running",
            fix=f"start {plan.layout.world_size} processes (torchrun --nproc-per-node) or make a plan for {ranks}",
        )
    return ranks


def _few_ctas(count: int, timeout: datetime.timedelta) -> dict[str, Any]:
    """Arguments for groups whose collectives leave multiprocessors to computation."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.min_ctas = options.config.max_ctas = count
    options._timeout = timeout  # no public way; torch warns where it differs from the argument
    return {"backend": "nccl", "pg_options": options}


class Mesh:
    """This rank's place on the axes, and the groups it is in.

    All ranks must ask for the same groups in the same order: making one is collective.
    """

    def __init__(self, layout: Layout, device: torch.device, comm: Comm = Comm()) -> None:  # noqa: B008 (frozen)
        """Number the ranks: the last axis of the layout's order has neighbours.

        Args:
            layout: the axes.
            device: of this rank.
            comm: how long its groups wait, and for data-parallel ranks on GPUs their `ctas`.
        """
        self.layout, self._ctas = layout, comm.ctas if device.type == "cuda" else 0
        self._timeout = datetime.timedelta(seconds=comm.timeout_seconds)
        self.device = device
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if layout.world_size > 1 and not dist.is_initialized():
            raise EnvironmentFault("no process group, and the plan spreads over ranks", fix="start it with torchrun")
        self._axes = tuple(axis for axis in layout.order if axis != "ep")
        self._numbers = torch.arange(layout.world_size).reshape([getattr(layout, axis) for axis in self._axes])

    def coordinate(self, axis: Axis) -> int:
        """This rank's place on an axis."""
        return int((self._numbers == self.rank).nonzero()[0][self._axes.index(axis)])

    @property
    def data_rank(self) -> int:
        """Which share of a step's samples is this rank's."""
        return self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")

    def ranks(self, *axes: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one on `axes` alone, itself included, the first axis slowest."""
        return next(members for members in self._cut(axes) if self.rank in members)

    def sets(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All ranks, in the sets that differ on `axes` alone, each as in `ranks`."""
        return self._cut(axes)

    def group(self, *axes: Axis) -> dist.ProcessGroup | None:
        """The group of `ranks(*axes)`; None where that is this rank alone."""
        return self._group_of(self._cut(axes), self._ctas if set(axes) <= {"dp_replicate", "dp_shard"} else 0)

    def part(self, axis: Axis, size: int) -> dist.ProcessGroup | None:
        """The group of `size` neighbours on an axis, of the runs into which it is cut; None for a size of 1."""
        return self._group_of(tuple(row[at : at + size] for row in self._cut((axis,)) for at in range(0, len(row), size)))

    def _group_of(self, cut: tuple[tuple[int, ...], ...], ctas: int = 0) -> dist.ProcessGroup | None:
        """This rank's group of all ranks in sets."""
        if len(cut[0]) == 1:
            return None
        if len(cut) == 1 and cut[0] == tuple(range(self.layout.world_size)) and not ctas:
            return dist.group.WORLD
        key = (id(dist.group.WORLD), cut, ctas, self._timeout)
        if key not in _made:
            options = {"timeout": self._timeout, **(_few_ctas(ctas, self._timeout) if ctas else {})}
            made, _ = dist.new_subgroups_by_enumeration([list(m) for m in cut], **options)  # type: ignore[no-untyped-call]
            assert made is not None
            _made[key] = made
        return _made[key]

    def data(self) -> DeviceMesh:
        """The axes that samples are spread over, as FSDP2 takes them: `dp_shard`, before it `dp_replicate` for copies."""
        shard = self.group("dp_shard")
        assert shard is not None
        if self.layout.dp_replicate == 1:
            return DeviceMesh.from_group(shard, self.device.type, mesh_dim_names=("dp_shard",))
        replicate = self.group("dp_replicate")
        assert replicate is not None
        table = torch.tensor(self.ranks("dp_replicate", "dp_shard")).reshape(self.layout.dp_replicate, self.layout.dp_shard)
        names = ("dp_replicate", "dp_shard")
        return DeviceMesh.from_group([replicate, shard], self.device.type, mesh=table, mesh_dim_names=names)

    def _cut(self, axes: tuple[Axis, ...]) -> tuple[tuple[int, ...], ...]:
        """All ranks, in the sets that differ on `axes` alone."""
        inner = [self._axes.index(axis) for axis in axes]
        outer = [index for index in range(len(self._axes)) if index not in inner]
        size = math.prod(self._numbers.shape[index] for index in inner)
        return tuple(tuple(row) for row in self._numbers.permute(*outer, *inner).reshape(-1, size).tolist())
