"""What a worker process sets up before anything else: device, process groups, versions, clock."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from fullstride import __version__
from fullstride.engine.channel import Channel, open_channel
from fullstride.errors import BadInput
from fullstride.events import now_ns
from fullstride.files import write_bytes
from fullstride.plan.plan import Plan
from fullstride.rundir import RunDir

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_PINGS = 7
_cuda: Any = torch.cuda  # untyped


@dataclass(frozen=True)
class Place:
    """This process among the others."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: torch.device
    channel: Channel
    host_group: dist.ProcessGroup | None
    """gloo, for small flags between steps; None for one rank."""
    save_group: dist.ProcessGroup | None
    """gloo, for the thread that writes checkpoints; None for one rank."""
    offset_ns: int
    """Add it to this rank's clock to get rank 0's."""


def join(plan: Plan | None, device_kind: str = "auto") -> Place:
    """Become a rank: pick the device, make the process groups, measure the clock.

    Args:
        plan: its `comm` part is set before the process group is made; None for torch's own defaults.
        device_kind: `cpu`, `cuda`, or `auto` (a GPU where there is one).

    Raises:
        BadInput: the host has fewer GPUs than ranks.
    """
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    if plan:
        os.environ.update(plan.comm.env)
        if plan.layout.pp > 1:
            # Streams that share a hardware queue wait for each other: a receive must never hold up what it waits for.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    device = _device(local, device_kind)
    wait = timedelta(seconds=plan.comm.timeout_seconds if plan else 600.0)
    if world > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        bound = device if device.type == "cuda" else None
        dist.init_process_group(backend, timeout=wait, device_id=bound)
    several = world > 1
    host_group = dist.new_group(backend="gloo", timeout=wait) if several else None
    save_group = dist.new_group(backend="gloo", timeout=timedelta(hours=1)) if several else None
    offset = _clock_offset(rank, world, host_group)
    channel = open_channel(rank, world)
    return Place(rank, world, local, socket.gethostname(), os.getpid(), device, channel, host_group, save_group, offset)


def _device(local_rank: int, kind: str) -> torch.device:
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise BadInput(
            f"rank {local_rank} of this host has no GPU: there are {torch.cuda.device_count()}",
            fix="start as many ranks on a host as it has GPUs",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _clock_offset(rank: int, world: int, group: dist.ProcessGroup | None) -> int:
    """Nanoseconds to add to this rank's monotonic clock to get rank 0's.

    Ranks of one host share a clock. Others ask rank 0 in turn; the answer of the quickest round trip counts, its middle taken
    as the moment of the answer (Cristian, "Probabilistic clock synchronization", 1989).
    """
    if group is None:
        return 0
    hosts: list[str | None] = [None] * world
    dist.all_gather_object(hosts, f"{socket.gethostname()} {psutil.boot_time()}", group=group)
    remote = [other for other in range(world) if hosts[other] != hosts[0]]
    offset = 0
    for other in remote:
        if rank in (0, other):
            answer = _ping(rank, other, group)
            offset = answer if rank == other else offset
    return offset


def _ping(rank: int, other: int, group: dist.ProcessGroup) -> int:
    trips = []
    for _ in range(_PINGS):
        stamp = torch.zeros(1, dtype=torch.int64)
        start = now_ns()
        if rank == 0:
            dist.recv(stamp, src=other, group=group)
            stamp.fill_(now_ns())
            dist.send(stamp, dst=other, group=group)
        else:
            dist.send(stamp, dst=0, group=group)
            dist.recv(stamp, src=0, group=group)
            end = now_ns()
            trips.append((end - start, int(stamp) - (start + end) // 2))
    return min(trips)[1] if trips else 0


def versions(device: torch.device) -> dict[str, str]:
    """Versions of what takes part, by name."""
    found = {"python": platform.python_version(), "system": platform.platform(), "fullstride": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(str(part) for part in _cuda.nccl.version())
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def write_versions(run_dir: RunDir, found: dict[str, str]) -> None:
    """Write `versions.json`, whole."""
    write_bytes(run_dir.versions, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


class Ancestors:
    """Whether those who started this process are still there."""

    def __init__(self, generations: int) -> None:
        """Watch the parent (1), or also whoever started the launcher (2)."""
        self._watched = []
        process: psutil.Process | None = psutil.Process()
        for _ in range(generations):
            process = process.parent() if process else None
            if process and process.pid > 1:
                self._watched.append(process)

    def gone(self) -> bool:
        """Whether one of them has ended."""
        return not all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in self._watched)


def cache_folder(run_dir: RunDir) -> Path:
    """Where token caches are kept: beside the run, so that its neighbours share them; FULLSTRIDE_CACHE overrides."""
    return Path(os.environ.get("FULLSTRIDE_CACHE") or run_dir.path.resolve().parent / ".fullstride-cache")
