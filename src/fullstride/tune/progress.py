"""What tune tells whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from fullstride.files import Value
from fullstride.tune.trial import Trial

TunePhase: TypeAlias = Literal["baseline", "noise", "trial", "final", "done"]


class TuneProgress(Value, frozen=True, kw_only=True):
    """One sign of life."""

    phase: TunePhase
    index: int = 0
    """Of the trial."""
    lever: str = ""
    change: str = ""
    predicted_ratio: float | None = None
    plan_name: str = ""
    """Which plan is stepping: `baseline`, `trial-03`."""
    step_seconds: float | None = None
    """Mean of its newest steps."""
    spent_seconds: float
    left_seconds: float
    ended: Trial | None = None
    """A trial that has just got its verdict."""


OnProgress: TypeAlias = Callable[[TuneProgress], None]
