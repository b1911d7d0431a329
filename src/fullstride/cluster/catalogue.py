"""What data sheets say of GPUs and links: dense peaks, memory, bandwidth. Who is not listed is `unknown`, with no peaks."""

from __future__ import annotations

import re

from fullstride.cluster.cluster import Cluster, Device, DType, Figure, Host, Link, NodeGroup
from fullstride.errors import BadInput

MIB = 2**20
T = 1e12

# key: (name, memory in MiB as the driver reports it, memory GB/s, NVLink or fabric GB/s one way (0: none), PCIe generation,
#       compute capability, data sheet or white paper, {dtype: dense TFLOP/s, on tensor cores where there are; fp16 as bf16})
_Row = tuple[str, int, float, float, int, str, str, dict[DType, float]]
_HOPPER: dict[DType, float] = {"fp64": 33.5, "fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9}
_HOPPER_NVL: dict[DType, float] = {"fp64": 30, "fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp8": 1670.5}
_AMPERE: dict[DType, float] = {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "bf16": 312}
_MI300: dict[DType, float] = {"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp8": 2614.9}

_GPUS: dict[str, _Row] = {
    "t4": ("Tesla T4", 15360, 320, 0, 3, "7.5", "T4", {"fp32": 8.1, "fp16": 65}),
    "v100-sxm-16": ("Tesla V100-SXM2-16GB", 16384, 900, 150, 3, "7.0", "V100", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}),
    "v100-sxm-32": ("Tesla V100-SXM2-32GB", 32768, 900, 150, 3, "7.0", "V100", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}),
    "v100-pcie-16": ("Tesla V100-PCIE-16GB", 16384, 900, 0, 3, "7.0", "V100", {"fp64": 7, "fp32": 14, "fp16": 112}),
    "v100-pcie-32": ("Tesla V100-PCIE-32GB", 32768, 900, 0, 3, "7.0", "V100", {"fp64": 7, "fp32": 14, "fp16": 112}),
    "a100-sxm-40": ("NVIDIA A100-SXM4-40GB", 40960, 1555, 300, 4, "8.0", "A100", _AMPERE),
    "a100-sxm-80": ("NVIDIA A100-SXM4-80GB", 81920, 2039, 300, 4, "8.0", "A100", _AMPERE),
    "a100-pcie-40": ("NVIDIA A100-PCIE-40GB", 40960, 1555, 0, 4, "8.0", "A100", _AMPERE),
    "a100-pcie-80": ("NVIDIA A100 80GB PCIe", 81920, 1935, 0, 4, "8.0", "A100", _AMPERE),
    "a800-sxm-80": ("NVIDIA A800-SXM4-80GB", 81920, 2039, 200, 4, "8.0", "A800", _AMPERE),
    "a30": ("NVIDIA A30", 24576, 933, 0, 4, "8.0", "A30", {"fp64": 5.2, "fp32": 10.3, "tf32": 82, "bf16": 165}),
    "a10": ("NVIDIA A10", 23028, 600, 0, 4, "8.6", "A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125}),
    "a40": ("NVIDIA A40", 46068, 696, 0, 4, "8.6", "A40", {"fp32": 37.4, "tf32": 74.8, "bf16": 149.7}),
    "a6000": ("NVIDIA RTX A6000", 49140, 768, 0, 4, "8.6", "GA102 white paper", {"fp32": 38.7, "tf32": 77.4, "bf16": 154.8}),
    "rtx3090": (
        "NVIDIA GeForce RTX 3090", 24576, 936, 0, 4, "8.6", "GA102 white paper",
        {"fp32": 35.6, "tf32": 35.6, "bf16": 71},
    ),
    "rtx4090": (
        "NVIDIA GeForce RTX 4090", 24564, 1008, 0, 4, "8.9", "Ada white paper, fp32 accumulation",
        {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp8": 330.3},
    ),
    "rtx5090": (
        "NVIDIA GeForce RTX 5090", 32607, 1792, 0, 5, "12.0", "RTX Blackwell white paper, fp32 accumulation",
        {"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp8": 419},
    ),
    "l4": ("NVIDIA L4", 23034, 300, 0, 4, "8.9", "L4", {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp8": 242.5}),
    "l40": ("NVIDIA L40", 46068, 864, 0, 4, "8.9", "L40", {"fp32": 90.5, "tf32": 90.5, "bf16": 181, "fp8": 362}),
    "l40s": ("NVIDIA L40S", 46068, 864, 0, 4, "8.9", "L40S", {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp8": 733}),
    "h20": ("NVIDIA H20", 97871, 4000, 450, 5, "9.0", "H20", {"fp64": 1, "fp32": 44, "tf32": 74, "bf16": 148, "fp8": 296}),
    "h800-sxm": ("NVIDIA H800", 81559, 3350, 200, 5, "9.0", "H800", {**_HOPPER, "fp64": 1}),
    "h100-sxm": ("NVIDIA H100 80GB HBM3", 81559, 3350, 450, 5, "9.0", "H100", _HOPPER),
    "h100-sxm-96": ("NVIDIA H100 96GB HBM2e", 97871, 2400, 450, 5, "9.0", "H100 (96 GB HBM2e, 500 W)", _HOPPER),
    "h100-pcie": (
        "NVIDIA H100 PCIe", 81559, 2000, 0, 5, "9.0", "H100",
        {"fp64": 25.6, "fp32": 51.2, "tf32": 378, "bf16": 756, "fp8": 1513},
    ),
    "h100-nvl": ("NVIDIA H100 NVL", 95830, 3938, 300, 5, "9.0", "H100 NVL", _HOPPER_NVL),
    "h200-sxm": ("NVIDIA H200", 143771, 4800, 450, 5, "9.0", "H200", _HOPPER),
    "h200-nvl": ("NVIDIA H200 NVL", 143771, 4800, 450, 5, "9.0", "H200", _HOPPER_NVL),
    "gh200-96": ("NVIDIA GH200 480GB", 97871, 4000, 450, 5, "9.0", "GH200", _HOPPER),
    "gh200-144": ("NVIDIA GH200 144G HBM3e", 147456, 4900, 450, 5, "9.0", "GH200", _HOPPER),
    "b200": (
        "NVIDIA B200", 183359, 7700, 900, 5, "10.0", "HGX B200, per GPU",
        {"fp64": 37, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500, "fp4": 9000},
    ),
    "b300": (
        "NVIDIA B300 SXM6 AC", 275040, 7700, 900, 6, "10.3", "HGX B300, per GPU",
        {"fp64": 1.2, "fp32": 75, "tf32": 1125, "bf16": 2250, "fp8": 4500, "fp4": 13500},
    ),
    "gb200": (
        "NVIDIA GB200", 189471, 8000, 900, 5, "10.0", "GB200 NVL72, per GPU",
        {"fp64": 40, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp8": 5000, "fp4": 10000},
    ),
    "gb300": (
        "NVIDIA GB300", 284208, 8000, 900, 6, "10.3", "GB300 NVL72, per GPU",
        {"fp64": 1.3, "fp32": 80, "tf32": 1250, "bf16": 2500, "fp8": 5000, "fp4": 15000},
    ),
    "mi300x": ("AMD Instinct MI300X", 196592, 5300, 448, 5, "", "MI300X", _MI300),
    "mi325x": ("AMD Instinct MI325X", 262128, 6000, 448, 5, "", "MI325X", _MI300),
    "mi355x": (
        "AMD Instinct MI355X", 294896, 8000, 537, 5, "", "MI355X",
        {"fp64": 78.6, "fp32": 157.3, "bf16": 2516.6, "fp8": 5033.2, "fp4": 10066.3},
    ),
}  # fmt: skip

_NAMES: tuple[tuple[str, str], ...] = (
    (r"H200 NVL", "h200-nvl"),
    (r"H200", "h200-sxm"),
    (r"H100 NVL", "h100-nvl"),
    (r"H100 PCIe", "h100-pcie"),
    (r"H100 (80GB HBM3|SXM5.*)", "h100-sxm"),
    (r"H100[- ]9[56]GB[- ]HBM2e.*", "h100-sxm-96"),
    (r"H800( SXM5.*)?", "h800-sxm"),
    (r"H20", "h20"),
    (r"GH200 (480GB|96GB.*)", "gh200-96"),
    (r"GH200 144G.*", "gh200-144"),
    (r"B200", "b200"),
    (r"B300( SXM6.*)?", "b300"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"A100[- ]SXM4[- ]40GB", "a100-sxm-40"),
    (r"A100[- ]SXM4[- ]80GB", "a100-sxm-80"),
    (r"A100[- ]PCIE[- ]40GB", "a100-pcie-40"),
    (r"A100([- ]PCIE[- ]80GB| 80GB PCIe)", "a100-pcie-80"),
    (r"A800[- ]SXM4[- ]80GB", "a800-sxm-80"),
    (r"V100-SXM[23](-16GB)", "v100-sxm-16"),
    (r"V100-SXM[23](-32GB)", "v100-sxm-32"),
    (r"V100-PCIE-16GB", "v100-pcie-16"),
    (r"V100-PCIE-32GB", "v100-pcie-32"),
    (r"A30", "a30"),
    (r"A10", "a10"),
    (r"A40", "a40"),
    (r"(RTX )?A6000", "a6000"),
    (r"(GeForce )?RTX 3090", "rtx3090"),
    (r"(GeForce )?RTX 4090", "rtx4090"),
    (r"(GeForce )?RTX 5090", "rtx5090"),
    (r"L4", "l4"),
    (r"L40", "l40"),
    (r"L40S", "l40s"),
    (r"T4", "t4"),
    (r"MI300X.*", "mi300x"),
    (r"MI325X.*", "mi325x"),
    (r"MI355X.*", "mi355x"),
)
"""Driver names, whole, without the maker. A name that says more (Ti, Laptop, MIG slice) is another device: unknown."""

UNITS: dict[str, int] = {
    "t4": 40, "v100-sxm-16": 80, "v100-sxm-32": 80, "v100-pcie-16": 80, "v100-pcie-32": 80, "a100-sxm-40": 108,
    "a100-sxm-80": 108, "a100-pcie-40": 108, "a100-pcie-80": 108, "a800-sxm-80": 108, "a30": 56, "a10": 72, "a40": 84,
    "a6000": 84, "rtx3090": 82, "rtx4090": 128, "rtx5090": 170, "l4": 58, "l40": 142, "l40s": 142, "h20": 78,
    "h800-sxm": 132, "h100-sxm": 132, "h100-sxm-96": 132, "h100-pcie": 114, "h100-nvl": 132, "h200-sxm": 132,
    "h200-nvl": 132, "gh200-96": 132, "gh200-144": 132, "b200": 148, "b300": 148, "gb200": 148, "gb300": 148,
    "mi300x": 304, "mi325x": 304, "mi355x": 256,
}  # fmt: skip
"""Streaming multiprocessors (AMD: compute units) that a product's tiles are dealt to; data sheets and white papers."""

PCIE_BYTES: dict[int, float] = {1: 4e9, 2: 8e9, 3: 15.75e9, 4: 31.5e9, 5: 63e9, 6: 121e9}
"""One way, 16 lanes, by generation (PCI-SIG: rate x 16 lanes / 8, line coding taken off)."""
NVLINK_LATENCY = Figure(value=4e-6, source="assumed", note="one NCCL message inside a node")
PCIE_LATENCY = Figure(value=10e-6, source="assumed", note="one NCCL message through the host bridge")


def _sheet(row: _Row) -> str:
    return row[6] if "white paper" in row[6] else f"{row[6]} data sheet"


def _device(kind: str, row: _Row) -> Device:
    name, memory, bandwidth, _, _, capability, _, _ = row
    peaks, sheet = dict(row[7]), _sheet(row)
    if "bf16" in peaks:
        peaks["fp16"] = peaks["bf16"]
    return Device(
        kind=kind,
        name=name,
        memory_bytes=Figure(value=float(memory * MIB), source="datasheet", note="total as the driver reports it"),
        peak_flops={
            dtype: Figure(value=value * T, source="datasheet", note=f"{sheet}, dense") for dtype, value in peaks.items()
        },
        memory_bandwidth=Figure(value=bandwidth * 1e9, source="datasheet", note=sheet),
        compute_capability=capability,
    )


DEVICES: dict[str, Device] = {kind: _device(kind, row) for kind, row in _GPUS.items()}
"""All known devices by key."""


def identify(name: str) -> str:
    """Catalogue key of what a driver calls a device (`NVIDIA H200` is `h200-sxm`), or `unknown`."""
    plain = re.sub(r"^(NVIDIA|Tesla|AMD|Instinct|AMD Instinct)\s+", "", name.strip())
    plain = re.sub(r"^(Tesla|Instinct)\s+", "", plain)
    if plain.lower() in DEVICES:
        return plain.lower()
    for pattern, key in _NAMES:
        if re.fullmatch(pattern, plain, re.IGNORECASE):
            return key
    return "unknown"


def pcie_link(generation: int, lanes: int = 16) -> Link:
    """Devices joined through PCI Express."""
    value = PCIE_BYTES.get(generation, PCIE_BYTES[3]) * lanes / 16
    source = "datasheet" if generation in PCIE_BYTES else "assumed"
    note = f"PCIe {generation} x{lanes}, one way" if source == "datasheet" else "PCIe generation not known, 3 taken"
    return Link(name=f"pcie{generation or ''}", bandwidth=Figure(value=value, source=source, note=note), latency=PCIE_LATENCY)  # type: ignore[arg-type]


def nvlink_of(kind: str) -> Link | None:
    """The fabric between devices of this kind; None if it has none or is not listed."""
    row = _GPUS.get(kind)
    if row is None or not row[3]:
        return None
    name = (
        "infinity-fabric"
        if kind.startswith("mi")
        else f"nvlink{ {150: 2, 300: 3, 200: 3, 450: 4, 900: 5}.get(int(row[3]), '') }"
    )
    return Link(
        name=name,
        bandwidth=Figure(value=row[3] * 1e9, source="datasheet", note=f"{_sheet(row)}, one way, all links of a GPU"),
        latency=NVLINK_LATENCY,
    )


def link_of(kind: str) -> Link:
    """What devices of this kind are usually joined by inside a node: NVLink where they have it, else PCI Express."""
    return nvlink_of(kind) or pcie_link(_GPUS[kind][4] if kind in _GPUS else 4)


def assumed_cluster(kind: str = "h100-sxm", num_devices: int = 8, per_node: int = 8) -> Cluster:
    """A usual cluster of devices of one kind: `per_node` a node, 400 Gbit/s a device between nodes; marked as assumed.

    Raises:
        BadInput: the kind is not in the catalogue, or a count is below one.
    """
    if kind not in DEVICES:
        raise BadInput(
            f"GPU kind {kind!r} is not in the catalogue", fix=f"choose one of {', '.join(DEVICES)}, or give a cluster file"
        )
    if num_devices < 1 or per_node < 1:
        raise BadInput(f"{num_devices} devices, {per_node} a node: both must be at least 1", fix="give positive counts")
    full, rest = divmod(num_devices, per_node)
    nodes = [(full, per_node)] * (full > 0) + [(1, rest)] * (rest > 0)
    several = sum(count for count, _ in nodes) > 1
    groups = tuple(_assumed_group(kind, count, each, several) for count, each in nodes)
    return Cluster(name=f"{num_devices} x {kind} (assumed)", groups=groups, assumed=True)


def _assumed_group(kind: str, count: int, each: int, several: bool) -> NodeGroup:
    network = Link(
        name="infiniband",
        bandwidth=Figure(value=50e9, source="assumed", note="400 Gbit/s a device"),
        latency=Figure(value=5e-6, source="assumed", note="one message between nodes"),
    )
    wire = PCIE_BYTES[_GPUS[kind][4]] * 0.85
    copy = Figure(value=wire, source="assumed", note=f"85 % of PCIe {_GPUS[kind][4]} x16")
    host = Host(
        cpu_name="assumed", num_cores=12 * each, memory_bytes=each * 128 * 2**30, host_to_device=copy, device_to_host=copy
    )
    link, device = link_of(kind), DEVICES[kind]
    return NodeGroup(count=count, num_devices=each, device=device, host=host, link=link, network=network if several else None)
