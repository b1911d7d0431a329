"""What to run next, and when enough has been seen: pure state machines, no clock and no process of their own.

A driver asks `next(now)`, carries the answer out, and hands the round back with `after(...)`. Two plans alternate
A B A B A B ...; one A-B-A is a screen, a claim needs three alternations (six rounds). The full form follows the article:
300 warm-up steps, 1,000 timed ones, three rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fullstride.files import Value
from fullstride.measure.measurement import Form, Interval, Round, Verdict
from fullstride.measure.stats import half_width, interval_of_mean, ratio_interval, trimmed_mean

CHECKED_STEPS = 5
"""Steps from the start on whose loss and gradient norm two plans must agree."""
LOSS_LIMIT = 0.005
GRAD_NORM_LIMIT = 0.02
STEADY = 0.1
"""Two step times that differ by less are steady."""
SCREENED = 0.1
"""A screen never asks for more gain than this, however restless the machine is: its noise may be known better later."""
NARROW = 0.01
"""Half-width of an A/A interval at which enough is known of a machine's noise."""
MOST_VOID = 2
"""Void rounds that are repeated before the comparison is given up."""


class Settings(Value, frozen=True, kw_only=True):
    """How thoroughly to measure."""

    form: Form = "short"
    warmup_steps: int = 2
    """At least, before each round."""
    max_warmup_steps: int = 12
    """At most, while step times have not settled."""
    round_steps: int = 5
    """Timed steps of a round."""
    min_alternations: int = 3
    max_alternations: int = 8
    promising_alternations: int = 0
    """At most, where the ratio so far is above 1 + threshold; fewer than `max_alternations` say the same as that."""
    better_alternations: int = 0
    """A gain that can be called already is measured on until there are so many, as far as the time goes: for its interval."""
    confidence: float = 0.99
    threshold: float = 0.005
    """What the lower end of the ratio's interval must exceed, above 1, for a gain to be called."""
    screen: bool = True
    """Give up after A-B-A where that shows no gain."""
    narrow: float = 0.01
    """One plan alone: stop once half the interval of its step time is under this share."""


FULL = Settings(form="full", warmup_steps=300, max_warmup_steps=300, round_steps=1000, max_alternations=3, screen=False)
"""The article's form: 300 + 1,000 steps, three rounds."""


class Visit(Value, frozen=True, kw_only=True):
    """Build the plan called `label` if it is not the one that is built, warm up, and time one round."""

    index: int
    label: str
    warmup_steps: int
    max_warmup_steps: int
    round_steps: int


class Stop(Value, frozen=True, kw_only=True):
    """Enough has been seen, or nothing more can be."""

    verdict: Verdict
    reason: str


