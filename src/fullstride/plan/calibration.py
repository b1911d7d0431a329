"""Calibrations: fitted coefficients for one kind of GPU and one framework, shipped as versioned files, read when asked for."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from importlib.resources import files

from fullstride.cluster.cluster import Coefficients
from fullstride.files import Value, convert


class Calibration(Value, frozen=True, kw_only=True):
    """What was fitted, on what."""

    framework: str
    kind: str
    """Key of the GPU in the catalogue."""
    version: str
    """Date of the fit; goes up when rows or cost model change."""
    rows: int
    """Published runs that it was fitted on."""
    error_fitted: float
    """Mean absolute error on the half that was fitted, per cent."""
    error_held_out: float
    """On the half that was not."""
    about: str = ""
    coefficients: Coefficients


@lru_cache(maxsize=1)
def calibrations() -> dict[tuple[str, str], Calibration]:
    """All that are shipped, by GPU kind and framework."""
    found: dict[tuple[str, str], Calibration] = {}
    folder = files("fullstride.plan") / "calibrations"
    if not folder.is_dir():
        return found
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".toml"):
            item = convert(tomllib.loads(entry.read_text(encoding="utf-8")), Calibration, entry.name)
            found[item.kind, item.framework] = item
    return found


def calibration_for(kind: str, framework: str) -> Coefficients | None:
    """The coefficients for a kind of GPU and a framework; None where nothing was fitted."""
    item = calibrations().get((kind, framework))
    return item.coefficients if item else None
