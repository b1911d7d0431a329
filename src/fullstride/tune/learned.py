"""What earlier trials teach about later ones: where memory ends, and how far the predictions are off.

Derived from the ladder alone, so that a resumed run knows what an uninterrupted one would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.errors import FullstrideError
from fullstride.files import Value
from fullstride.measure.measurement import Measurement, ShareName
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Estimate, TermKind
from fullstride.plan.plan import Plan
from fullstride.tune.trial import Ladder

Pricer: TypeAlias = Callable[[Plan, ModelSpec, Cluster], Estimate]
"""Predicts one plan: `plan.simulated.simulated_price`, for tests also others."""

_SIDES: dict[str, tuple[tuple[TermKind, ...], tuple[ShareName, ...]]] = {
    "compute": (("compute", "attention", "memory_bound", "recompute", "loss"), ("forward", "backward")),
    "comm": (("comm", "bubble"), ("exposed_comm",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "data": (("data",), ("data",)),
    "host": (("host",), ("host_gap",)),
}
"""Class of terms -> what is predicted of it, what is measured of it."""
_TOGETHER = ("compute", "comm")
"""One class in a pipeline. The terms are the busiest rank's, whose bubble is other stages' computing; measured is any rank,
which waits in its receives for what it does not compute itself. What either computes and waits is the same."""
_FARTHEST = 4.0
"""A factor beyond this, either way, says more about the measurement than about the prediction."""
_SMALL = 0.01
"""A class with less than this share of the step, predicted or measured, teaches nothing."""
_MOST_MEMORY = 1.5
_SAME_SIZE = 0.98
"""A plan that is predicted to need nearly as much as one that ran out of memory will run out, too."""


class Learned(Value, frozen=True, kw_only=True):
    """Facts from the ladder so far."""

    tried: frozenset[str] = frozenset()
    """Hashes of plans that were run or failed."""
    oom_bytes: int | None = None
    """Smallest predicted device peak of a plan that ran out of memory."""
    memory_ratio: float = 1.0
    """Measured over predicted peak, the largest seen; at least 1."""
    factors: dict[str, float] = {}
    """Class of time terms -> measured over predicted seconds of the newest plan."""


class Prediction(Value, frozen=True, kw_only=True):
    """An estimate, corrected by what was learned."""

    estimate: Estimate
    seconds: float
    """Of a step."""
    device_bytes: int
    """Peak the device must have."""
    fits: bool


def predict(plan: Plan, spec: ModelSpec, cluster: Cluster, learned: Learned, pricer: Pricer) -> Prediction | None:
    """Price a plan and correct it; None where it cannot be priced."""
    try:
        estimate = pricer(plan, spec, cluster)
    except FullstrideError:
        return None
    seconds = sum(term.exposed_seconds * learned.factors.get(_class_of(term.kind), 1.0) for term in estimate.terms)
    needed = int(estimate.peak_device_bytes * learned.memory_ratio)
    fits = needed <= estimate.capacity_bytes
    if learned.oom_bytes is not None and estimate.peak_device_bytes >= learned.oom_bytes * _SAME_SIZE:
        fits = False
    return Prediction(estimate=estimate, seconds=seconds or estimate.step_seconds, device_bytes=needed, fits=fits)


def learn(ladder: Ladder) -> Learned:
    """All facts that a ladder holds."""
    pairs = [(ladder.baseline_estimate, ladder.baseline)]
    pairs += [(trial.estimate, trial.comparison.other) for trial in ladder.trials if trial.comparison]
    known = [(estimate, measured) for estimate, measured in pairs if estimate and measured]
    ooms = [
        t.estimate.peak_device_bytes for t in ladder.trials if t.estimate and t.failure and t.failure.failure == "out_of_memory"
    ]
    ratios = [m.memory.peak_allocated_bytes / e.peak_allocated_bytes for e, m in known if e.peak_allocated_bytes]
    factors: dict[str, float] = {}
    for estimate, measured in known:
        factors |= calibrate(estimate, measured)
    tried = {t.plan.plan_hash for t in ladder.trials if t.outcome != "not tried"} | {ladder.baseline_plan.plan_hash}
    return Learned(
        tried=frozenset(tried),
        oom_bytes=min(ooms, default=None),
        memory_ratio=min(_MOST_MEMORY, max([1.0, *ratios])),
        factors=factors,
    )


def calibrate(estimate: Estimate, measured: Measurement) -> dict[str, float]:
    """Measured over predicted seconds for each class of terms; one common factor where the step was not attributed."""
    shares = {share.name: share.seconds for share in measured.shares}
    step = measured.step_seconds.value
    if not shares or "unattributed" in shares:
        factor = _bounded(step / estimate.step_seconds) if estimate.step_seconds > 0 else 1.0
        return dict.fromkeys(_SIDES, factor)
    piped = any(term.kind == "bubble" for term in estimate.terms)
    alone = [(name,) for name in _SIDES if not (piped and name in _TOGETHER)]
    groups: list[tuple[str, ...]] = [_TOGETHER, *alone] if piped else [*alone]
    factors: dict[str, float] = {}
    for group in groups:
        kinds = [kind for name in group for kind in _SIDES[name][0]]
        names = [share for name in group for share in _SIDES[name][1]]
        predicted = sum(term.exposed_seconds for term in estimate.terms if term.kind in kinds)
        seen = sum(shares.get(share, 0.0) for share in names)
        if min(predicted, seen) >= _SMALL * step:
            factors |= dict.fromkeys(group, _bounded(seen / predicted))
    return factors


def _bounded(factor: float) -> float:
    return min(_FARTHEST, max(1 / _FARTHEST, factor))


def _class_of(kind: TermKind) -> str:
    return next(name for name, (kinds, _) in _SIDES.items() if kind in kinds)
