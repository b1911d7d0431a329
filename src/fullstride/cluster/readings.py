"""What a bench read off the machine, as a value of its own, and how it is laid into a Cluster."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from fullstride.cluster.cluster import (
    AttentionPoint,
    Cluster,
    CollectivePoint,
    Device,
    Figure,
    Host,
    Link,
    MatmulPoint,
    NodeGroup,
)
from fullstride.files import FileValue, Value

FigureName: TypeAlias = Literal[
    "device.memory_bandwidth",
    "device.launch_seconds",
    "host.memory_bandwidth",
    "host.host_to_device",
    "host.device_to_host",
    "host.disk_write",
    "host.disk_read",
    "link.bandwidth",
    "link.latency",
]
"""Which entry of a node's device, host or link a figure fills."""


class Readings(FileValue, frozen=True, kw_only=True, tag="readings"):
    """Points and figures of one bench."""

    matmuls: tuple[MatmulPoint, ...] = ()
    attentions: tuple[AttentionPoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
    figures: dict[FigureName, Figure] = {}
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    """What was left out, and why."""


def merge(cluster: Cluster, readings: Readings) -> Cluster:
    """The cluster with what was read; a table that was read replaces the old one, an empty one leaves it.

    Figures go to the first group: the bench runs on the machine in front of it.
    """
    first = cluster.groups[0]
    parts: dict[str, dict[str, Figure]] = {"device": {}, "host": {}, "link": {}}
    for name, figure in readings.figures.items():
        part, _, field = name.partition(".")
        parts[part][field] = figure
    group = _with(
        first,
        device=_with(first.device, **parts["device"]),
        host=_with(first.host, **parts["host"]),
        link=_with(first.link, **parts["link"]),
    )
    return Cluster(
        name=cluster.name,
        groups=(group, *cluster.groups[1:]),
        matmuls=readings.matmuls or cluster.matmuls,
        attentions=readings.attentions or cluster.attentions,
        collectives=readings.collectives or cluster.collectives,
        versions={**cluster.versions, **readings.versions},
        assumed=cluster.assumed,
    )


def _with(value: Any, **fields: Any) -> Any:
    """A copy of a value with some entries changed."""
    kept: Value | Device | Host | Link | NodeGroup = value
    return type(kept)(**{name: getattr(kept, name) for name in kept.__struct_fields__} | fields)
