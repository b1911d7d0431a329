"""Reading machines: the driver's texts, control groups, this very host."""

import sys
import types

import pytest

from fullstride.cluster import host, nvidia
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.nvidia import QUERY, Gpu, Reading, parse_query, read_gpus, visible
from fullstride.cluster.probe import cpu_cluster, gpu_cluster, probe_cluster
from fullstride.cluster.topology import num_nvlinks, parse_matrix, pick
from fullstride.errors import BadInput
from fullstride.files import from_json, to_json

TWO_BY_SWITCH = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-31\t0\t\tN/A\nGPU1\tNV18\t X \tPIX\t0-31\t0\t\tN/A\n"
    "NIC0\tSYS\tPIX\t X \n\nLegend:\n\n  X    = Self\n"
)
MIXED = (
    "        GPU0    GPU1    GPU2    CPU Affinity\n"
    "GPU0     X      NV12    SYS     0-15\nGPU1    NV12     X      NODE    0-15\nGPU2    SYS     NODE     X      16-31\n"
)


def gpu(index=0, name="NVIDIA H200", **fields):
    return Gpu(index=index, name=name, memory_bytes=150 * 10**9, uuid=f"GPU-{index}abc", pcie_generation=5, **fields)


def test_the_matrix_of_a_switched_pair():
    assert parse_matrix(TWO_BY_SWITCH) == (("X", "NV18"), ("NV18", "X"))
    assert num_nvlinks(parse_matrix(TWO_BY_SWITCH)) == 18


def test_a_pair_without_nvlink_counts():
    matrix = parse_matrix(MIXED)
    assert matrix[1] == ("NV12", "X", "NODE")
    assert num_nvlinks(matrix) == 0 and num_nvlinks(pick(matrix, [0, 1])) == 12
    assert pick(matrix, [1, 5]) == ()


@pytest.mark.parametrize("text", ["", "No devices were found", "\tGPU0\tGPU1\nGPU0\t X \tNV18\n", "GPU0"])
def test_text_that_holds_no_matrix(text):
    assert parse_matrix(text) == ()


def test_one_gpu_is_a_matrix_of_one():
    assert parse_matrix("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == (("X",),)
    assert num_nvlinks((("X",),)) == 0


def test_the_query_of_nvidia_smi():
    text = (
        "0, NVIDIA H200, GPU-1, 143771, 615, 9.0, 580.159.03, 5, 16\n"
        "1, NVIDIA RTX A6000, GPU-2, 49140, [N/A], [Not Supported], 580.159.03, [N/A], [N/A]\n"
        "Unable to determine the device handle for GPU2: GPU is lost.\n"
        "3, NVIDIA H200, GPU-3, [Unknown Error], 615, 9.0, 580.159.03, 5, 16\n"
    )
    gpus, versions = parse_query(text, QUERY)
    assert [(g.index, g.name, g.memory_bytes // 2**20, g.compute_capability) for g in gpus] == [
        (0, "NVIDIA H200", 143771 - 615, "9.0"),
        (1, "NVIDIA RTX A6000", 49140, ""),
    ]
    assert versions == {"driver": "580.159.03"}
    assert parse_query("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", QUERY) == ((), {})


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("-1", []),
        ("GPU-1", [1]),
        ("1,1", [1]),
        (" 1 , 2 ", [1, 2]),
    ],
)
def test_visible_devices(setting, expected):
    assert [g.index for g in visible((gpu(0), gpu(1), gpu(2)), setting)] == expected


def test_two_h200_make_a_cluster_with_nvlink():
    cluster = gpu_cluster(Reading(gpus=(gpu(0), gpu(1)), topology=(("X", "NV18"), ("NV18", "X")), versions={"driver": "580"}))
    assert cluster.device.kind == "h200-sxm" and cluster.num_devices == 2 and cluster.versions["driver"] == "580"
    assert (cluster.groups[0].link.name, cluster.groups[0].link.bandwidth.value) == ("nvlink4", 450e9)
    assert cluster.device.memory_bytes.source == "measured"
    assert from_json(to_json(cluster), Cluster, "memory") == cluster


def test_fewer_links_are_slower_and_none_is_pcie():
    half = gpu_cluster(Reading(gpus=(gpu(0), gpu(1)), topology=(("X", "NV9"), ("NV9", "X"))))
    assert half.groups[0].link.bandwidth.value == pytest.approx(225e9)
    assert gpu_cluster(Reading(gpus=(gpu(0), gpu(1)), topology=(("X", "SYS"), ("SYS", "X")))).groups[0].link.name == "pcie5"


