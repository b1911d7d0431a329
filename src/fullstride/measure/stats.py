"""Intervals from rounds: small samples, correlated steps, drifting machines. Pure Python.

Steps inside a round are correlated (caches, clocks, one scheduler), so a round counts as one observation and every
interval comes from the variation between rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from fullstride.measure.measurement import Interval, Round

Stretch = tuple[int, int]
"""A half-open interval [start, end), in nanoseconds."""

WIDEST = math.log(1000.0)
"""An interval of a ratio never claims to be wider than a factor of 1,000 either way: that is already "unknown"."""
TRIM = 0.1
"""Share of a round's steps that is dropped at each end: the extremes."""
OUTLIER = 4.0
"""Rounds that lie this many robust standard deviations off, either way, are dropped from a ratio."""
_ROUNDS_FOR_EACH = 12
"""Of so many rounds one pair may be dropped: from six alternations on."""
_MAD_TO_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation of a normal law."""
_REFITS = 4


def trimmed_mean(values: Sequence[float], trim: float = TRIM) -> float:
    """Mean without the extremes: `trim` of the values is dropped at each end, at least one where there are five or more."""
    ordered = sorted(values)
    drop = int(len(ordered) * trim)
    if len(ordered) >= 5:
        drop = max(1, drop)
    return statistics.fmean(ordered[drop : len(ordered) - drop])


def mean_without_extremes(values: Sequence[float]) -> float:
    """Mean after the smallest and the largest are dropped; of all where there are fewer than three."""
    ordered = sorted(values)
    return statistics.fmean(ordered[1:-1] if len(ordered) >= 3 else ordered)


def variation(values: Sequence[float]) -> float:
    """Standard deviation over mean (coefficient of variation); 0 for fewer than two values or a mean of zero."""
    if len(values) < 2:
        return 0.0
    mean = statistics.fmean(values)
    return statistics.pstdev(values, mean) / mean if mean else 0.0


def student_inside(t: float, freedom: int) -> float:
    """Probability that |T| <= t under Student's law with `freedom` degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    odd = freedom % 2
    term, total = 1.0, 1.0 if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine2 * (k - 1) / k
        total += term
    if odd:
        return (2 / math.pi) * (angle + math.sin(angle) * math.cos(angle) * total)
    return math.sin(angle) * total