class Protocol(Value, frozen=True, kw_only=True):
    """Two plans that alternate; `after` gives the next state."""

    settings: Settings
    base: str = "baseline"
    other: str = "candidate"
    deadline: float
    """On the driver's clock, in seconds."""
    rounds: tuple[Round, ...] = ()
    visit_seconds: float = 0.0
    """What another visit may take: the longest of those whose plan had been built before, as far as there are any."""

    @property
    def counted(self) -> tuple[Round, ...]:
        """Rounds that are not void."""
        return tuple(r for r in self.rounds if not r.void)

    @property
    def alternations(self) -> int:
        """Rounds of the label that has fewer."""
        labels = [r.label for r in self.counted]
        return min(labels.count(self.base), labels.count(self.other))

    @property
    def ratio(self) -> Interval:
        """Time of the base over time of the other, so far."""
        return ratio_interval(self.rounds, self.base, self.settings.confidence)

    def next(self, now: float) -> Visit | Stop:
        """What to do at time `now`."""
        voids = [r for r in self.rounds if r.void]
        if len(voids) > MOST_VOID:
            return Stop(verdict="void", reason=f"{len(voids)} rounds are void: {voids[-1].void}")
        stop = self._decided() or self._out_of_time(now)
        if stop:
            return stop
        after_base = bool(self.counted) and self.counted[-1].label == self.base
        return Visit(
            index=len(self.rounds),
            label=self.other if after_base else self.base,
            warmup_steps=self.settings.warmup_steps,
            max_warmup_steps=self.settings.max_warmup_steps,
            round_steps=self.settings.round_steps,
        )

    def after(self, done: Round, seconds: float) -> Protocol:
        """The state after a round that took `seconds` of wall time, builds included."""
        seen = [r.label for r in self.rounds]
        if not seen or (done.label in seen and len(set(seen)) == len(seen)):
            visit = seconds  # the first visit of all, then the first one whose build was warm
        else:
            visit = max(self.visit_seconds, seconds) if done.label in seen else self.visit_seconds
        return Protocol(
            settings=self.settings,
            base=self.base,
            other=self.other,
            deadline=self.deadline,
            rounds=(*self.rounds, done),
            visit_seconds=visit,
        )

    def _decided(self) -> Stop | None:
        settings, number = self.settings, len(self.counted)
        wanted = 1 + min(settings.threshold / 2, SCREENED)
        if settings.screen and number == 3 and self.ratio.value < wanted:
            shown = f"a ratio of {self.ratio.value:.3f}, under {wanted:.3f}"
            return Stop(verdict="undetermined", reason=f"the screen (A-B-A) shows {shown}: no gain to prove")
        if self.alternations < settings.min_alternations:
            return None
        verdict, reason = judge(self.ratio, self.alternations, settings.threshold, settings.min_alternations)
        promising = self.ratio.value > 1 + settings.threshold
        most = max(settings.max_alternations, settings.promising_alternations if promising else 0)
        if verdict == "undetermined" and self.alternations < most:
            return None
        if verdict == "better" and self.alternations < settings.better_alternations:
            return None
        return Stop(verdict=verdict, reason=reason)

    def _out_of_time(self, now: float) -> Stop | None:
        if not self.rounds or self.settings.form == "full":
            return None
        screened = self.settings.screen and len(self.counted) < 3
        wanted = 3 - len(self.counted) if screened else max(1, 2 * self.settings.min_alternations - len(self.counted))
        if now + wanted * self.visit_seconds <= self.deadline:
            return None
        verdict, reason = judge(self.ratio, self.alternations, self.settings.threshold, self.settings.min_alternations)
        if verdict == "better":
            return Stop(verdict=verdict, reason=reason)
        return Stop(verdict="undetermined", reason=f"the time ended after {self.alternations} alternations")


class Solo(Value, frozen=True, kw_only=True):
    """One plan alone: rounds until the interval of its step time is narrow enough."""

    settings: Settings
    label: str = "plan"
    deadline: float
    rounds: tuple[Round, ...] = ()
    min_rounds: int = 3
    max_rounds: int = 10

    def next(self, now: float) -> Visit | Stop:
        """What to do at time `now`; the verdict of a lone plan is `undetermined`: there is nothing to compare it with."""
        counted = [r for r in self.rounds if not r.void]
        voids = len(self.rounds) - len(counted)
        if voids > MOST_VOID:
            return Stop(verdict="void", reason=f"{voids} rounds are void: {[r.void for r in self.rounds if r.void][-1]}")
        if len(counted) >= self.min_rounds:
            if self.settings.form == "full":
                return Stop(verdict="undetermined", reason=f"{len(counted)} rounds are done")
            width = half_width(interval_of_mean([trimmed_mean(r.step_seconds) for r in counted], self.settings.confidence))
            if width <= self.settings.narrow or len(counted) >= self.max_rounds:
                return Stop(verdict="undetermined", reason=f"half the interval is {width:.2%} of the step time")
        if counted and self.settings.form == "short" and now >= self.deadline:
            return Stop(verdict="undetermined", reason=f"the time ended after {len(counted)} rounds")
        return Visit(
            index=len(self.rounds),
            label=self.label,
            warmup_steps=self.settings.warmup_steps,
            max_warmup_steps=self.settings.max_warmup_steps,
            round_steps=self.settings.round_steps,
        )

    def after(self, done: Round) -> Solo:
        """The state after a round."""
        return Solo(
            settings=self.settings,
            label=self.label,
            deadline=self.deadline,
            rounds=(*self.rounds, done),
            min_rounds=self.min_rounds,
            max_rounds=self.max_rounds,
        )