def test_an_unknown_gpu_has_no_peaks_and_unequal_ones_stay_apart():
    cluster = gpu_cluster(Reading(gpus=(gpu(0), gpu(1), gpu(2, "NVIDIA X1"))))
    assert [(g.num_devices, g.device.kind) for g in cluster.groups] == [(2, "h200-sxm"), (1, "unknown")]
    assert cluster.groups[1].device.peak_flops == {} and cluster.groups[1].device.memory_bandwidth is None


def fake_nvml(names, fail=""):
    nvml = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def call(name, value):
        def answer(*_, **__):
            if fail == name:
                raise NVMLError(name)
            return value(*_) if callable(value) else value

        setattr(nvml, name, answer)

    nvml.NVMLError, nvml.nvmlMemory_v2, nvml.NVML_NVLINK_MAX_LINKS = NVMLError, 2, 18
    nvml.NVML_FEATURE_ENABLED = nvml.NVML_P2P_CAPS_INDEX_NVLINK = 1
    nvml.NVML_P2P_STATUS_OK = 0
    memory = types.SimpleNamespace(total=150, reserved=10)
    table = {
        "nvmlInit": None, "nvmlShutdown": None, "nvmlDeviceGetCount": len(names), "nvmlSystemGetDriverVersion": b"580.1",
        "nvmlSystemGetCudaDriverVersion": 13000, "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
        "nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetName": lambda handle: names[int(handle[-1])], "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMaxPcieLinkGeneration": 5, "nvmlDeviceGetMaxPcieLinkWidth": 16, "nvmlDeviceGetNvLinkState": 1,
        "nvmlDeviceGetP2PStatus": 0, "nvmlDeviceGetTopologyCommonAncestor": 50,
    }  # fmt: skip
    for name, value in table.items():
        call(name, value)
    return nvml


def test_nvml_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200", "NVIDIA H200"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reading = read_gpus()
    assert [(g.name, g.memory_bytes, g.compute_capability) for g in reading.gpus] == [("NVIDIA H200", 140, "9.0")] * 2
    assert reading.topology == (("X", "NV18"), ("NV18", "X"))
    assert reading.versions == {"driver": "580.1", "cuda_driver": "13.0"}


@pytest.mark.parametrize("fail", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetName"])
def test_a_broken_driver_is_no_gpu(monkeypatch, fail):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200"], fail))
    monkeypatch.setattr(nvidia.shutil, "which", lambda name: None)
    assert read_gpus() == Reading()


def test_what_a_driver_does_not_support_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H200"] * 2, "nvmlDeviceGetNvLinkState"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_gpus().topology == (("X", "SYS"), ("SYS", "X"))


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("200000 100000\n", 2), ("50000 100000", 1), ("", None), ("1 0", None)]
)
def test_quota(text, cores):
    assert host.cpu_quota(text) == cores


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("1048576\n", 2**20), ("9223372036854771712", None), ("", None)])
def test_memory_limits(text, limit):
    assert host.memory_limit(text) == limit


@pytest.mark.parametrize(("limit", "memory"), [("max", 100), ("60", 60), ("250", 250)])
def test_a_limit_binds_below_the_memory_and_is_believed_above_it(monkeypatch, tmp_path, limit, memory):
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(host, "_groups", lambda: [tmp_path])
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: types.SimpleNamespace(total=100, available=90))
    assert host.host_memory()[0] == memory


def test_the_name_of_a_cpu():
    assert host.cpu_name("processor : 0\nmodel name\t: Some  CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert host.cpu_name("processor : 0\n") == ""


def test_this_host(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster = probe_cluster(num_ranks=3)
    assert cluster.device.kind == "cpu" and cluster.num_devices == 3 and not cluster.assumed
    assert cluster.host.num_cores >= 1 and cluster.host.memory_bytes > 2**28
    assert 0 < cluster.device.memory_bytes.value * 3 <= cluster.host.memory_bytes
    assert cluster.groups[0].link.name == "loopback" and "torch" in cluster.versions
    assert probe_cluster().num_devices == 2
    assert from_json(to_json(cluster), Cluster, "memory") == cluster
    with pytest.raises(BadInput, match="0 ranks"):
        probe_cluster(num_ranks=0)


def test_no_compiler_is_found_where_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    assert not host.has_compiler() and cpu_cluster(1).host.has_compiler is False
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    assert host.has_compiler()