@lru_cache(maxsize=1024)
def student_quantile(confidence: float, freedom: int) -> float:
    """The t for which |T| <= t holds with probability `confidence`; by bisection on the exact law."""
    assert 0 < confidence < 1, confidence
    assert freedom >= 1, freedom
    low, high = 0.0, 1.0
    while student_inside(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_inside(middle, freedom) < confidence else (low, middle)
    return high


def interval_of_mean(values: Sequence[float], confidence: float = 0.99) -> Interval:
    """Student's interval of the mean of independent values; of one value it is as wide as `WIDEST`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(value=mean, low=mean / 1000, high=mean * 1000, confidence=confidence)
    half = student_quantile(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(value=mean, low=mean - half, high=mean + half, confidence=confidence)


def ratio_interval(rounds: Sequence[Round], base: str, confidence: float = 0.99) -> Interval:
    """Time of `base` over time of the other label, from rounds that alternate.

    Least squares on the logarithm of each round's time with a level, a linear trend along the alternation and the effect
    of the label: neighbours are compared, and a machine that warms up or slows down steadily favours neither. Void rounds
    are left out. With n rounds there are n - 3 degrees of freedom; three rounds (A-B-A) fall back on the two neighbouring
    pairs and one degree, fewer say nothing (`WIDEST`). From six alternations on the rounds that lie more than `OUTLIER`
    robust deviations off are dropped, slow and fast ones alike and at most two of twelve: a machine that stalls now and
    then does not widen the interval without end, and the interval covers as often as it says.

    Args:
        rounds: in any order; `index` is the position in time.
        base: the label that is divided.
        confidence: such as 0.99.
    """
    counted = sorted((r for r in rounds if not r.void), key=lambda r: r.index)
    times = [math.log(trimmed_mean(r.step_seconds)) for r in counted]
    other = [float(r.label != base) for r in counted]
    if not times or len(set(other)) < 2:
        return Interval(value=1.0, low=math.exp(-WIDEST), high=math.exp(WIDEST), confidence=confidence)
    effect, half = _effect(times, other, [float(r.index) for r in counted], confidence)
    half = min(half, WIDEST)
    return Interval(value=math.exp(-effect), low=math.exp(-effect - half), high=math.exp(-effect + half), confidence=confidence)


def _effect(times: list[float], other: list[float], places: list[float], confidence: float) -> tuple[float, float]:
    """The label's effect on the logarithm of time, and half the width of its interval."""
    if len(times) < 3:
        means = [statistics.fmean(t for t, o in zip(times, other, strict=True) if o == side) for side in (1.0, 0.0)]
        return means[0] - means[1], WIDEST
    kept = list(range(len(times)))
    effect, weight, residuals = _fit(times, other, places, kept)
    for _ in range(_REFITS):
        within = _without_outliers(residuals, int(min(sum(other), len(other) - sum(other))))
        if within == kept:
            break
        kept = within
        effect, weight, residuals = _fit(times, other, places, kept)
    freedom = len(kept) - 3
    if freedom:
        left = math.fsum(residuals[i] ** 2 for i in kept)
        return effect, student_quantile(confidence, freedom) * math.sqrt(left / freedom / weight)
    spread = abs(times[0] - times[2]) / 2
    return effect, student_quantile(confidence, 1) * spread


def _fit(times: list[float], other: list[float], places: list[float], kept: list[int]) -> tuple[float, float, list[float]]:
    """Least squares on the rounds that are kept: the label's effect, its weight, and what is left of every round."""
    x = [places[i] for i in kept]
    label, time = _detrended([other[i] for i in kept], x), _detrended([times[i] for i in kept], x)
    weight = math.fsum(v * v for v in label)
    effect = math.fsum(a * b for a, b in zip(label, time, strict=True)) / weight
    without_label = [t - effect * o for t, o in zip(times, other, strict=True)]
    level, slope = _line([without_label[i] for i in kept], x)
    return effect, weight, [t - level - slope * place for t, place in zip(without_label, places, strict=True)]


def _without_outliers(residuals: list[float], alternations: int) -> list[int]:
    """Places of the rounds that are no outliers; all of them where there are too few alternations to tell."""
    everything = range(len(residuals))
    most = 2 * (2 * alternations // _ROUNDS_FOR_EACH)
    if not most:
        return list(everything)
    limit = OUTLIER * _MAD_TO_DEVIATION * statistics.median(abs(r) for r in residuals)
    farthest = sorted(everything, key=lambda i: -abs(residuals[i]))[:most]
    dropped = {i for i in farthest if abs(residuals[i]) > limit}
    return [i for i in everything if i not in dropped]


def _line(values: Sequence[float], places: Sequence[float]) -> tuple[float, float]:
    """The best straight line over the places: its value at zero, and its slope."""
    x, y = statistics.fmean(places), statistics.fmean(values)
    slope = math.fsum((p - x) * (v - y) for p, v in zip(places, values, strict=True)) / math.fsum((p - x) ** 2 for p in places)
    return y - slope * x, slope


def _detrended(values: Sequence[float], places: Sequence[float]) -> list[float]:
    """What is left of the values after their best straight line over the places."""
    level, slope = _line(values, places)
    return [v - level - slope * p for p, v in zip(places, values, strict=True)]


def unpaired_ratio(base: Sequence[float], other: Sequence[float], confidence: float = 0.99) -> Interval:
    """Ratio of two sets of round times that were not interleaved (Welch's interval on logarithms)."""
    a, b = ([math.log(v) for v in values] for values in (base, other))
    effect, half = statistics.fmean(a) - statistics.fmean(b), WIDEST
    if len(a) >= 2 and len(b) >= 2:
        va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
        if va + vb == 0:
            half = 0.0
        else:
            freedom = max(1, int((va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))))
            half = min(WIDEST, student_quantile(confidence, freedom) * math.sqrt(va + vb))
    return Interval(value=math.exp(effect), low=math.exp(effect - half), high=math.exp(effect + half), confidence=confidence)


def half_width(interval: Interval) -> float:
    """Half the width of an interval of a ratio, as a share of its value."""
    return (interval.high - interval.low) / 2 / interval.value


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same points as disjoint stretches in order."""
    merged: list[Stretch] = []
    for start, end in sorted(s for s in stretches if s[1] > s[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(stretches: Sequence[Stretch], taken: Sequence[Stretch]) -> list[Stretch]:
    """What is left of disjoint ordered `stretches` when disjoint ordered `taken` are cut out."""
    left: list[Stretch] = []
    first = 0
    for start, end in stretches:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at, k = start, first
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > at:
                left.append((at, taken[k][0]))
            at = max(at, taken[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length(stretches: Iterable[Stretch]) -> int:
    """Total length of disjoint stretches."""
    return sum(end - start for start, end in stretches)


def clipped(stretches: Iterable[Stretch], window: Stretch) -> list[Stretch]:
    """The parts inside the window, as a union."""
    return union((max(start, window[0]), min(end, window[1])) for start, end in stretches)


Clock = Callable[[], float]
"""Seconds on a clock that only goes forward; injected, so that tests need not wait."""