class Noise(Value, frozen=True, kw_only=True):
    """A plan against itself: rounds until what the machine does by itself is known narrowly, or the time is spent."""

    settings: Settings
    label: str = "baseline"
    deadline: float
    """On the driver's clock, in seconds; `min_rounds` are run even past it."""
    rounds: tuple[Round, ...] = ()
    last_seconds: float = 0.0
    """Wall time of the newest visit."""
    min_rounds: int = 6
    narrow: float = NARROW
    """Half-width at which enough is known."""
    rounds_of_a_build: int = 3
    """After so many rounds, and after each doubling, it is built anew."""

    @property
    def sides(self) -> tuple[Round, ...]:
        """The rounds that count, called `a` and `b` in turn."""
        counted = [r for r in self.rounds if not r.void]
        return tuple(Round(index=r.index, label="ab"[i % 2], step_seconds=r.step_seconds) for i, r in enumerate(counted))

    @property
    def ratio(self) -> Interval:
        """Time of `a` over time of `b`: the same plan, so all that differs from 1 is noise."""
        return ratio_interval(self.sides, "a", self.settings.confidence)

    @property
    def wants_a_new_build(self) -> bool:
        """Whether to build anew before the next round: levels differ between builds, so several must be seen."""
        number = len(self.sides)
        return number in (self.rounds_of_a_build * 2**k for k in range(8))

    def next(self, now: float) -> Visit | Stop:
        """What to do at time `now`; the verdict is `undetermined`: nothing is compared."""
        voids, number = [r for r in self.rounds if r.void], len(self.sides)
        if len(voids) > MOST_VOID:
            return Stop(verdict="void", reason=f"{len(voids)} rounds are void: {voids[-1].void}")
        if number >= self.min_rounds:
            width = half_width(self.ratio)
            if width <= self.narrow:
                return Stop(verdict="undetermined", reason=f"the half-width is {width:.2%} after {number} rounds")
            if now + self.last_seconds > self.deadline:
                return Stop(verdict="undetermined", reason=f"the time ended after {number} rounds at {width:.2%}")
        return Visit(
            index=len(self.rounds),
            label=self.label,
            warmup_steps=self.settings.warmup_steps,
            max_warmup_steps=self.settings.max_warmup_steps,
            round_steps=self.settings.round_steps,
        )

    def after(self, done: Round, seconds: float) -> Noise:
        """The state after a round that took `seconds` of wall time, builds included."""
        return msgspec.structs.replace(self, rounds=(*self.rounds, done), last_seconds=seconds)


def judge(ratio: Interval, alternations: int, threshold: float, min_alternations: int = 3) -> tuple[Verdict, str]:
    """The verdict that an interval of the time ratio (base over other) allows, and why."""
    shown = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    if alternations < min_alternations:
        return "undetermined", f"{alternations} alternations, a claim needs {min_alternations}: ratio {shown}"
    if ratio.low > 1 + threshold:
        return "better", f"the ratio {shown} lies above 1 + {threshold:.2%}"
    if ratio.high < 1:
        return "worse", f"the ratio {shown} lies below 1"
    if ratio.high <= 1 + threshold:
        return "no difference", f"the ratio {shown} does not reach 1 + {threshold:.2%}"
    return "undetermined", f"the ratio {shown} reaches from below to above 1 + {threshold:.2%}"


def is_steady(step_seconds: Sequence[float], known_seconds: float = 0.0) -> bool:
    """Whether the last step time has settled: near the one before it, or near what is known of this plan."""
    if not step_seconds:
        return False
    last = step_seconds[-1]
    if known_seconds and last < known_seconds * (1 + STEADY):
        return True
    return len(step_seconds) >= 2 and abs(last - step_seconds[-2]) < STEADY * max(last, step_seconds[-2])


def not_finite(losses: Sequence[float], grad_norms: Sequence[float]) -> str:
    """Says which step's loss or gradient norm is not a finite number; empty if all are."""
    for name, values in (("loss", losses), ("gradient norm", grad_norms)):
        for step, value in enumerate(values):
            if not math.isfinite(value):
                return f"the {name} of step {step} is {value}"
    return ""


def strays(
    losses: Sequence[float], grad_norms: Sequence[float], base_losses: Sequence[float], base_grad_norms: Sequence[float]
) -> str:
    """Says where the first steps differ from the base's, on the same samples, by more than is allowed; empty if nowhere.

    The limits: 0.5 % of the loss, 2 % of the gradient norm, over the first 5 steps.
    """
    for name, ours, theirs, limit in (
        ("loss", losses, base_losses, LOSS_LIMIT),
        ("gradient norm", grad_norms, base_grad_norms, GRAD_NORM_LIMIT),
    ):
        for step, (one, two) in enumerate(zip(ours[:CHECKED_STEPS], theirs[:CHECKED_STEPS], strict=False)):
            if abs(one - two) > limit * abs(two):
                return f"the {name} of step {step} is {one:.6g}, the baseline's is {two:.6g}: more than {limit:.1%} apart"
    return ""
