"""How much measuring the time allows: rounds are cut so that a trial fits into about an eighth of the budget."""

from __future__ import annotations

from fullstride.files import Value
from fullstride.measure.protocol import Settings

_SHARE = 1 / 8
"""Of the budget, for one trial."""
ALTERNATIONS = 3
"""The fewest that allow a claim."""
_LONGEST = 1.5
"""A trial that is undecided may take this many shares, first builds aside."""
_LONGEST_PROMISING = 2.5
"""The same, where its ratio so far would be a gain."""
_MOST_ALTERNATIONS, _MOST_PROMISING = 8, 16
MOST_EVER = 24
"""Alternations of a trial that is taken up again, earlier ones included, and of the last measurement."""
_NOISE_SHARE = 1 / 5
_NOISE_ROUNDS = 16
"""The share of the A/A run holds about as many, where a trial's rounds are not shorter anyway."""
_MANY = 8
"""Alternations that a trial's share is cut into where plans take turns without being built: more rounds for the same time,
and more nearly the same noise in two neighbours."""
_WARM, _LEAD_IN = 2, 1
"""Steps of a visit that are not timed, for planning: one to warm up what was built, one at the head of the order."""
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
    side_by_side: bool = False
    """Two plans stand beside each other and take turns without being built again."""
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
        rounds = 2 * (_MANY if self.side_by_side else ALTERNATIONS)
        free = self.trial_seconds / rounds - self._before_seconds
        wanted = free / self.step_seconds if self.side_by_side else max(free, self.build_seconds / 2) / self.step_seconds
        return int(min(_MOST, max(_FEWEST, wanted)))

    @property
    def visit_seconds(self) -> float:
        """What one round takes with its build and warm-up."""
        return self._before_seconds + self.round_steps * self.step_seconds

    @property
    def _before_seconds(self) -> float:
        return _LEAD_IN * self.step_seconds if self.side_by_side else self.build_seconds + _WARM * self.step_seconds

    @property
    def max_alternations(self) -> int:
        """Most alternations of a trial that shows no gain yet."""
        return int(min(_MOST_ALTERNATIONS, max(ALTERNATIONS, _LONGEST * self.trial_seconds / (2 * self.visit_seconds))))

    @property
    def promising_alternations(self) -> int:
        """Most alternations of a trial whose ratio so far would be a gain, if it were certain."""
        affordable = int(_LONGEST_PROMISING * self.trial_seconds / (2 * self.visit_seconds))
        return min(_MOST_PROMISING, max(self.max_alternations, affordable))

    @property
    def noise_seconds(self) -> float:
        """The share of the A/A run."""
        return self.budget_seconds * _NOISE_SHARE

    @property
    def noise_steps(self) -> int:
        """Timed steps of a round of the A/A run: those of a trial's rounds, fewer where few rounds would fit."""
        affordable = self.noise_seconds / _NOISE_ROUNDS / self.step_seconds - 1
        return int(min(self.round_steps, max(_FEWEST, affordable)))

    @property
    def reserve_seconds(self) -> float:
        """Kept back for the last measurement of the best plan against the baseline, at the least."""
        return self.seconds_of(ALTERNATIONS)

    def seconds_of(self, alternations: int) -> float:
        """What so many alternations take, with a margin."""
        return 2 * max(ALTERNATIONS, alternations) * self.visit_seconds * _MARGIN

    def alternations_in(self, seconds: float) -> int:
        """How many alternations fit into so many seconds."""
        return max(0, int(seconds / (2 * self.visit_seconds * _MARGIN)))

    def screen_seconds(self, *, compiled: bool) -> float:
        """The least that a trial takes."""
        first = 2 * self.build_seconds if self.side_by_side else 0.0
        return first + 3 * self.visit_seconds + (self.compile_seconds if compiled else 0.0)

    def limit_seconds(self, steps: int) -> float:
        """An order of so many steps that takes longer hangs."""
        return max(_PATIENCE_SECONDS, self.trial_seconds) + _PATIENCE * steps * self.step_seconds

    def settings(self, threshold: float, *, screen: bool, promising_alternations: int) -> Settings:
        """Of a comparison."""
        return Settings(
            round_steps=self.round_steps,
            max_alternations=self.max_alternations,
            promising_alternations=promising_alternations,
            threshold=threshold,
            screen=screen,
        )

    def noise_settings(self) -> Settings:
        """Of the A/A run."""
        return Settings(max_warmup_steps=8, round_steps=self.noise_steps)
