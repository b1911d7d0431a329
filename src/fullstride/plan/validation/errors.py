"""Error statistics, and the constant-utilisation model that every prediction is set beside."""

from __future__ import annotations

from collections.abc import Sequence

from fullstride.cluster.cluster import Figure
from fullstride.files import Value
from fullstride.model.flops import train_flops_per_token
from fullstride.plan.facts import once
from fullstride.plan.validation.rows import Case


class Errors(Value, frozen=True, kw_only=True):
    """How far predictions are from what was measured, in per cent of what was measured."""

    n: int
    mean_abs_pct: float
    median_abs_pct: float
    p90_abs_pct: float
    worst_abs_pct: float
    bias_pct: float
    """Mean with its sign: above zero predicts too much."""


def errors_of(signed: Sequence[float]) -> Errors | None:
    """Statistics of signed errors in per cent; None of none."""
    if not signed:
        return None
    sizes = sorted(abs(value) for value in signed)
    return Errors(
        n=len(sizes),
        mean_abs_pct=sum(sizes) / len(sizes),
        median_abs_pct=_quantile(sizes, 0.5),
        p90_abs_pct=_quantile(sizes, 0.9),
        worst_abs_pct=sizes[-1],
        bias_pct=sum(signed) / len(signed),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest values (numpy's default)."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ideal_seconds(case: Case) -> float:
    """Time of a step at the full dense peak: the model's own work, attention counted whole, nothing made again."""
    plan, spec = case.plan, case.spec
    length = plan.workload.sequence_length
    flops = once(spec, ("full flops", length), lambda: train_flops_per_token(spec, length, "full"))
    dtype = {"off": plan.precision.block, "nvfp4": "fp4"}.get(plan.precision.fp8, "fp8")
    peaks: dict[str, Figure] = dict(case.cluster.device.peak_flops.items())
    peak = peaks.get(dtype) or peaks.get(plan.precision.block) or max(peaks.values(), key=lambda item: item.value)
    return float(flops * plan.workload.samples_per_step * length / (peak.value * plan.layout.world_size))


def naive_seconds(cases: Sequence[Case]) -> list[float]:
    """Times by the one utilisation that suits these cases best, fitted on them: the least mean absolute error in per cent.

    The error is piecewise linear in the constant, so that one of the cases' own constants is the best.
    """
    ideal = [ideal_seconds(case) for case in cases]
    measured = [case.seconds or 1.0 for case in cases]
    ratios = sorted((m / i, i / m) for m, i in zip(measured, ideal, strict=True))
    total, passed = sum(weight for _, weight in ratios), 0.0
    for ratio, weight in ratios:  # the weighted median
        passed += weight
        if passed >= total / 2:
            return [ratio * value for value in ideal]
    return ideal
