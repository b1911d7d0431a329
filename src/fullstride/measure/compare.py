"""Is one plan faster than the other? Only interleaved rounds on one held machine may say so."""

from __future__ import annotations

from collections.abc import Sequence

from fullstride.errors import BadInput
from fullstride.measure.measurement import Comparison, Measurement, Verdict
from fullstride.measure.protocol import judge
from fullstride.measure.stats import half_width, ratio_interval, trimmed_mean, unpaired_ratio

THRESHOLD = 0.005


def compare_rounds(
    base: Measurement,
    other: Measurement,
    *,
    threshold: float = THRESHOLD,
    confidence: float = 0.99,
    reasons: Sequence[str] = (),
    verdict: Verdict | None = None,
) -> Comparison:
    """Compare two plans whose rounds alternated (`Round.index` is the common position in time).

    Args:
        base: what `other` is compared with.
        other: the candidate.
        threshold: what the lower end must exceed above 1.
        confidence: of the interval.
        reasons: said before the verdict's own.
        verdict: overrides the interval's, where rounds are void or numbers differ.

    Raises:
        BadInput: the two did not do the same work.
    """
    _same_work(base, other)
    label = base.rounds[0].label if base.rounds else "baseline"
    ratio = ratio_interval((*base.rounds, *other.rounds), label, confidence)
    alternations = min(sum(not r.void for r in m.rounds) for m in (base, other))
    found, reason = judge(ratio, alternations, threshold)
    return Comparison(
        base=base,
        other=other,
        ratio=ratio,
        interleaved=True,
        alternations=alternations,
        threshold=threshold,
        verdict=verdict or found,
        reasons=(*reasons, reason) if verdict is None else tuple(reasons),
    )


def compare_files(base: Measurement, other: Measurement, *, confidence: float = 0.99) -> Comparison:
    """The ratio of two Measurements taken at different times: marked not interleaved, never a verdict.

    Raises:
        BadInput: the two did not do the same work.
    """
    _same_work(base, other)
    times = [[trimmed_mean(r.step_seconds) for r in m.rounds if not r.void] or [m.step_seconds.value] for m in (base, other)]
    reasons = ["not interleaved: the machine may have changed between the two"]
    if base.cluster != other.cluster:
        reasons.append(f"measured on different clusters: {base.cluster} and {other.cluster}")
    if base.versions != other.versions:
        reasons.append("measured with different versions of the software")
    return Comparison(
        base=base,
        other=other,
        ratio=unpaired_ratio(times[0], times[1], confidence),
        interleaved=False,
        alternations=0,
        threshold=THRESHOLD,
        verdict="undetermined",
        reasons=tuple(reasons),
    )


def noise_of(comparison: Comparison) -> float:
    """Half the width of an A/A comparison's interval: differences that small mean nothing on this machine."""
    return half_width(comparison.ratio)


def _same_work(base: Measurement, other: Measurement) -> None:
    if base.work_hash != other.work_hash:
        raise BadInput(
            f"the measurements did different work ({base.work_hash} and {other.work_hash})",
            fix="compare plans of the same model, workload and recipe",
        )
