"""The closed loop: measure, pull the lever with the largest predicted gain, measure again, keep it or put it back.

    baseline (made smaller until it fits) -> A/A noise -> rungs -> undecided rungs again -> last measurement -> ladder

Time that is left after the rungs goes to trials that looked like a gain: more rounds of their own, or more A/A rounds
where only the noise bars them. Where the last measurement took less than was kept for it, further rungs follow, and their
own last measurement.

The ladder is written after every trial, so an interrupted run is resumed from it. A rung is kept only if the lower end of
the 99 % interval of the time ratio is above 1 + max(0.5 %, the A/A half-width) over three alternations or more, no health
figure got worse, and the numbers stayed those of the baseline.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.measure.compare import THRESHOLD
from fullstride.measure.health import worsened
from fullstride.measure.measurement import Comparison, Round
from fullstride.measure.protocol import NARROW
from fullstride.measure.stats import Clock
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.simulated import simulated_price
from fullstride.plan.toml import write_plan
from fullstride.rundir import Failure, RunDir
from fullstride.tune.again import barred_by_noise, on_top_of, record_of, rounds_of, unfinished
from fullstride.tune.choose import WORTH, Choice, Passed, Situation, memory_use, weigh
from fullstride.tune.driver import NoTime, Record, Session, compare
from fullstride.tune.ground import BASELINE, Ground, name_of
from fullstride.tune.learned import Pricer, learn
from fullstride.tune.levers import LEVERS, Lever, Move
from fullstride.tune.pace import ALTERNATIONS, MOST_EVER
from fullstride.tune.progress import OnProgress
from fullstride.tune.trial import Ladder, Outcome, Trial

MAX_RUNGS = 8
"""Trials that are run, at most."""
_LAST = 6
"""Alternations of the last measurement where there is time: its interval is what the page says first."""
MAX_TRIES = 2
"""Of one lever, where a try failed or was undone."""


def tune(
    *,
    spec: ModelSpec,
    cluster: Cluster,
    baseline: Plan,
    session: Session,
    run_dir: RunDir,
    directory: Path,
    budget_seconds: float,
    resume: Ladder | None = None,
    on_progress: OnProgress | None = None,
    levers: Sequence[Lever] = LEVERS,
    pricer: Pricer = simulated_price,
    clock: Clock = time.monotonic,
    max_rungs: int = MAX_RUNGS,
) -> Ladder:
    """Tune a plan on the machine in front of us; failures of trials are recorded, not raised.

    Args:
        spec: the model, for pricing and MFU.
        cluster: the machine, probed and measured.
        baseline: what everything is compared with.
        session: runs plans in `run_dir`; the caller closes it.
        run_dir: where the worker writes its events.
        directory: gets `ladder.json` after every trial and `best.toml` at the end.
        budget_seconds: for everything here, builds included; what a resumed ladder spent counts.
        resume: the ladder of an interrupted run of the same work.
        on_progress: told after every order and every verdict.
        levers: the table of changes.
        pricer: predicts time and memory of a plan.
        clock: seconds.
        max_rungs: trials that are run, at most.

    Returns:
        The ladder, with a verdict for every lever; `stopped` says why it ended.

    Raises:
        EnvironmentFault: the ladder cannot be written.
    """
    loop = _Loop(spec, cluster, session, run_dir, directory, on_progress, pricer, clock)
    loop.levers, loop.max_rungs = tuple(levers), max_rungs
    loop.begin(baseline, budget_seconds, resume)
    if loop.measure_baseline():
        loop.climb()
        loop.prove()
        while loop.goes_on():
            loop.climb()
            loop.prove()
    return loop.end()


class _Loop(Ground):
    """The rungs."""

    levers: tuple[Lever, ...]
    max_rungs: int

    # -- rungs ----------------------------------------------------------------------------------------------------------

    @property
    def threshold(self) -> float:
        return max(THRESHOLD, self.ladder.noise)

    def climb(self) -> None:
        """Trials until nothing is worth one, the time is up, or there are enough."""
        run = tuple(trial for trial in self.ladder.trials if trial.outcome != "not tried")
        self.ladder = msgspec.structs.replace(self.ladder, trials=run)
        while True:
            choices, passed = self._weigh()
            stop = self._stop_reason(choices)
            affordable = [] if stop else [choice for choice in choices if self._affords(choice)]
            if affordable:
                self._try(affordable[0])
            elif not (self._take_up_again() or self._know_the_noise_better()):
                break
        stop = stop or "the time is spent"
        if undecided := len(unfinished(self.ladder, self.threshold)):
            stop += f"; {undecided} promising trial{'s' if undecided > 1 else ''} could not be decided in the time"
        self._give_verdicts(choices, passed, stop)

    def _weigh(self) -> tuple[list[Choice], list[Passed]]:
        spoilt = {lever.name for lever in self.levers if self._tries(lever.name) >= MAX_TRIES}
        return weigh(self._situation(), [lever for lever in self.levers if lever.name not in spoilt], self.pricer)

    def _situation(self) -> Situation:
        learned = learn(self.ladder)
        measured, estimate = self.ladder.baseline, self.ladder.baseline_estimate
        for trial in self._kept():
            if trial.comparison:
                measured, estimate = trial.comparison.other, trial.estimate
        return Situation(
            plan=self.best.plan,
            spec=self.spec,
            cluster=self.cluster,
            learned=learned,
            use=memory_use(measured, estimate) if measured else None,
        )

    def _tries(self, lever: str) -> int:
        return sum(t.lever == lever and t.outcome in ("failed", "undone") for t in self.ladder.trials)

    def _stop_reason(self, choices: list[Choice]) -> str:
        if not choices:
            return f"no lever is predicted to bring {WORTH - 1:.0%}"
        if self._rungs() >= self.max_rungs:
            return f"{self._rungs()} trials are done"
        return ""

    def _rungs(self) -> int:
        return sum(t.lever != BASELINE and t.outcome != "not tried" for t in self.ladder.trials)

    def _affords(self, choice: Choice) -> bool:
        compiled = choice.move.plan.compile.mode != "off"
        return self.clock() + self.pace.screen_seconds(compiled=compiled) <= self.end_of_trials

    def _try(self, choice: Choice) -> None:
        began, index = self.clock(), len(self.ladder.trials)
        self._now = ("trial", choice)
        self._tell()
        candidate = Record(name=name_of(index), plan=choice.move.plan)
        most = self._most_alternations(0, self.pace.promising_alternations)
        result = self._compare(self.best, candidate, self.end_of_trials, screen=True, most=most)
        if candidate.plan.compile.mode != "off" and candidate.first_seconds:
            self.pace = msgspec.structs.replace(self.pace, compile_seconds=candidate.first_seconds)
        outcome, reason = self._verdict(result)
        if outcome == "kept":
            self.best = candidate
        self.record(choice, outcome, reason, began, result)

    def _most_alternations(self, done: int, most: int) -> int:
        """Of a promising trial, `done` ones included: while nothing is kept, half the time is left to the last measurement."""
        if self._kept():
            return most
        return min(most, done + self.pace.alternations_in(self.left) // 2)

    def _take_up_again(self) -> bool:
        """Go on with the best trial that is undecided; False if there is none, or no time for it."""
        for trial in unfinished(self.ladder, self.threshold):
            assert trial.comparison is not None
            if trial.comparison.base.plan_hash == self.best.plan.plan_hash:
                most = self._most_alternations(trial.comparison.alternations, MOST_EVER)
                wanted = max(1, ALTERNATIONS - trial.comparison.alternations)
                in_time = self.clock() + 2 * wanted * self.pace.visit_seconds <= self.end_of_trials
                if in_time and trial.comparison.alternations < most:
                    self._go_on(trial, trial.comparison, most)
                    return True
            elif self._rungs() < self.max_rungs:
                choice = on_top_of(self._situation(), trial, self.levers, self.pricer)
                if choice and self._affords(choice):
                    self._try(choice)
                    return True
        return False

    def _know_the_noise_better(self) -> bool:
        """More A/A rounds, where their width is all that bars a trial; False if it is not, or no time is left for it."""
        barred = barred_by_noise(self.ladder) if self.ladder.noise > NARROW else None
        if barred is None or self.ladder.baseline is None:
            return False
        left = self.end_of_trials - self.clock()
        spare = left - 2 * max(1, ALTERNATIONS - barred.alternations) * self.pace.visit_seconds
        if barred.ratio.low <= 1 + THRESHOLD:
            spare = min(spare, left / 2)  # its own rounds are not enough, either
        spare = min(spare, self.pace.noise_seconds)
        if spare < 2 * self.pace.visit_seconds:
            return False
        self._now = ("noise", None)
        self._tell()
        why = self._play_noise(self.ladder.baseline.rounds, self.clock() + spare)
        if why:
            self.troubles.append(f"the noise could not be measured on: {why}")
        return not why

    def _go_on(self, trial: Trial, before: Comparison, most: int) -> None:
        """More rounds for a trial, with those it has; its entry in the ladder is replaced.

        The order of what is kept stays that in which it was kept: while the best plan was the same, nothing else was kept.
        """
        began = self.clock()
        if trial.estimate is not None:
            move = Move(plan=trial.plan, words=trial.change)
            choice = Choice(lever=trial.lever, move=move, ratio=trial.predicted_ratio, estimate=trial.estimate)
            self._now = ("trial", choice)
        self._again = trial
        self._tell()
        candidate = record_of(name_of(trial.index), trial.plan, before.other)
        earlier = rounds_of((self.best.name, before.base), (candidate.name, before.other))
        result = self._compare(self.best, candidate, self.end_of_trials, screen=False, most=most, earlier=earlier)
        outcome, reason = self._verdict(result)
        if outcome == "kept":
            self.best = candidate
        changed = msgspec.structs.replace(
            trial,
            outcome=outcome,
            reason=f"{reason}; taken up again after {before.alternations} alternations",
            comparison=result if isinstance(result, Comparison) else before,
            failure=result if isinstance(result, Failure) else None,
            seconds=trial.seconds + self.clock() - began,
        )
        self._again = None
        self.write(trials=tuple(changed if t is trial else t for t in self.ladder.trials), best_plan=self.best.plan)
        self._tell(ended=changed)

    def _compare(
        self,
        base: Record,
        other: Record,
        deadline: float,
        *,
        screen: bool,
        most: int,
        better: int = 0,
        earlier: Sequence[Round] = (),
    ) -> Comparison | Failure:
        settings = self.pace.settings(self.threshold, screen=screen, promising_alternations=most)
        settings = msgspec.structs.replace(settings, better_alternations=better)
        reference = self.ladder.baseline
        return compare(
            self.driver, base, other, settings, deadline, reference=reference, profile_after=("better",), earlier=earlier
        )

    def _verdict(self, result: Comparison | Failure) -> tuple[Outcome, str]:
        if isinstance(result, NoTime):
            return "not tried", result.message
        if isinstance(result, Failure):
            return "failed", f"{result.failure.replace('_', ' ')}: {result.message}"
        reason = "; ".join(result.reasons)
        if result.verdict != "better":
            return "undone", reason
        sick = worsened(result.base, result.other)
        return ("undone", f"faster, but {sick}") if sick else ("kept", reason)

    def _give_verdicts(self, choices: list[Choice], passed: list[Passed], stop: str) -> None:
        """Levers that were never tried get their reason."""
        tried = {trial.lever for trial in self.ladder.trials}
        reasons = {choice.lever: (choice, f"{stop}; predicted at {choice.ratio:.2f} x") for choice in choices}
        notes = reasons | {p.lever: (p.choice, p.reason) for p in passed}
        trials = list(self.ladder.trials)
        for name, (choice, reason) in notes.items():
            if name not in tried:
                trials.append(self._not_tried(len(trials), name, choice, reason))
        self.write(trials=tuple(trials), stopped="; ".join((*self.troubles, stop)))

    def _not_tried(self, index: int, lever: str, choice: Choice | None, reason: str) -> Trial:
        return Trial(
            index=index,
            lever=lever,
            change=choice.move.words if choice else "",
            plan=choice.move.plan if choice else self.best.plan,
            predicted_ratio=choice.ratio if choice else 1.0,
            estimate=choice.estimate if choice else None,
            outcome="not tried",
            reason=reason,
        )

    # -- the last word --------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """Measure the best plan against the baseline once more; what does not hold falls back down the ladder."""
        while self.best.plan.plan_hash != self.base.plan.plan_hash:
            if self._proven is not None and self._proven.other.plan_hash == self.best.plan.plan_hash:
                self.write(final=self._proven)
                return
            self._now = ("final", None)
            self._tell()
            end = self.start + self.ladder.budget_seconds
            if self.clock() + 2 * ALTERNATIONS * self.pace.visit_seconds > end:
                why = "no time was left to measure it against the baseline again"
                self._fall_back(why, to_baseline=self._proven is None)
                continue
            better = min(_LAST, self.pace.alternations_in(self.left) // 2)
            result = self._compare(self.base, self.best, end, screen=False, most=MOST_EVER, better=better)
            if isinstance(result, Comparison):
                self.write(final=result)
                if result.verdict == "better":
                    self._proven = result
                    return
            reason = result.message if isinstance(result, Failure) else "; ".join(result.reasons)
            self._fall_back(f"did not hold against the baseline at the end: {reason}", to_baseline=False)

    def goes_on(self) -> bool:
        """Whether the best plan is proven and there is time for another trial with its proof."""
        if self._proven is None:
            return False
        choices, _ = self._weigh()
        return not self._stop_reason(choices) and any(self._affords(choice) for choice in choices)

    def _fall_back(self, reason: str, *, to_baseline: bool) -> None:
        """Undo the topmost rung that is kept, or all of them."""
        trials, kept = list(self.ladder.trials), self._kept()
        for trial in kept if to_baseline else kept[-1:]:
            place = next(i for i, t in enumerate(trials) if t.index == trial.index)
            trials[place] = msgspec.structs.replace(trial, outcome="undone", reason=f"{trial.reason}; {reason}")
        below = [] if to_baseline else kept[:-1]
        self.best = Record(name=name_of(below[-1].index), plan=below[-1].plan) if below else self.base
        self.write(trials=tuple(trials), best_plan=self.best.plan)

    def end(self) -> Ladder:
        """Write the best plan; the driver lets go of what is built."""
        self._now = ("done", None)
        self.driver.release()
        self.write(best_plan=self.best.plan)
        if self.ladder.baseline is not None:
            write_plan(self.best.plan, self.directory / "best.toml", overwrite=True)
        self._tell()
        return self.ladder
