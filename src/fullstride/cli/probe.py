"""`fullstride probe`: what machine is this."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from fullstride.cli.command import add_dry_run, positive, refuse_existing
from fullstride.cli.output import Output
from fullstride.cluster.cluster import Cluster, Figure
from fullstride.cluster.measuring import measure_cluster
from fullstride.cluster.probe import probe_cluster
from fullstride.files import write_json
from fullstride.report.document import AnyBlock, Column, Document, Table, TableRow, Text
from fullstride.units import format_bytes, format_flops, format_rate, format_seconds


class Probe:
    """Read the machine: devices, host, links; each number with where it came from.

    A machine without a GPU is a normal case: its processors are then the devices. --measure also times matrix
    products, attention, copies, the disk and the collectives between the local ranks, in processes of its own.
    """

    name = "probe"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("-o", dest="output", metavar="FILE", help="write the cluster file for plan, explain and tune")
        parser.add_argument("--measure", action="store_true", help="time what the machine does, not only what it is")
        parser.add_argument("--ranks", type=positive, metavar="N", help="ranks on a host without GPUs (2 when not given)")
        add_dry_run(parser, "written")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Probe, perhaps measure, write and show."""
        target = Path(args.output) if args.output else None
        if target:
            refuse_existing(target)
        cluster = probe_cluster(num_ranks=args.ranks)
        if args.measure and not args.dry_run:
            out.note("measuring the machine, this takes some tens of seconds")
            cluster = measure_cluster(cluster, quick=False, warn=out.warn)
        if target and args.dry_run:
            out.note(f"would write {target}")
        elif target:
            write_json(target, cluster)
            out.note(f"wrote {target}")
        out.show(cluster_document(cluster), cluster)
        return 0


def cluster_document(cluster: Cluster) -> Document:
    """A cluster to read: what it is, then what was measured on it."""
    blocks: list[AnyBlock] = [_facts(cluster)]
    if cluster.assumed:
        blocks.insert(0, Text(text="This is an assumed cluster: nobody probed it.", tone="warn"))
    if cluster.matmuls:
        rows = [(f"{p.dtype} [{p.m}, {p.k}] x [{p.k}, {p.n}]", format_flops(p.rate)) for p in cluster.matmuls]
        blocks.append(_table("Matrix products, measured", ("product", "rate"), rows))
    if cluster.collectives:
        rows = [(f"{p.op}, {p.ranks} ranks, {format_bytes(p.bytes)}", format_seconds(p.seconds)) for p in cluster.collectives]
        blocks.append(_table("Collectives, measured", ("collective", "time"), rows))
    return Document(title=cluster.name, subtitle=f"{cluster.num_devices} devices", blocks=tuple(blocks))


def _facts(cluster: Cluster) -> Table:
    device, host, group = cluster.device, cluster.host, cluster.groups[0]
    rows = [
        ("devices", f"{cluster.num_devices} x {device.name}", f"kind {device.kind}"),
        _figure("memory of a device", device.memory_bytes, format_bytes),
        *[_figure(f"peak, {dtype}", figure, format_flops) for dtype, figure in device.peak_flops.items()],
        _figure("device memory bandwidth", device.memory_bandwidth, format_rate),
        _figure("launch of one operator", device.launch_seconds, format_seconds),
        _figure(f"link between devices ({group.link.name})", group.link.bandwidth, format_rate),
        _figure("latency of that link", group.link.latency, format_seconds),
        ("host", f"{host.num_cores} cores, {format_bytes(host.memory_bytes)}", host.cpu_name),
        ("C++ compiler", {True: "yes", False: "no", None: "unknown"}[host.has_compiler], ""),
        _figure("host to device", host.host_to_device, format_rate),
        _figure("device to host", host.device_to_host, format_rate),
        _figure("host memory bandwidth", host.memory_bandwidth, format_rate),
        _figure("disk, write", host.disk_write, format_rate),
        _figure("disk, read", host.disk_read, format_rate),
        *[(f"version of {name}", version, "") for name, version in cluster.versions.items()],
    ]
    return _table("Machine", ("what", "figure", "from"), rows)


def _figure(name: str, figure: Figure | None, show: Callable[[float], str]) -> tuple[str, str, str]:
    if figure is None:
        return name, "unknown", ""
    return name, show(figure.value), f"{figure.source}, {figure.note}" if figure.note else figure.source


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    cells = tuple(TableRow(cells=row) for row in rows)
    return Table(title=title, columns=tuple(Column(name=name) for name in columns), rows=cells)


VERB = Probe()
