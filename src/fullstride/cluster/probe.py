"""Reads the machine: `probe_cluster`. Lacking a GPU is a normal case; nothing here imports torch."""

from __future__ import annotations

import platform

from fullstride.cluster.catalogue import DEVICES, identify, nvlink_of, pcie_link
from fullstride.cluster.cluster import Cluster, Device, Figure, Link, NodeGroup
from fullstride.cluster.host import available_memory, read_host
from fullstride.cluster.nvidia import Gpu, Reading, read_gpus
from fullstride.cluster.topology import num_nvlinks
from fullstride.errors import BadInput

LINKS_OF_A_GPU: dict[str, int] = {"v100": 6, "a100": 12, "a800": 8, "h800": 8, "h100": 18, "h200": 18, "h20": 18, "gh200": 18}
"""NVLinks that the catalogue's bandwidth counts, by family; a pair with fewer is slower in proportion."""


def probe_cluster(*, num_ranks: int | None = None) -> Cluster:
    """This machine as a Cluster of one node.

    Args:
        num_ranks: on a host without a GPU, how many ranks share it (2 if not given); a GPU host has a rank for each GPU.

    Raises:
        BadInput: `num_ranks` is below one.
    """
    if num_ranks is not None and num_ranks < 1:
        raise BadInput(f"{num_ranks} ranks: at least one is needed", fix="give a positive number")
    return probe_gpus() or cpu_cluster(num_ranks or 2)


def probe_gpus() -> Cluster | None:
    """This machine's GPUs as a Cluster; None if it has none."""
    reading = read_gpus()
    return gpu_cluster(reading) if reading.gpus else None


def cpu_cluster(num_ranks: int) -> Cluster:
    """This host's CPU, shared equally by some ranks."""
    host = read_host()
    free, source = available_memory()
    device = Device(
        kind="cpu",
        name=host.cpu_name,
        memory_bytes=Figure(value=float(free // num_ranks), source="measured", note=f"{source}; shared by {num_ranks} ranks"),
    )
    link = Link(
        name="loopback",
        bandwidth=Figure(value=1e9, source="assumed", note="gloo between processes of one host"),
        latency=Figure(value=1e-4, source="assumed", note="gloo between processes of one host"),
    )
    group = NodeGroup(count=1, num_devices=num_ranks, device=device, host=host, link=link)
    return Cluster(name=f"{num_ranks} ranks on {host.num_cores} CPU cores", groups=(group,), versions=software_versions())


def gpu_cluster(reading: Reading) -> Cluster:
    """This host's GPUs. Unequal ones make a group for each run of equal GPUs."""
    host = read_host()
    runs: list[list[Gpu]] = []
    for gpu in reading.gpus:
        if not runs or identify(runs[-1][0].name) != identify(gpu.name) or runs[-1][0].name != gpu.name:
            runs.append([])
        runs[-1].append(gpu)
    groups = []
    for gpus in runs:
        kind = identify(gpus[0].name)
        whole = len(runs) == 1
        groups.append(
            NodeGroup(
                count=1,
                num_devices=len(gpus),
                device=_device(kind, gpus),
                host=host,
                link=_link(kind, gpus, reading.topology if whole else ()),
                topology=reading.topology if whole else (),
            )
        )
    name = " + ".join(f"{group.num_devices} x {_kind_or_name(group.device)}" for group in groups)
    return Cluster(name=name, groups=tuple(groups), versions={**software_versions(), **reading.versions})


def _kind_or_name(device: Device) -> str:
    return device.kind if device.kind != "unknown" else device.name


def _device(kind: str, gpus: list[Gpu]) -> Device:
    least = min(gpu.memory_bytes for gpu in gpus)
    memory = Figure(
        value=float(least), source="measured", note="driver's total less what it reserves; the smallest of the GPUs"
    )
    known = DEVICES.get(kind)
    return Device(
        kind=kind,
        name=gpus[0].name,
        memory_bytes=memory,
        peak_flops=known.peak_flops if known else {},
        memory_bandwidth=known.memory_bandwidth if known else None,
        compute_capability=gpus[0].compute_capability,
    )


def _link(kind: str, gpus: list[Gpu], topology: tuple[tuple[str, ...], ...]) -> Link:
    links, nvlink = num_nvlinks(topology), nvlink_of(kind)
    if links and nvlink is not None:
        full = LINKS_OF_A_GPU.get(kind.split("-")[0], links)
        value = nvlink.bandwidth.value * min(1.0, links / full)
        note = f"{nvlink.bandwidth.note}; {links} links seen between the poorest pair"
        return Link(name=nvlink.name, bandwidth=Figure(value=value, source="datasheet", note=note), latency=nvlink.latency)
    return pcie_link(min(gpu.pcie_generation for gpu in gpus), min(gpu.pcie_lanes for gpu in gpus))


def software_versions() -> dict[str, str]:
    """Versions of what is installed, read from package metadata: nothing is imported."""
    from importlib import metadata  # costs more than the rest of a probe without a GPU

    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found["nccl" if "nccl" in name else name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
