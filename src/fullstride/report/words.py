"""Text that is safe to show, and numbers as a page prints them; shared by the writers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fullstride.report.document import Trace

DASH = "\N{EN DASH}"
"""What stands where there is no value."""
MINUS = "\N{MINUS SIGN}"

_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}
# Marks that turn the direction of writing could make a line read as something else.
_DIRECTION = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)))
_TABLE: dict[int, str | None] = {**_CONTROL, **_DIRECTION}


def plain(text: str) -> str:
    """`text` without control characters, terminal escapes, direction marks and lone surrogates; tabs and newlines stay."""
    return text.translate(_TABLE).encode("utf-8", "replace").decode("utf-8")


def number(value: float | None, places: int = 4) -> str:
    """Four significant digits without an exponent where that reads well; a dash for None, NaN and infinities."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{places - 1}e}"
    digits = max(0, places - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def signed(value: float) -> str:
    """A difference with its sign, three significant digits."""
    return f"{'+' if value > 0 else MINUS if value < 0 else ''}{number(abs(value), 3)}"


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]


def quantile(ordered: list[float], share: float) -> float:
    """Quantile of sorted, non-empty values by linear interpolation (type 7 of Hyndman and Fan, 1996)."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def five_numbers(values: Iterable[float | None]) -> tuple[float, float, float, float, float] | None:
    """Least, lower quartile, median, upper quartile, greatest; None when there is no value."""
    ordered = sorted(finite(values))
    if not ordered:
        return None
    low, q1, mid, q3, high = (quantile(ordered, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    return low, q1, mid, q3, high


def categories(traces: Iterable[Trace]) -> list[float | str]:
    """All x of the traces, each once, in the order they come."""
    return list(dict.fromkeys(x for trace in traces for x in trace.x))


def waterfall_totals(differences: Iterable[float | None]) -> list[tuple[float, float]]:
    """Where each bar of a waterfall begins and ends; the first and last values are totals and begin at 0."""
    values = [value if value is not None and math.isfinite(value) else 0.0 for value in differences]
    bars: list[tuple[float, float]] = []
    level = 0.0
    for place, value in enumerate(values):
        start = 0.0 if place in (0, len(values) - 1) else level
        level = start + value
        bars.append((start, level))
    return bars
