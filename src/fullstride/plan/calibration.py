"""Calibrations: fitted coefficients for one kind of GPU and one framework, shipped as versioned files, read when asked for."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster, Coefficients
from fullstride.files import Value, convert

SOFTWARE: dict[str, tuple[str, ...]] = {
    "none": ("torchtitan", "llm-foundry"),
    "ddp": ("torchtitan", "llm-foundry"),
    "fsdp2": ("torchtitan", "llm-foundry"),
    "flat": ("torchtitan", "llm-foundry"),
    "megatron": ("megatron-bridge", "nemo", "megatron-simumax", "megatron-2021"),
    "deepspeed": ("megatron-deepspeed",),
}
"""Frameworks whose calibration stands for a carrier's software, most alike first. Ours runs torch's own FSDP2, kernels and
compiler, as torchtitan does."""


class Calibration(Value, frozen=True, kw_only=True):
    """What was fitted, on what."""

    framework: str
    kind: str
    """Key of the GPU in the catalogue."""
    version: str
    """Date of the fit; goes up when rows or cost model change."""
    rows: int
    """Published runs that it was fitted on."""
    networks: int
    """Different networks among them."""
    error_fitted: float
    """Mean absolute error of time over these runs, per cent."""
    error_held_out: float
    """Over networks that were left out while all else was fitted, in turn (cross-validation)."""
    about: str = ""
    coefficients: Coefficients


@lru_cache(maxsize=64)
def calibration(kind: str, framework: str) -> Calibration | None:
    """The one that is shipped for a kind of GPU and a framework; None where nothing was fitted."""
    entry = files("fullstride.plan") / "calibrations" / f"{framework}-{kind}.toml"
    if not entry.is_file():
        return None
    return convert(tomllib.loads(entry.read_text(encoding="utf-8")), Calibration, entry.name)


def calibration_for(kind: str, framework: str) -> Coefficients | None:
    """Its coefficients."""
    item = calibration(kind, framework)
    return item.coefficients if item else None


def calibrated(cluster: Cluster, carrier: str) -> Cluster:
    """The cluster with what such software was found to reach on its kind of GPU.

    As it is where a table was measured on it, where it brings coefficients of its own, and where no calibration fits.

    Args:
        cluster: where.
        carrier: who carries the weights: `shard.carrier` of a plan.
    """
    if cluster.coefficients is not None or cluster.matmuls:
        return cluster
    kind = cluster.device.kind
    found = next((item for name in SOFTWARE.get(carrier, ()) if (item := calibration(kind, name))), None)
    return replace(cluster, coefficients=found.coefficients) if found else cluster


def words_of(cluster: Cluster) -> str:
    """Where the coefficients in force are from, and how far off a calibration was."""
    source = cluster.reached.source
    framework, _, kind = source.removeprefix("calibration ").partition(" on ")
    item = calibration(kind, framework)
    if item is None:
        return f"what software reaches of it is {source}"
    return (
        f"what software reaches of it is from the {source}: {item.rows} published runs of {item.networks} networks, time "
        f"{item.error_held_out:.0f} % off on networks left out of the fit"
    )
