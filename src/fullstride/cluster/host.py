"""What this host is: cores, memory, disk, a compiler. Limits of the control group count, since they bind this process."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil

from fullstride.cluster.cluster import Host

ROUND = 2**28
"""Free memory is rounded down to this, so that the small changes of every moment do not make another cluster."""
UNLIMITED = 1 << 60
"""Version 1 control groups write a number near 2^63 for no limit."""


def read_host() -> Host:
    """This host, as far as this process may use it."""
    memory, _ = host_memory()
    return Host(
        cpu_name=cpu_name(_text("/proc/cpuinfo")) or platform.processor() or platform.machine() or "unknown",
        num_cores=usable_cores(),
        memory_bytes=memory,
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        has_compiler=has_compiler(),
    )


def cpu_name(cpuinfo: str) -> str:
    """The model's name out of `/proc/cpuinfo`; empty if it gives none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in {"model name", "cpu model", "hardware"} and value.strip():
            return " ".join(value.split())
    return ""


def usable_cores() -> int:
    """Cores that this process may run on: its affinity, less where a control group's quota is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [cpu_quota(_text(folder / "cpu.max")) for folder in _groups()]
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def cpu_quota(text: str) -> float | None:
    """Cores allowed by `cpu.max` (`200000 100000` is 2); None for no limit."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or not int(parts[1]):
        return None
    return max(1.0, int(parts[0]) / int(parts[1]))


def memory_limit(text: str) -> int | None:
    """Bytes allowed by a control group's file; None for no limit."""
    plain = text.strip()
    return int(plain) if plain.isdigit() and int(plain) < UNLIMITED else None


def host_memory() -> tuple[int, str]:
    """Bytes this process can come to use, and where the number is from.

    A control group's limit below the machine's memory binds. One above it is believed too: some virtual machines start
    with little memory and are given more as it is used, so that their total reads too small.
    """
    total = int(psutil.virtual_memory().total)
    folders = _groups()
    limits = [memory_limit(_text(folder / name)) for folder in folders for name in ("memory.max", "memory.limit_in_bytes")]
    known = [limit for limit in limits if limit is not None]
    if not known:
        return total, "memory of the machine"
    limit = min(known)
    if limit > total:
        return limit, f"limit of the control group; the machine shows {total} bytes now and may grow"
    return limit, "limit of the control group"


def available_memory() -> tuple[int, str]:
    """Bytes that are free to use now, and where the number is from."""
    machine = psutil.virtual_memory()
    total, source = host_memory()
    used = int(machine.total - machine.available)
    free = max(0, total - used) // ROUND * ROUND
    return free, f"{source}, less what is in use"


def has_compiler() -> bool:
    """Whether a C++ compiler answers `--version`; `torch.compile` needs one on CPU."""
    candidates = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return any(_answers(name) for name in candidates if name)


def _answers(command: str) -> bool:
    path = shutil.which(command)
    if not path:
        return False
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _groups() -> list[Path]:
    """Folders of the control groups that hold this process, itself first; version 2, or version 1's memory controller."""
    found: list[Path] = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers in {"", "memory"}:
            root = Path("/sys/fs/cgroup") / controllers
            folder = root / path.lstrip("/")
            found += [folder, *[parent for parent in folder.parents if parent == root or root in parent.parents]]
    return found


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
