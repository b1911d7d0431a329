"""The three health figures of a training step, with the article's limits.

Throughput stability: standard deviation over mean of step time, under 5 %, 1,000 steps. Memory volatility: largest over
the ranks of standard deviation over mean of reserved device memory after warm-up, under 8 % (of resident memory on a CPU,
where it is shown and not judged: other processes move it too).
Communication efficiency: min(1, exposed collective time / (step - compute - data - offload - bubble)), over 75 %; not
applicable with one rank, and always shown beside the exposed milliseconds, because a step with nothing exposed has a poor
figure and no problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fullstride.measure.measurement import Health, Measurement, Share
from fullstride.measure.stats import interval_of_mean, variation

STABILITY_LIMIT = 0.05
VOLATILITY_LIMIT = 0.08
EFFICIENCY_LIMIT = 0.75
ENOUGH_STEPS = 1000
RESIDENT = "resident memory, which other processes move too: not judged"
_SURE = 0.95
"""Confidence of the intervals that a veto needs: it claims less than a gain does."""


def health_figures(
    *,
    step_seconds: Sequence[float],
    reserved_bytes: Mapping[int, Sequence[int]],
    shares: Sequence[Share],
    world_size: int,
    on_host: bool = False,
) -> tuple[Health, ...]:
    """All three.

    Args:
        step_seconds: of the timed steps.
        reserved_bytes: rank -> samples after warm-up.
        shares: the attributed step; empty if it was not profiled.
        world_size: ranks.
        on_host: memory is a CPU process's.
    """
    return (
        throughput_stability(step_seconds),
        memory_volatility(reserved_bytes, on_host=on_host),
        communication_efficiency(shares, world_size),
    )


def throughput_stability(step_seconds: Sequence[float]) -> Health:
    """Standard deviation over mean of step time."""
    value = variation(step_seconds) if len(step_seconds) >= 2 else None
    return Health(
        name="throughput stability",
        value=value,
        limit=STABILITY_LIMIT,
        good=None if value is None else value < STABILITY_LIMIT,
        samples=len(step_seconds),
        note=_too_few(len(step_seconds)),
    )


def memory_volatility(reserved_bytes: Mapping[int, Sequence[int]], *, on_host: bool = False) -> Health:
    """Largest over the ranks of standard deviation over mean of reserved memory; of a CPU process's it is not judged."""
    sampled = {rank: samples for rank, samples in reserved_bytes.items() if len(samples) >= 2}
    value = max((variation(samples) for samples in sampled.values()), default=None)
    number = min((len(samples) for samples in sampled.values()), default=0)
    return Health(
        name="memory volatility",
        value=value,
        limit=VOLATILITY_LIMIT,
        good=None if value is None or on_host else value < VOLATILITY_LIMIT,
        samples=number,
        note="memory was not sampled" if not sampled else RESIDENT if on_host else _too_few(number),
    )


def communication_efficiency(shares: Sequence[Share], world_size: int) -> Health:
    """Exposed collective time over what is left of the step without compute, data, offload and bubble."""
    limit = EFFICIENCY_LIMIT
    if world_size == 1:
        return _no_efficiency("not applicable: one rank")
    seconds = {share.name: share.seconds for share in shares}
    if not seconds or "unattributed" in seconds:
        return _no_efficiency("the step was not attributed")
    exposed = seconds.get("exposed_comm", 0.0)
    left = exposed + seconds.get("host_gap", 0.0) + seconds.get("rest", 0.0)
    shown = f"{exposed * 1e3:.2f} ms exposed"
    if left <= 0:
        return _no_efficiency(f"{shown}, and nothing else beside compute")
    value = min(1.0, exposed / left)
    return Health(name="communication efficiency", value=value, limit=limit, good=value > limit, samples=1, note=shown)


def worsened(base: Measurement, other: Measurement) -> str:
    """Says which health figure of `other` crosses its limit where the base's did not; empty if none does.

    Noise does not count: stability must be worse by intervals over rounds that do not meet, and communication efficiency
    never speaks while the exposed milliseconds did not grow.
    """
    before = {figure.name: figure for figure in base.health}
    for figure in other.health:
        earlier = before.get(figure.name)
        if figure.good is not False or figure.value is None or (earlier and earlier.good is False):
            continue
        if figure.name == "throughput stability" and not _clearly_less_stable(base, other):
            continue
        if figure.name == "communication efficiency" and not _more_exposed(base, other):
            continue
        was = "unknown" if earlier is None or earlier.value is None else f"{earlier.value:.1%}"
        return f"{figure.name} is {figure.value:.1%}, limit {figure.limit:.0%}, was {was}"
    return ""


def _clearly_less_stable(base: Measurement, other: Measurement) -> bool:
    ours, theirs = ([variation(r.step_seconds) for r in m.rounds if not r.void] for m in (other, base))
    if len(ours) < 2 or len(theirs) < 2:
        return False
    return interval_of_mean(ours, _SURE).low > interval_of_mean(theirs, _SURE).high


def _more_exposed(base: Measurement, other: Measurement) -> bool:
    if base.exposed_comm_seconds is None or other.exposed_comm_seconds is None:
        return False
    return other.exposed_comm_seconds > base.exposed_comm_seconds


def _no_efficiency(note: str) -> Health:
    return Health(name="communication efficiency", value=None, limit=EFFICIENCY_LIMIT, good=None, samples=0, note=note)


def _too_few(steps: int) -> str:
    return "" if steps >= ENOUGH_STEPS else f"needs {ENOUGH_STEPS} steps, {steps} were run"
