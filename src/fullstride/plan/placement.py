"""Where the axes of a layout lie on the machine, in words; and what counts where its nodes are not all alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster, Figure, Link, NodeGroup
from fullstride.files import Value
from fullstride.plan.facts import once
from fullstride.plan.plan import Axis, Plan
from fullstride.units import format_rate

AXIS_WORDS: dict[Axis, str] = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas",
    "dp_shard": "sharding",
    "cp": "context parallel",
    "tp": "tensor parallel",
    "ep": "expert parallel",
}


class AxisPlace(Value, frozen=True, kw_only=True):
    """Where the ranks of one axis' groups sit."""

    axis: Axis
    degree: int
    stride: int
    """Ranks from one member of a group to the next."""
    in_node: int
    """Members of a group on one node."""
    link: str
    """The slowest link that a group crosses."""
    bandwidth: float
    """Its bytes per second, one way, for each rank."""
    words: str


def devices_per_node(cluster: Cluster) -> int:
    """Devices that a group of neighbours may count on in any node: the largest number that divides every node."""
    return math.gcd(*(group.num_devices for group in cluster.groups))


def placement(plan: Plan, cluster: Cluster) -> tuple[AxisPlace, ...]:
    """Each axis that is used, the one with neighbouring ranks first.

    Ranks fill nodes in order, and `layout.order` names axes from the slowest varying to the fastest. Expert parallelism lies
    over the data axes, so its neighbours are as far apart as theirs.
    """
    layout, found, stride = plan.layout, [], 1
    cluster = slowest(cluster)
    expert_stride = 0
    for axis in reversed([axis for axis in layout.order if axis != "ep"]):
        if axis in ("cp", "dp_shard", "dp_replicate") and not expert_stride:
            expert_stride = stride
        if (degree := getattr(layout, axis)) > 1:
            found.append(_place(axis, degree, stride, cluster))
        stride *= degree
    if layout.ep > 1:
        found.append(_place("ep", layout.ep, expert_stride, cluster))
    return tuple(found)


def _place(axis: Axis, degree: int, stride: int, cluster: Cluster) -> AxisPlace:
    node, group = devices_per_node(cluster), cluster.groups[0]
    in_node = max(1, min(degree, node // stride)) if stride < node else 1
    inside = in_node == degree or cluster.num_devices <= node
    link = group.link if inside or group.network is None else group.network
    where = _where(degree, stride, in_node, inside)
    words = f"{AXIS_WORDS[axis]} {degree}: {where}, over {link.name} ({format_rate(link.bandwidth.value)} a rank)"
    return AxisPlace(
        axis=axis, degree=degree, stride=stride, in_node=in_node, link=link.name, bandwidth=link.bandwidth.value, words=words
    )


def _where(degree: int, stride: int, in_node: int, inside: bool) -> str:
    if inside:
        return "neighbouring devices of one node" if stride == 1 else f"inside a node, every {_nth(stride)} device"
    if in_node == 1:
        return f"across {degree} nodes, one rank of a group on each"
    nodes = -(-degree // in_node)
    return f"{in_node} ranks of a group in each of {nodes} nodes"


def _nth(number: int) -> str:
    return {2: "second", 3: "third", 4: "fourth", 8: "eighth"}.get(number, f"{number}th")


def slowest(cluster: Cluster) -> Cluster:
    """The cluster as its slowest members make it: work is shared out evenly, so that the others wait for them.

    Memory, peaks, bandwidths and links of all groups are the least that any group has. An even cluster is returned as it is.
    """
    return once(cluster, "slowest", lambda: _slowest(cluster))


def is_uneven(cluster: Cluster) -> bool:
    """Whether its groups differ in anything that counts for time or memory."""
    return slowest(cluster) is not cluster


def _slowest(cluster: Cluster) -> Cluster:
    first = cluster.groups[0]
    if all(g.device == first.device and g.link == first.link and g.network == first.network for g in cluster.groups):
        return cluster
    groups = cluster.groups
    device = min(groups, key=lambda g: max((f.value for f in g.device.peak_flops.values()), default=math.inf)).device
    common = set.intersection(*(set(g.device.peak_flops) for g in groups))
    device = replace(
        device,
        memory_bytes=_least(g.device.memory_bytes for g in groups),
        peak_flops={dtype: _least(g.device.peak_flops[dtype] for g in groups) for dtype in sorted(common)},
        memory_bandwidth=_least_known(g.device.memory_bandwidth for g in groups),
    )
    link, network = _weakest(g.link for g in groups), _weakest(g.network for g in groups if g.network)
    changed: list[NodeGroup] = [replace(g, device=device, link=link or g.link, network=network or g.network) for g in groups]
    return replace(cluster, groups=tuple(changed))


def _least(figures: Iterable[Figure]) -> Figure:
    return min(figures, key=lambda figure: figure.value)


def _least_known(figures: Iterable[Figure | None]) -> Figure | None:
    known = [figure for figure in figures if figure is not None]
    return _least(known) if known else None


def _weakest(links: Iterable[Link | None]) -> Link | None:
    known = [link for link in links if link is not None]
    return min(known, key=lambda link: link.bandwidth.value) if known else None
