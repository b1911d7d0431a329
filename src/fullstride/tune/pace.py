"""How much measuring the time allows: rounds are cut so that a trial fits into about an eighth of the budget."""

from __future__ import annotations

from fullstride.files import Value
from fullstride.measure.protocol import Settings

_SHARE = 1 / 8
"""Of the budget, for one trial."""
_VISITS = 6
"""Three alternations."""
_LONGEST = 1.5
"""A trial that is undecided may take this many shares, first builds aside."""
_NOISE_SHARE = 1 / 6
_WARM = 3
"""Steps of a visit that are not timed, for planning."""
_FEWEST, _MOST = 2, 200
_MARGIN = 1.15
_COMPILE_SECONDS = 45.0
"""What the first build of a compiled plan takes beyond others, until one was seen; assumed."""
_PATIENCE_SECONDS, _PATIENCE = 180.0, 20.0
"""An order may take this long for what is done once, and this many times what its steps are expected to take."""


class Pace(Value, frozen=True, kw_only=True):
    """Times of this tuning run, once the baseline has been stepped."""

    budget_seconds: float
    step_seconds: float
    build_seconds: float
    """When it was built before."""
    compile_seconds: float = _COMPILE_SECONDS
    """More than that, for the first build of a compiled plan."""

    @property
    def trial_seconds(self) -> float:
        """A trial's share of the budget."""
        return self.budget_seconds * _SHARE

    @property
    def round_steps(self) -> int:
        """Timed steps of a round: what a trial's share allows, but at least as long as half a build takes.

        A round that is short beside its build costs nearly what a longer one costs, and says less.
        """
        free = self.trial_seconds / _VISITS - self.build_seconds - _WARM * self.step_seconds
        wanted = max(free, self.build_seconds / 2) / self.step_seconds
        return int(min(_MOST, max(_FEWEST, wanted)))

    @property
    def visit_seconds(self) -> float:
        """What one round takes with its build and warm-up."""
        return self.build_seconds + (_WARM + self.round_steps) * self.step_seconds

    @property
    def max_alternations(self) -> int:
        """Most alternations of a trial."""
        return int(min(8, max(3, _LONGEST * self.trial_seconds / (2 * self.visit_seconds))))

    @property
    def noise_rounds(self) -> int:
        """Rounds of the A/A run, 6 or 8: with fewer the interval says nothing about the machine."""
        each = (1 + self.round_steps) * self.step_seconds
        affordable = (self.budget_seconds * _NOISE_SHARE - self.build_seconds) / each
        return 8 if affordable >= 8 else 6

    @property
    def reserve_seconds(self) -> float:
        """Kept back for the last measurement of the best plan against the baseline."""
        return _VISITS * self.visit_seconds * _MARGIN

    def screen_seconds(self, *, compiled: bool) -> float:
        """The least that a trial takes."""
        return 3 * self.visit_seconds + (self.compile_seconds if compiled else 0.0)

    def limit_seconds(self, steps: int) -> float:
        """An order of so many steps that takes longer hangs."""
        return max(_PATIENCE_SECONDS, self.trial_seconds) + _PATIENCE * steps * self.step_seconds

    def settings(self, threshold: float, *, screen: bool) -> Settings:
        """Of a comparison."""
        return Settings(
            round_steps=self.round_steps, max_alternations=self.max_alternations, threshold=threshold, screen=screen
        )
