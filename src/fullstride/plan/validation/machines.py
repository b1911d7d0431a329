"""The clusters that published rows ran on: GPU names through the catalogue, links from their columns."""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec.structs import replace

from fullstride.cluster.catalogue import DEVICES, assumed_cluster, identify
from fullstride.cluster.cluster import Cluster, Coefficients, Figure

NAMES: tuple[tuple[str, str], ...] = (
    (r"H100-9[56]GB-HBM2e.*", "h100-sxm-96"),
    (r"H100(-80GB-SXM.*)?", "h100-sxm"),
    (r"H200.*", "h200-sxm"),
    (r"A100-40GB.*", "a100-sxm-40"),
    (r"A100(-80GB)?(-SXM.*)?( .*)?", "a100-sxm-80"),
    (r"V100-16GB.*", "v100-sxm-16"),
    (r"V100-32GB.*", "v100-sxm-32"),
    (r"GB200.*", "gb200"),
    (r"GB300.*", "gb300"),
    (r"B200.*", "b200"),
    (r"B300.*", "b300"),
    (r"L4-24GB.*", "l4"),
)
"""How tables write GPUs, where that is not how drivers do."""
NVLINK_DOMAIN = 64
"""GPUs of an NVL72 rack that jobs in powers of two use."""


def kind_of_gpu(name: str) -> str:
    """Catalogue key of a GPU as a table writes it, or `unknown`."""
    kind = identify(name)
    if kind != "unknown":
        return kind
    return next((key for pattern, key in NAMES if re.fullmatch(pattern, name.strip())), "unknown")


def network_of(text: str, kind: str, per_node: int) -> Figure:
    """Bytes per second of one device between nodes, from words such as `RDMA 400 Gbit/s per GPU`."""
    found = re.search(r"(?:(\d+)x\s*)?(?:HDR |NDR |EDR )?(\d+(?:\.\d+)?)\s*Gbit/s(?:\s+per\s+(GPU|node))?", text, re.IGNORECASE)
    if found:
        total = float(found[2]) * float(found[1] or 1) / 8 * 1e9
        each = total if (found[3] or "node").lower() == "gpu" else total / per_node
        return Figure(value=each, source="datasheet", note=text)
    usual = {"a100-sxm-40": 25e9, "a100-sxm-80": 25e9, "v100-sxm-16": 12.5e9, "v100-sxm-32": 12.5e9}
    value = usual.get(kind, 100e9 if kind in ("b300", "gb300") else 50e9)
    return Figure(value=value, source="assumed", note="not published; what such nodes usually have")


@lru_cache(maxsize=256)
def cluster_of(
    kind: str, num_devices: int, per_node: int, inside: str, between: str, coefficients: Coefficients | None = None
) -> Cluster:
    """The machine of a row (one object for equal machines, so that pricing remembers it)."""
    assert kind in DEVICES, "the caller has checked the kind"
    reach = min(num_devices, NVLINK_DOMAIN) if "NVL72" in inside else min(num_devices, per_node)
    base = assumed_cluster(kind, num_devices, reach)
    figure = network_of(between, kind, per_node)
    groups = tuple(
        replace(group, network=replace(group.network, bandwidth=figure)) if group.network else group for group in base.groups
    )
    return replace(base, groups=groups, coefficients=coefficients)
