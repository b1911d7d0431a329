"""The closed loop: measure, pull the lever with the largest predicted gain, measure again, keep it or put it back.

    baseline (made smaller until it fits) -> A/A noise -> rungs -> undecided rungs again -> last measurement -> ladder

Time that is left after the rungs goes to trials that looked like a gain: more rounds of their own, or more A/A rounds
where only the noise bars them.

The ladder is written after every trial, so an interrupted run is resumed from it. A rung is kept only if the lower end of
the 99 % interval of the time ratio is above 1 + max(0.5 %, the A/A half-width) over three alternations or more, no health
figure got worse, and the numbers stayed those of the baseline.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.files import write_json
from fullstride.measure.compare import THRESHOLD, compare_rounds, noise_of
from fullstride.measure.health import worsened
from fullstride.measure.measurement import Comparison, Round
from fullstride.measure.protocol import NARROW, Noise, Stop, Visit
from fullstride.measure.stats import Clock
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.price import price
from fullstride.plan.toml import write_plan
from fullstride.rundir import Failure, RunDir
from fullstride.tune.again import barred_by_noise, on_top_of, record_of, rounds_of, unfinished
from fullstride.tune.choose import WORTH, Choice, Passed, Situation, memory_use, weigh
from fullstride.tune.driver import Driver, NoTime, Record, Session, compare
from fullstride.tune.learned import Pricer, learn, predict
from fullstride.tune.levers import LEVERS, Lever, Move
from fullstride.tune.pace import ALTERNATIONS, MOST_EVER, Pace
from fullstride.tune.progress import OnProgress, TunePhase, TuneProgress
from fullstride.tune.smaller import smaller
from fullstride.tune.trial import Ladder, Outcome, Trial

MAX_RUNGS = 8
"""Trials that are run, at most."""
MAX_TRIES = 2
"""Of one lever, where a try failed or was undone."""
_BASELINE: Final = "baseline"
_FIRST = Visit(index=0, label=_BASELINE, warmup_steps=2, max_warmup_steps=8, round_steps=2)


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
    pricer: Pricer = price,
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
    return loop.end()


class _Loop:
    """The run in progress; everything that must survive an interruption is in `ladder`."""

    levers: tuple[Lever, ...]
    max_rungs: int
    ladder: Ladder
    base: Record
    best: Record
    pace: Pace

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        session: Session,
        run_dir: RunDir,
        directory: Path,
        on_progress: OnProgress | None,
        pricer: Pricer,
        clock: Clock,
    ) -> None:
        self.spec, self.cluster, self.directory = spec, cluster, directory
        self.pricer, self.clock, self.on_progress = pricer, clock, on_progress
        self.driver = Driver(session, run_dir, cluster, spec=spec, clock=clock, watch=self._watch)
        self._now: tuple[TunePhase, Choice | None] = (_BASELINE, None)
        self._again: Trial | None = None
        """The trial that is taken up again, while it is."""

    # -- time -----------------------------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        return self.clock() - self.start

    @property
    def left(self) -> float:
        return self.ladder.budget_seconds - self.spent

    @property
    def end_of_trials(self) -> float:
        """The last measurement must find what the trials found: it needs about as many alternations as the clearest did.

        Twice as many on a restless machine: there a trial that was kept early was lucky in part.
        """
        needed = min((t.comparison.alternations for t in self._kept() if t.comparison), default=0)
        needed *= 2 if self.ladder.noise > NARROW else 1
        return self.start + self.ladder.budget_seconds - self.pace.seconds_of(needed)

    # -- the ladder -----------------------------------------------------------------------------------------------------

    def begin(self, baseline: Plan, budget_seconds: float, resume: Ladder | None) -> None:
        self.start = self.clock() - (resume.spent_seconds if resume else 0.0)
        if resume is None:
            started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S%z")
            self.ladder = Ladder(started=started, budget_seconds=budget_seconds, baseline_plan=baseline, best_plan=baseline)
        else:
            run = tuple(trial for trial in resume.trials if trial.outcome != "not tried")
            self.ladder = msgspec.structs.replace(resume, budget_seconds=budget_seconds, trials=run, final=None, stopped="")
        plan, measured = self.ladder.baseline_plan, self.ladder.baseline
        self.base = self.best = record_of(_BASELINE, plan, measured) if measured else Record(name=_BASELINE, plan=plan)
        for trial in self.ladder.trials:
            if trial.outcome == "kept":
                self.best = Record(name=_name(trial.index), plan=trial.plan)

    def write(self, **changes: object) -> None:
        self.ladder = msgspec.structs.replace(self.ladder, spent_seconds=self.spent, **changes)
        write_json(self.directory / "ladder.json", self.ladder)

    def record(self, choice: Choice, outcome: Outcome, reason: str, began: float, result: Comparison | Failure | None) -> None:
        trial = Trial(
            index=len(self.ladder.trials),
            lever=choice.lever,
            change=choice.move.words,
            plan=choice.move.plan,
            predicted_ratio=choice.ratio,
            estimate=choice.estimate,
            outcome=outcome,
            reason=reason,
            comparison=result if isinstance(result, Comparison) else None,
            failure=result if isinstance(result, Failure) and outcome == "failed" else None,
            seconds=self.clock() - began,
        )
        self.write(trials=(*self.ladder.trials, trial), best_plan=self.best.plan)
        self._tell(ended=trial)

    def _kept(self) -> list[Trial]:
        return [trial for trial in self.ladder.trials if trial.outcome == "kept"]

    # -- baseline -------------------------------------------------------------------------------------------------------

    def measure_baseline(self) -> bool:
        """The baseline's measurement and the machine's noise; False if there is nothing to tune from."""
        if self.ladder.baseline is not None:
            self._set_pace(self.ladder.baseline.step_seconds.value, self.ladder.baseline.build_seconds)
            return True
        self._now = (_BASELINE, None)
        first = self._first_visits()
        while isinstance(first, Failure):
            if not self._step_down(first):
                return False
            first = self._first_visits()
        if first.void:
            self.write(stopped=f"the baseline cannot be measured: {first.void}")
            return False
        self._set_pace(self.base.known_seconds, self.base.rebuild_seconds)
        self.base.rounds = []
        return self._measure_noise()

    def _first_visits(self) -> Round | Failure:
        """Two short visits: the first warms the machine up, the second tells what a visit takes from now on."""
        self._tell()
        first = self.driver.visit(self.base, _FIRST)
        if isinstance(first, Failure) or first.void:
            return first
        self.driver.release()
        return self.driver.visit(self.base, _FIRST)

    def _set_pace(self, step_seconds: float, build_seconds: float) -> None:
        self.pace = Pace(
            budget_seconds=self.ladder.budget_seconds,
            step_seconds=step_seconds,
            build_seconds=build_seconds,
            side_by_side=self.driver.holds_two(self.base),
        )
        self.driver.limit_seconds = self.pace.limit_seconds

    def _step_down(self, failure: Failure) -> bool:
        """Replace a baseline that ran out of memory by a smaller one, and write that down."""
        began, plan = self.clock(), self.base.plan
        move = smaller(plan, self.spec, self.cluster) if failure.failure == "out_of_memory" else None
        estimate = predict(plan, self.spec, self.cluster, learn(self.ladder), self.pricer)
        if move is None or estimate is None or self.left <= 0:
            self.write(stopped=f"the baseline failed ({failure.failure}): {failure.message}")
            return False
        tried = Choice(lever=_BASELINE, move=msgspec.structs.replace(move, plan=plan), ratio=1.0, estimate=estimate.estimate)
        self.ladder = msgspec.structs.replace(self.ladder, baseline_plan=move.plan)
        self.base = self.best = Record(name=f"{_BASELINE}-{len(self.ladder.trials) + 1}", plan=move.plan)
        self.record(tried, "failed", f"out of memory, so the baseline becomes: {move.words}", began, failure)
        return True

    def _measure_noise(self) -> bool:
        """A/A: the baseline against itself, over two builds or more."""
        self._now = ("noise", None)
        why = self._play_noise((), self.clock() + self.pace.noise_seconds)
        if why:
            self.write(stopped=f"the baseline cannot be measured: {why}")
        return not why

    def _play_noise(self, earlier: tuple[Round, ...], deadline: float) -> str:
        """A/A rounds that go on from `earlier` ones, and the baseline's measurement by all of them; says what went wrong."""
        state, why = Noise(settings=self.pace.noise_settings(), label=self.base.name, deadline=deadline, rounds=earlier), ""
        self.base.rounds = list(earlier)
        twin = self._twin()
        while not why and isinstance(action := state.next(self.clock()), Visit):
            began = self.clock()
            if state.wants_a_new_build:
                self.driver.release()
            done = self.driver.visit(twin if action.index % 2 else self.base, action)
            if isinstance(done, Failure):
                why = done.message
            else:
                if action.index % 2 and twin is not self.base:
                    self.base.rounds.append(done)
                state = state.after(done, self.clock() - began)
        if not why and isinstance(action, Stop) and action.verdict == "void":
            why = action.reason
        if not why:
            self._write_baseline(state)
        return why

    def _twin(self) -> Record:
        """What takes turns with the baseline in the A/A run: a second build of it where two plans do so side by side."""
        if not self.pace.side_by_side:
            return self.base
        return dataclasses.replace(self.base, name=f"{self.base.name}-again", rounds=[], losses=[], grad_norms=[], reserved={})

    def _write_baseline(self, state: Noise) -> None:
        failure = None if self.base.profiled else self.driver.profile(self.base)
        measured = self.driver.measurement(self.base)
        pair = [
            msgspec.structs.replace(measured, rounds=tuple(r for r in state.sides if r.label == side)) for side in ("a", "b")
        ]
        estimate = predict(self.base.plan, self.spec, self.cluster, learn(self.ladder), self.pricer)
        self.write(
            baseline=measured,
            baseline_estimate=estimate.estimate if estimate else None,
            noise=noise_of(compare_rounds(pair[0], pair[1])),
            stopped=f"profiling the baseline failed: {failure.message}" if failure else self.ladder.stopped,
        )

    # -- rungs ----------------------------------------------------------------------------------------------------------

    @property
    def threshold(self) -> float:
        return max(THRESHOLD, self.ladder.noise)

    def climb(self) -> None:
        """Trials until nothing is worth one, the time is up, or there are enough."""
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
        return sum(t.lever != _BASELINE for t in self.ladder.trials)

    def _affords(self, choice: Choice) -> bool:
        compiled = choice.move.plan.compile.mode != "off"
        return self.clock() + self.pace.screen_seconds(compiled=compiled) <= self.end_of_trials

    def _try(self, choice: Choice) -> None:
        began, index = self.clock(), len(self.ladder.trials)
        self._now = ("trial", choice)
        self._tell()
        candidate = Record(name=_name(index), plan=choice.move.plan)
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
            self.write(stopped=f"the noise could not be measured on: {why}")
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
        candidate = record_of(_name(trial.index), trial.plan, before.other)
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
        self, base: Record, other: Record, deadline: float, *, screen: bool, most: int, earlier: Sequence[Round] = ()
    ) -> Comparison | Failure:
        settings = self.pace.settings(self.threshold, screen=screen, promising_alternations=most)
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
        self.write(trials=tuple(trials), stopped="; ".join(part for part in (self.ladder.stopped, stop) if part))

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
            self._now = ("final", None)
            self._tell()
            end = self.start + self.ladder.budget_seconds
            if self.clock() + 2 * ALTERNATIONS * self.pace.visit_seconds > end:
                self._fall_back("no time was left to measure it against the baseline again", to_baseline=True)
                return
            result = self._compare(self.base, self.best, end, screen=False, most=MOST_EVER)
            if isinstance(result, Comparison):
                self.write(final=result)
                if result.verdict == "better":
                    return
            reason = result.message if isinstance(result, Failure) else "; ".join(result.reasons)
            self._fall_back(f"did not hold against the baseline at the end: {reason}", to_baseline=False)

    def _fall_back(self, reason: str, *, to_baseline: bool) -> None:
        """Undo the topmost rung that is kept, or all of them."""
        trials, kept = list(self.ladder.trials), self._kept()
        for trial in kept if to_baseline else kept[-1:]:
            place = next(i for i, t in enumerate(trials) if t.index == trial.index)
            trials[place] = msgspec.structs.replace(trial, outcome="undone", reason=f"{trial.reason}; {reason}")
        below = [] if to_baseline else kept[:-1]
        self.best = Record(name=_name(below[-1].index), plan=below[-1].plan) if below else self.base
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

    # -- progress -------------------------------------------------------------------------------------------------------

    def _watch(self, name: str, step_seconds: float) -> None:
        self._tell(name=name, step_seconds=step_seconds)

    def _tell(self, *, name: str = "", step_seconds: float | None = None, ended: Trial | None = None) -> None:
        if self.on_progress is None:
            return
        phase, choice = self._now
        running = ended or self._again
        self.on_progress(
            TuneProgress(
                phase=phase,
                index=running.index if running else len(self.ladder.trials),
                lever=choice.lever if choice else "",
                change=choice.move.words if choice else "",
                predicted_ratio=choice.ratio if choice else None,
                plan_name=name,
                step_seconds=step_seconds,
                spent_seconds=self.spent,
                left_seconds=max(0.0, self.left),
                ended=ended,
            )
        )


def _name(index: int) -> str:
    return f"trial-{index:02d}"
