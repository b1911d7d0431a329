"""The process group and the mesh of ranks that a Plan asks for."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullstride.errors import BadInput, EnvironmentFault
from fullstride.plan.plan import Plan


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


def data_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The mesh over which samples are spread: one axis `dp_shard`, or two when copies are kept (`dp_replicate`, first).

    Ranks are laid out in the Plan's order: the last axis has neighbouring ranks.

    Raises:
        EnvironmentFault: there is no process group.
    """
    if not dist.is_initialized():
        raise EnvironmentFault("no process group, and the plan spreads over ranks", fix="start it with torchrun")
    layout = plan.layout
    degrees = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard}
    order = [axis for axis in layout.order if axis in degrees]
    ranks = torch.arange(layout.data_parallel).reshape([degrees[axis] for axis in order])
    if order != list(degrees):
        ranks = ranks.t()
    if layout.dp_replicate == 1:
        return DeviceMesh(device.type, ranks.flatten(), mesh_dim_names=("dp_shard",))
    return DeviceMesh(device.type, ranks.contiguous(), mesh_dim_names=("dp_replicate", "dp_shard"))
