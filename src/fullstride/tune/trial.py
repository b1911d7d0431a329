"""The record of tuning: a trial for each lever, in a ladder."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value
from fullstride.measure.measurement import Comparison, Interval, Measurement
from fullstride.plan.estimate import Estimate
from fullstride.plan.plan import Plan
from fullstride.rundir import Failure

Outcome: TypeAlias = Literal["kept", "undone", "failed", "not tried"]


class Trial(Value, frozen=True, kw_only=True):
    """One lever: what it would change, what was predicted, what happened."""

    index: int
    lever: str
    change: str
    """In words: `micro-batch 1 -> 4, accumulation 4 -> 1`."""
    plan: Plan
    predicted_ratio: float
    """Time before over time after, as predicted."""
    estimate: Estimate | None = None
    outcome: Outcome
    reason: str
    """Why kept, undone or not tried; the cause of a failure."""
    comparison: Comparison | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    """Wall time the trial took."""

    @property
    def ratio(self) -> Interval | None:
        """Measured time before over time after."""
        return self.comparison.ratio if self.comparison else None


class Ladder(FileValue, frozen=True, kw_only=True, tag="ladder"):
    """A whole tuning run."""

    started: str
    budget_seconds: float
    spent_seconds: float = 0.0
    baseline_plan: Plan
    baseline_estimate: Estimate | None = None
    baseline: Measurement | None = None
    noise: float = 0.0
    """Half-width of the A/A interval of the time ratio on this machine."""
    trials: tuple[Trial, ...] = ()
    best_plan: Plan
    final: Comparison | None = None
    """The last interleaved measurement of the best plan against the baseline."""
    stopped: str = ""
    """Why it ended."""
