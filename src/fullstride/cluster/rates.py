"""How long the pieces of a step take on a cluster: the measured table first, else a roofline over the data sheet.

Every look-up returns a `Rate`: seconds, how far to trust them, and where they come from. Measured tables are read as
curves: log seconds over the log of one size (tokens, sequence length, bytes), straight between the points, and blended
over the other sizes by distance (Shepard 1968), each curve scaled by its share of the work. A curve meets its points
exactly, and is monotone wherever the points are. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from fullstride.cluster.catalogue import UNITS
from fullstride.cluster.cluster import AttentionPoint, Cluster, CollectiveName, DType, MatmulPoint

Trust: TypeAlias = Literal["modelled", "assumed"]

UNKNOWN_UNITS = 128
"""Multiprocessors of a device that is not in the catalogue; assumed."""
TILES: tuple[tuple[int, int, float], ...] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
"""Tiles of a result that one multiprocessor makes at a time, and their share of the best rate (shared-memory reuse)."""
SPLITS = (1, 2, 4)
"""A product with few tiles is also cut along its inner size (split-k), its parts being summed in fp32."""
UNALIGNED_SHARE = 0.4
"""Rate of 16-bit products with a row whose size is no multiple of eight elements, which tensor cores cannot load 16 bytes at a
time (a vocabulary of 50257 takes 2.5 times as long as one of 50304; NVIDIA's guide to matrix products says why)."""
TREE_SHARE = 0.9
"""Bandwidth of a double binary tree over that of a ring (NCCL's tuning tables)."""
NVLS_SHARE = 1.35
"""All-reduce by in-switch reduction over a ring, at large sizes (8 x H100 in nccl-tests: 480 over 360 GB/s)."""
CPU_FLOPS_PER_CORE = 25e9
"""fp32 FLOP/s of one server core with AVX2; assumed where nothing was measured."""
CPU_BYTES_PER_RANK = 8e9
BYTES_OF: dict[str, float] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5625}
"""fp4 carries a scale for each 16 elements."""

TRAFFIC: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
"""Bytes that cross one rank's link, over the bytes of the full buffer (nccl-tests, PERFORMANCE.md)."""
MESSAGES: dict[str, Callable[[int], int]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: n - 1,
    "send_recv": lambda n: 1,
}
"""Messages in a row of the ring."""


class Rate(NamedTuple):
    """A predicted time."""

    seconds: float
    confidence: Trust
    """`modelled` when it rests on measurements of this cluster, else `assumed`."""
    source: str


class Curve(NamedTuple):
    """Measured seconds along one size, the other sizes being fixed at `key` (logs)."""

    key: tuple[float, ...]
    work: float
    """Log of the work at size one."""
    points: tuple[tuple[float, float], ...]
    """(log size, log seconds), rising in size."""


def matmul_seconds(cluster: Cluster, dtype: DType, m: int, n: int, k: int, *, aligned: bool | None = None) -> Rate:
    """Time of one product [m, k] x [k, n] on one device (one rank of a CPU host), launch included.

    `aligned` says whether rows start at multiples of 16 bytes; by default that is read off n and k, as for a plain product.
    """
    if min(m, n, k) <= 0:
        return Rate(0.0, "modelled", "no work")
    found = _matmul_curves(cluster, dtype)
    if found:
        used, curves = found
        key, work = (math.log(n), math.log(k)), math.log(n) + math.log(k)
        seconds = math.exp(_blend(curves, key, work, math.log(m)))
        return Rate(seconds, "modelled", "measured matmul table" + ("" if used == dtype else f" ({used} taken for {dtype})"))
    size, out = BYTES_OF[dtype], max(2.0, BYTES_OF[dtype])
    moved = size * (m * k + k * n) + out * m * n
    peak, source = _peak(cluster, dtype)
    share, reached = product_share(cluster, dtype), cluster.reached
    if not (aligned if aligned is not None else n % 8 == 0 and k % 8 == 0) and cluster.device.kind != "cpu":
        share *= UNALIGNED_SHARE
    seconds = max(_tiled(cluster, peak * share, m, n, k), copy_seconds(cluster, moved).seconds) + _kernel_seconds(cluster)
    how = "roofline of tiles and waves" if cluster.device.kind != "cpu" else "roofline"
    return Rate(seconds, "assumed", f"{how}, {share:.0%} of {source} ({reached.source})")


def product_share(cluster: Cluster, dtype: DType) -> float:
    """Share of the dtype's peak that an endlessly large product reaches."""
    reached = cluster.reached
    return {"fp8": reached.fp8_share, "fp4": reached.fp4_share}.get(dtype, reached.matmul_share)


