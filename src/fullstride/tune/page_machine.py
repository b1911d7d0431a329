"""The machine of a tuning run, each figure with where it came from."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster, Figure, Link
from fullstride.measure.blocks import UNKNOWN, Named
from fullstride.report.document import AnyBlock, Column, Table, TableRow, Text
from fullstride.units import format_bytes, format_flops, format_rate, format_seconds

_Line = tuple[str, str, str]


def machine_blocks(cluster: Cluster | None, named: Named) -> list[AnyBlock]:
    """Device, host, links and versions; what the measurements say when there is no Cluster."""
    if cluster is None:
        devices = ", ".join(dict.fromkeys(one.device for _, one in named))
        return [Text(text=f"Measured on {devices or UNKNOWN}.", tone="quiet"), *_versions(_of_measurements(named))]
    columns = (Column(name="figure"), Column(name="value", align="right"), Column(name="from"))
    rows = tuple(TableRow(cells=line) for line in _lines(cluster))
    blocks: list[AnyBlock] = []
    if cluster.assumed:
        blocks.append(Text(text="This machine was not probed: every figure is assumed.", tone="warn"))
    blocks.append(Table(title=cluster.name, columns=columns, rows=rows))
    return [*blocks, *_topology(cluster), *_versions(_of_measurements(named) or cluster.versions)]


def _lines(cluster: Cluster) -> list[_Line]:
    group, device, host = cluster.groups[0], cluster.device, cluster.host
    nodes = f"{group.count} node{'s' if group.count > 1 else ''} of {group.num_devices}"
    lines: list[_Line] = [("devices", f"{cluster.num_devices} x {device.name}", nodes)]
    lines.append(("memory of a device", format_bytes(device.memory_bytes.value), _origin(device.memory_bytes)))
    for dtype, peak in device.peak_flops.items():
        lines.append((f"peak, {dtype}", format_flops(peak.value), _origin(peak)))
    if not device.peak_flops:
        lines.append(("peak rate", UNKNOWN, ""))
    lines.append(_rate("device memory", device.memory_bandwidth))
    if device.launch_seconds:
        lines.append(("launch of a kernel", format_seconds(device.launch_seconds.value), _origin(device.launch_seconds)))
    lines += _link("between devices", group.link) if group.num_devices > 1 else []
    lines += _link("between nodes", group.network) if group.network else []
    lines.append(("processor", host.cpu_name, f"{host.num_cores} cores, {host.numa_nodes} NUMA node(s)"))
    lines.append(("memory of the host", format_bytes(host.memory_bytes), ""))
    compiler = {True: "there", False: "missing", None: UNKNOWN}[host.has_compiler]
    lines.append(("C++ compiler", compiler, ""))
    for word, figure in (
        ("host memory", host.memory_bandwidth),
        ("host to device", host.host_to_device),
        ("device to host", host.device_to_host),
        ("disk, writing", host.disk_write),
        ("disk, reading", host.disk_read),
    ):
        lines += [_rate(word, figure)] if figure else []
    return lines


def _origin(figure: Figure) -> str:
    return f"{figure.source}: {figure.note}" if figure.note else figure.source


def _rate(word: str, figure: Figure | None) -> _Line:
    return (word, format_rate(figure.value), _origin(figure)) if figure else (word, UNKNOWN, "")


def _link(word: str, link: Link) -> list[_Line]:
    return [
        (f"{word}: {link.name}", format_rate(link.bandwidth.value), f"one way, each rank; {_origin(link.bandwidth)}"),
        (f"{word}: latency", format_seconds(link.latency.value), _origin(link.latency)),
    ]


def _topology(cluster: Cluster) -> list[AnyBlock]:
    topology = cluster.groups[0].topology
    if not topology:
        return []
    columns = (Column(name=""), *[Column(name=str(place)) for place in range(len(topology))])
    rows = tuple(TableRow(cells=(str(place), *row)) for place, row in enumerate(topology))
    return [Table(title="Topology", columns=columns, rows=rows)]


def _of_measurements(named: Named) -> dict[str, str]:
    return named[-1][1].versions if named else {}


def _versions(versions: dict[str, str]) -> list[AnyBlock]:
    if not versions:
        return []
    rows = tuple(TableRow(cells=pair) for pair in sorted(versions.items()))
    return [Table(title="Versions", columns=(Column(name="software"), Column(name="version")), rows=rows)]
