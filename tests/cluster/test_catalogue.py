"""The catalogue: names that drivers give, figures with sources, the assumed cluster."""

import pytest

from fullstride.cluster.catalogue import DEVICES, assumed_cluster, identify, link_of, nvlink_of, pcie_link
from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput
from fullstride.files import from_json, to_json

NAMES = {
    "NVIDIA H200": "h200-sxm",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA A100-SXM4-80GB": "a100-sxm-80",
    "A100-SXM4-40GB": "a100-sxm-40",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80",
    "Tesla V100-SXM2-32GB": "v100-sxm-32",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA L40S": "l40s",
    "NVIDIA L4": "l4",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "AMD Instinct MI300X": "mi300x",
    "h100-sxm": "h100-sxm",
}


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_known_names(name, key):
    assert identify(name) == key


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA H300",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "L4000",
    ],
)
def test_other_names_are_unknown(name):
    assert identify(name) == "unknown"


def test_every_device_is_found_by_its_own_name_and_carries_sources():
    for kind, device in DEVICES.items():
        assert identify(device.name) == kind == device.kind
        figures = [device.memory_bytes, device.memory_bandwidth, *device.peak_flops.values()]
        assert all(figure.source == "datasheet" and figure.note and figure.value > 0 for figure in figures)
        # A narrower dtype is never slower, and a device reads its memory in under a second.
        peaks = [device.peak_flops[d].value for d in ("fp64", "fp32", "tf32", "bf16", "fp8") if d in device.peak_flops]
        assert peaks == sorted(peaks)
        assert device.memory_bytes.value / device.memory_bandwidth.value < 1


def test_links():
    assert nvlink_of("l40s") is None and link_of("l40s").name == "pcie4"
    assert (link_of("h200-sxm").name, link_of("h200-sxm").bandwidth.value) == ("nvlink4", 450e9)
    assert pcie_link(5, 8).bandwidth.value == pytest.approx(31.5e9)
    assert pcie_link(0).bandwidth.source == "assumed"


def test_the_assumed_cluster_says_so_and_comes_back_equal():
    cluster = assumed_cluster()
    assert cluster.assumed and cluster.num_devices == 8 and cluster.groups[0].network is None
    big = assumed_cluster("b200", 20, 8)
    assert [(group.count, group.num_devices) for group in big.groups] == [(2, 8), (1, 4)]
    assert big.groups[0].network.bandwidth.value == 50e9 and big.num_devices == 20
    assert from_json(to_json(big), Cluster, "memory") == big


@pytest.mark.parametrize(("kind", "devices"), [("h1000", 8), ("h100-sxm", 0)])
def test_impossible_clusters_are_refused(kind, devices):
    with pytest.raises(BadInput, match=kind if devices else "at least 1"):
        assumed_cluster(kind, devices)