def _tiled(cluster: Cluster, rate: float, m: int, n: int, k: int) -> float:
    """Seconds of the best way to cut a product into tiles: waves of tiles over the multiprocessors, each tile k deep.

    A wave that is not full costs a part of a whole one. NeuSight (arXiv 2407.13853) prices products likewise.
    """
    if cluster.device.kind == "cpu":
        return 2.0 * m * n * k / rate
    units, reached = UNITS.get(cluster.device.kind, UNKNOWN_UNITS), cluster.reached
    best = math.inf
    for rows, columns, share in TILES:
        tiles = -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            if split > 1 and (tiles * split > units or k < 512 * split):
                break
            waves = tiles * split / units
            waves += reached.wave_loss * (math.ceil(waves) - waves)
            depth = k / split + reached.matmul_depth * (1 if split == 1 else 2)
            best = min(best, waves * units * 2.0 * rows * columns * depth / (rate * share))
    return best


def _kernel_seconds(cluster: Cluster) -> float:
    return launch_seconds(cluster).seconds if cluster.device.kind == "cpu" else cluster.reached.kernel_seconds


def attention_seconds(
    cluster: Cluster, dtype: DType, batch: int, heads: int, kv_heads: int, head_dim: int, seq: int, causal: bool = True
) -> tuple[Rate, Rate]:
    """Time of scaled-dot-product attention, forward and backward: one `Rate` each.

    Causal work is half of full: 2 b h s^2 d FLOP forward, 2.5 times that backward (five products for two).
    """
    if min(batch, heads, head_dim, seq) <= 0:
        none = Rate(0.0, "modelled", "no work")
        return none, none
    factor = 1.0 if causal else 2.0
    points = _same_or_twin(cluster.attentions, dtype)
    if points:
        source = "measured attention table" + ("" if causal else ", twice the causal time")
        return tuple(  # type: ignore[return-value]
            Rate(factor * _attention_from(points, side, (batch, heads, kv_heads, head_dim), seq), "modelled", source)
            for side in ("forward_seconds", "backward_seconds")
        )
    peak, source = _measured_peak(cluster, dtype) or _peak(cluster, dtype)
    flops = factor * 2.0 * batch * heads * seq * seq * head_dim
    launch, reached = _kernel_seconds(cluster), cluster.reached
    full = 1.0 if cluster.device.kind == "cpu" else seq / (seq + reached.attention_depth) * head_share(head_dim)
    forward, backward = (
        Rate(launch + work / (peak * share * full), "assumed", f"roofline, {share:.0%} of {source}")
        for work, share in ((flops, reached.attention_forward), (2.5 * flops, reached.attention_backward))
    )
    return forward, backward


