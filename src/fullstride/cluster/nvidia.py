"""What the NVIDIA driver says: through NVML, or through `nvidia-smi`'s text. No driver, or a broken one, is a normal case."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from typing import Any

from fullstride.cluster.topology import parse_matrix, pick
from fullstride.files import Value

MIB = 2**20
QUERY = (
    "index",
    "name",
    "uuid",
    "memory.total",
    "memory.reserved",
    "compute_cap",
    "driver_version",
    "pcie.link.gen.max",
    "pcie.link.width.max",
)
OLD_QUERY = ("index", "name", "uuid", "memory.total", "driver_version")


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU as the driver describes it."""

    index: int
    name: str
    uuid: str = ""
    memory_bytes: int
    """Total, less what the driver keeps."""
    compute_capability: str = ""
    pcie_generation: int = 0
    """0: not known."""
    pcie_lanes: int = 16


class Reading(Value, frozen=True, kw_only=True):
    """The GPUs that this process may see."""

    gpus: tuple[Gpu, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    versions: dict[str, str] = {}


def read_gpus() -> Reading:
    """The GPUs of this host that `CUDA_VISIBLE_DEVICES` leaves visible; none where there is no working driver."""
    reading = _by_nvml() or _by_text() or Reading()
    chosen = visible(reading.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    topology = pick(reading.topology, [gpu.index for gpu in chosen]) if reading.topology else ()
    return Reading(gpus=chosen, topology=topology, versions=reading.versions if chosen else {})


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """What `CUDA_VISIBLE_DEVICES` leaves: indices or UUIDs in order, ending at the first that does not exist."""
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for word in (part.strip() for part in setting.split(",")):
        found = [gpu for gpu in gpus if word and (word == str(gpu.index) or (not word.isdigit() and gpu.uuid.startswith(word)))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def parse_query(text: str, names: tuple[str, ...]) -> tuple[tuple[Gpu, ...], dict[str, str]]:
    """GPUs out of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; lines that are no GPU are left out."""
    gpus: list[Gpu] = []
    versions: dict[str, str] = {}
    for cells in csv.reader(text.splitlines(), skipinitialspace=True):
        row = dict(zip(names, (cell.strip() for cell in cells), strict=False))
        if len(cells) != len(names) or not row["index"].isdigit() or not _number(row["memory.total"]):
            continue
        usable = _number(row["memory.total"]) - _number(row.get("memory.reserved", ""))
        gpus.append(
            Gpu(
                index=int(row["index"]),
                name=row["name"],
                uuid=row["uuid"],
                memory_bytes=int(usable * MIB),
                compute_capability=row.get("compute_cap", "") if _number(row.get("compute_cap", "")) else "",
                pcie_generation=int(_number(row.get("pcie.link.gen.max", ""))),
                pcie_lanes=int(_number(row.get("pcie.link.width.max", ""))) or 16,
            )
        )
        versions["driver"] = row["driver_version"]
    return tuple(gpus), versions


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0  # [N/A], [Not Supported], [Unknown Error]


def _by_text() -> Reading | None:
    if shutil.which("nvidia-smi") is None:
        return None
    for names in (QUERY, OLD_QUERY):
        text = _run("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
        gpus, versions = parse_query(text, names)
        if gpus:
            return Reading(gpus=gpus, topology=parse_matrix(_run("nvidia-smi", "topo", "-m")), versions=versions)
    return None


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _by_nvml() -> Reading | None:
    try:
        import pynvml  # imported here: a broken driver library may fail at import

        pynvml.nvmlInit()
    except Exception:  # a missing or mismatched driver shows as many kinds of error; all mean "no NVML"
        return None
    try:
        return _nvml_reading(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_reading(nvml: Any) -> Reading | None:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if not handles:
        return None
    gpus = tuple(_nvml_gpu(nvml, index, handle) for index, handle in enumerate(handles))
    cuda = _try(nvml, nvml.nvmlSystemGetCudaDriverVersion, 0)
    versions = {"driver": _word(nvml.nvmlSystemGetDriverVersion())}
    if cuda:
        versions["cuda_driver"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    topology = tuple(tuple(_nvml_pair(nvml, a, b) for b in handles) for a in handles)
    return Reading(gpus=gpus, topology=topology if len(handles) > 1 else (), versions=versions)


def _nvml_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = _try(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2), None)
    usable = memory.total - memory.reserved if memory else nvml.nvmlDeviceGetMemoryInfo(handle).total
    capability = _try(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle), None)
    return Gpu(
        index=index,
        name=_word(nvml.nvmlDeviceGetName(handle)),
        uuid=_word(nvml.nvmlDeviceGetUUID(handle)),
        memory_bytes=int(usable),
        compute_capability=".".join(map(str, capability)) if capability else "",
        pcie_generation=_try(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle), 0),
        pcie_lanes=_try(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle), 16) or 16,
    )


def _nvml_pair(nvml: Any, a: Any, b: Any) -> str:
    """The word of `topo -m` for a pair: NVLinks that both reach (directly or by one switch), else the common ancestor."""
    if a is b:
        return "X"
    links = min(_nvml_links(nvml, a), _nvml_links(nvml, b)) if _nvml_peers(nvml, a, b) else 0
    if links:
        return f"NV{links}"
    level = _try(nvml, lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), None)
    words = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
    return words.get(level, "SYS") if level is not None else "SYS"


def _nvml_peers(nvml: Any, a: Any, b: Any) -> bool:
    status = _try(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK), None)
    return status is not None and status == nvml.NVML_P2P_STATUS_OK


def _nvml_links(nvml: Any, handle: Any) -> int:
    """Active NVLinks of one GPU. On switched systems every link reaches every peer, which is what `topo -m` counts too."""
    active = 0
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        state = _try(nvml, lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link), None)
        if state is None:
            break
        active += int(state == nvml.NVML_FEATURE_ENABLED)
    return active


def _try(nvml: Any, call: Any, otherwise: Any) -> Any:
    try:
        return call()
    except (nvml.NVMLError, AttributeError):
        return otherwise


def _word(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text
