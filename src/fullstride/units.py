"""Parsing and printing of quantities. Inside the code everything is SI base units: bytes, seconds, FLOP, tokens."""

from __future__ import annotations

import re

from fullstride.errors import BadInput

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SHORT = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """Bytes from `80GiB`, `80 GB`, `512M` (binary) or a plain number.

    Raises:
        BadInput: no number, or an unknown unit.
    """
    match = _NUMBER.match(text)
    factors = {**_BINARY, **_DECIMAL, **_SHORT}
    if not match or match[2] not in factors:
        raise BadInput(f"{text!r} is not an amount of memory", fix="write it like 80GiB or 512MiB")
    return int(float(match[1]) * factors[match[2]])


def format_bytes(amount: float) -> str:
    """Binary units, three significant digits: `74.5 GiB`."""
    size = abs(amount)
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _BINARY[unit]:
            return f"{amount / _BINARY[unit]:.{_places(size / _BINARY[unit])}f} {unit}"
    return f"{amount:.0f} B"


def format_seconds(seconds: float) -> str:
    """The unit that keeps one to three digits before the point: `1.52 s`, `83 us`, `2 h 05 min`."""
    size = abs(seconds)
    if size >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if size >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= factor:
            return f"{seconds / factor:.{_places(size / factor)}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def format_count(amount: float) -> str:
    """Decimal multiples for counts: `8.03 B` parameters, `412 k` tokens."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(amount) >= factor:
            return f"{amount / factor:.{_places(abs(amount) / factor)}f} {unit}"
    return f"{amount:.0f}"


def format_flops(rate: float) -> str:
    """A rate of arithmetic: `781 TFLOP/s`."""
    for unit, factor in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if abs(rate) >= factor:
            return f"{rate / factor:.{_places(abs(rate) / factor)}f} {unit}"
    return f"{rate:.0f} FLOP/s"


def format_rate(bytes_per_second: float) -> str:
    """A bandwidth in decimal units, as vendors write it: `333 GB/s`."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(bytes_per_second) >= factor:
            return f"{bytes_per_second / factor:.{_places(abs(bytes_per_second) / factor)}f} {unit}"
    return f"{bytes_per_second:.0f} B/s"


def format_percent(share: float) -> str:
    """A share of one as percent: `37.9 %`."""
    return f"{share * 100:.{_places(abs(share) * 100)}f} %"


def _places(size: float) -> int:
    return 0 if size >= 100 else 1 if size >= 10 else 2