def head_share(head_dim: int) -> float:
    """Rate of flash attention by head size over that of 128: the softmax weighs more beside short products, and sizes that
    are no multiple of 64 are padded (FlashAttention-3, arXiv 2407.08608, figure 5).
    """
    padded = -(-head_dim // 64) * 64
    return 1.25 * head_dim / (padded + 32)


def collective_seconds(cluster: Cluster, op: CollectiveName, num_bytes: float, ranks: int, *, per_node: int = 0) -> Rate:
    """Time of one collective over neighbouring ranks.

    Args:
        cluster: where it runs.
        op: which collective.
        num_bytes: the full buffer: what is reduced, the gathered result, the input that is scattered, the message.
        ranks: how many take part.
        per_node: ranks of this group on one node; 0: as many as fit (neighbours).
    """
    if ranks <= 1 or num_bytes <= 0:
        return Rate(0.0, "modelled", "one rank")
    group = cluster.groups[0]
    inside = min(per_node or group.num_devices, ranks)
    if inside == ranks:
        measured = _measured_collective(cluster, op, num_bytes, ranks)
        if measured:
            return measured
    bandwidth, latency, name = group.link.bandwidth.value, group.link.latency.value, group.link.name
    if inside < ranks and group.network is not None:
        # A node's rings leave it through all its adapters at once, one for each rank of the group that sits there.
        bandwidth = min(bandwidth, inside * group.network.bandwidth.value)
        latency, name = group.network.latency.value, group.network.name
    reached = cluster.reached
    share = reached.network_share if inside < ranks and group.network is not None else reached.link_share
    if op == "all_to_all" and inside < ranks and group.network is not None:
        return _exchange(cluster, num_bytes, ranks, inside)
    found = algorithms(op, num_bytes, ranks, inside, bandwidth * share, latency, in_switch=name in ("nvlink4", "nvlink5"))
    algorithm = min(found, key=found.__getitem__)
    source = f"{algorithm} over {name}: messages x latency + traffic / ({share:.0%} of bandwidth)"
    return Rate(found[algorithm], "assumed", source)


def algorithms(
    op: CollectiveName, num_bytes: float, ranks: int, inside: int, bandwidth: float, latency: float, *, in_switch: bool = False
) -> dict[str, float]:
    """Seconds of one collective by each algorithm that NCCL could take (the library's own choice is the least).

    Args:
        op: which collective.
        num_bytes: the full buffer.
        ranks: how many take part.
        inside: how many of them sit on one node.
        bandwidth: bytes per second that cross one rank's link.
        latency: seconds of one message.
        in_switch: the switch can sum (NVLS), inside one node.
    """
    traffic = TRAFFIC[op](ranks) * num_bytes
    found = {"ring": MESSAGES[op](ranks) * latency + traffic / bandwidth}
    if op == "all_reduce":
        nodes = max(1, -(-ranks // max(1, inside)))
        hops = 2 * (inside - 1) + 2 * math.ceil(math.log2(nodes)) if nodes > 1 else 2 * math.ceil(math.log2(ranks))
        found["tree"] = hops * latency + 2.0 * num_bytes / (bandwidth * TREE_SHARE)
        if in_switch and inside >= ranks > 2:
            found["NVLS"] = 2 * latency + traffic / (bandwidth * NVLS_SHARE)
    return found


def _exchange(cluster: Cluster, num_bytes: float, ranks: int, inside: int) -> Rate:
    """All-to-all over nodes: what leaves the node goes through the rank's own adapter, the rest beside it over the link."""
    group, reached = cluster.groups[0], cluster.reached
    assert group.network is not None
    each = num_bytes / ranks
    out = (ranks - inside) * each / (group.network.bandwidth.value * reached.network_share)
    beside = (inside - 1) * each / (group.link.bandwidth.value * reached.link_share)
    seconds = (ranks - 1) ** 0.5 * group.network.latency.value + max(out, beside)
    return Rate(seconds, "assumed", f"exchange over {group.network.name}: what leaves the node / bandwidth of one adapter")


def copy_seconds(cluster: Cluster, num_bytes: float) -> Rate:
    """Time to move `num_bytes` through device memory, bytes read plus bytes written; launch not included."""
    if num_bytes <= 0:
        return Rate(0.0, "modelled", "no bytes")
    figure = cluster.device.memory_bandwidth
    if figure is not None and figure.source == "measured":
        return Rate(num_bytes / figure.value, "modelled", "measured device copy")
    if figure is not None:
        share = cluster.reached.memory_share
        return Rate(num_bytes / (figure.value * share), "assumed", f"{share:.0%} of {figure.source}")
    host = cluster.host.memory_bandwidth
    if cluster.device.kind == "cpu" and host is not None:
        each = host.value / max(1, cluster.groups[0].num_devices)
        return Rate(num_bytes / each, "assumed", "host copy shared by the ranks")
    return Rate(
        num_bytes / CPU_BYTES_PER_RANK, "assumed", f"assumed {CPU_BYTES_PER_RANK / 1e9:.0f} GB/s a rank: nothing is known"
    )


def launch_seconds(cluster: Cluster) -> Rate:
    """Host time of one eager torch operator."""
    figure = cluster.device.launch_seconds
    if figure is not None:
        return Rate(figure.value, "modelled" if figure.source == "measured" else "assumed", figure.source)
    value, source = cluster.reached.launch_seconds, cluster.reached.source
    return Rate(value, "assumed", f"{source} {value * 1e6:.0f} us an operator")


def _peak(cluster: Cluster, dtype: DType) -> tuple[float, str]:
    """FLOP/s and where they come from; an assumed figure where the device is not in the catalogue."""
    device = cluster.device
    figure = device.peak_flops.get(dtype)
    if figure is not None:
        return figure.value, f"{figure.source} peak {dtype}"
    if device.kind == "cpu":
        cores = max(1, cluster.host.num_cores // max(1, cluster.groups[0].num_devices))
        return cores * CPU_FLOPS_PER_CORE, f"assumed {CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s a core"
    known = [value.value for value in device.peak_flops.values()]
    if known:
        return min(known), f"the lowest known peak ({dtype} has none on {device.kind})"
    return 50e12, f"assumed 50 TFLOP/s: nothing is known of {device.name or device.kind}"


def _measured_peak(cluster: Cluster, dtype: DType) -> tuple[float, str] | None:
    points = _same_or_twin(cluster.matmuls, dtype)
    return (max(point.rate for point in points), "the best measured product") if points else None


TWINS: dict[str, str] = {"bf16": "fp16", "fp16": "bf16"}
"""Dtypes whose tensor-core rates are equal (measured on an H200: 781 and 785 TFLOP/s), for GPUs only by use."""


def _same_or_twin(points: Sequence[Any], dtype: str) -> list[Any]:
    return [p for p in points if p.dtype == dtype] or [p for p in points if p.dtype == TWINS.get(dtype)]


def _matmul_curves(cluster: Cluster, dtype: DType) -> tuple[str, tuple[Curve, ...]] | None:
    def build() -> dict[str, tuple[Curve, ...]]:
        found: dict[str, dict[tuple[int, int], list[MatmulPoint]]] = {}
        for point in cluster.matmuls:
            found.setdefault(point.dtype, {}).setdefault((point.n, point.k), []).append(point)
        return {
            name: tuple(
                Curve(
                    (math.log(n), math.log(k)),
                    math.log(n) + math.log(k),
                    _points((point.m, point.seconds) for point in points),
                )
                for (n, k), points in shapes.items()
            )
            for name, shapes in found.items()
        }

    tables = _cached(cluster.matmuls, "matmul", build)
    for name in (dtype, TWINS.get(dtype, dtype)):
        if name in tables:
            return name, tables[name]
    return None


def _attention_from(points: list[AttentionPoint], side: str, shape: tuple[int, int, int, int], seq: int) -> float:
    curves: dict[tuple[int, int, int, int], list[tuple[float, float]]] = {}
    for point in points:
        key = (point.batch, point.num_heads, point.num_kv_heads, point.head_dim)
        curves.setdefault(key, []).append((point.sequence_length, getattr(point, side)))
    table = tuple(Curve(_attention_key(*key), _attention_work(*key), _points(values)) for key, values in curves.items())
    return math.exp(_blend(table, _attention_key(*shape), _attention_work(*shape), math.log(seq), growth=2.0))


def _attention_key(batch: int, heads: int, kv_heads: int, head_dim: int) -> tuple[float, ...]:
    # The head's size decides which kernel runs: twice the weight of the count of heads.
    return math.log(batch * heads), math.log(heads / max(1, kv_heads)) / 2, 2 * math.log(head_dim)


def _attention_work(batch: int, heads: int, kv_heads: int, head_dim: int) -> float:
    return math.log(batch * heads * head_dim)


def _measured_collective(cluster: Cluster, op: CollectiveName, num_bytes: float, ranks: int) -> Rate | None:
    points = [point for point in cluster.collectives if point.op == op]
    if not points:
        return None
    nearest = min({point.ranks for point in points}, key=lambda n: abs(math.log(n / ranks)))
    curve = _points((point.bytes, point.seconds) for point in points if point.ranks == nearest)
    seconds = math.exp(_along(curve, math.log(num_bytes)))
    if nearest == ranks:
        return Rate(seconds, "modelled", f"measured {op} over {ranks} ranks")
    more = max(0, MESSAGES[op](ranks) - MESSAGES[op](nearest)) * cluster.groups[0].link.latency.value
    seconds = seconds * TRAFFIC[op](ranks) / TRAFFIC[op](nearest) + more
    return Rate(seconds, "assumed", f"measured {op} over {nearest} ranks, scaled to {ranks} by the ring's traffic")


def _points(values: Any) -> tuple[tuple[float, float], ...]:
    """(log size, log seconds) in rising order; of equal sizes the quickest."""
    best: dict[float, float] = {}
    for size, seconds in values:
        best[size] = min(seconds, best.get(size, math.inf))
    return tuple((math.log(size), math.log(max(best[size], 1e-12))) for size in sorted(best))


def _along(points: tuple[tuple[float, float], ...], x: float, growth: float = 1.0) -> float:
    """Log seconds at log size `x`: straight between points; beyond the last, work grows as size to the power `growth` at
    the last rate; below the first, the first slope goes on (time cannot shrink faster than work, nor rise).
    """
    if x >= points[-1][0]:
        return points[-1][1] + growth * (x - points[-1][0])
    if x <= points[0][0]:
        slope = growth
        if len(points) > 1:
            slope = (points[1][1] - points[0][1]) / (points[1][0] - points[0][0])
        return points[0][1] + min(growth, max(0.0, slope)) * (x - points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise AssertionError("points are sorted")


def _blend(curves: tuple[Curve, ...], key: tuple[float, ...], work: float, x: float, growth: float = 1.0) -> float:
    """Log seconds at log size `x` of something with these other sizes: curves by inverse distance, scaled to its work."""
    total = weights = 0.0
    for curve in curves:
        squared = sum((a - b) ** 2 for a, b in zip(curve.key, key, strict=True))
        value = _along(curve.points, x, growth) + work - curve.work
        if squared < 1e-12:
            return value
        weight = 1.0 / squared**2
        total += weight * value
        weights += weight
    return total / weights


_CACHE: dict[Hashable, tuple[Any, Any]] = {}


def _cached(points: Any, name: str, build: Callable[[], Any]) -> Any:
    """Curves of a table, built once: planning asks thousands of times. Keeps the table, so that its id stays its own."""
    key = (name, id(points))
    if key not in _CACHE:
        if len(_CACHE) > 32:
            _CACHE.clear()
        _CACHE[key] = (points, build())
    return _CACHE[key][1]
