"""What the rungs of the tuning loop stand on: its time, its ladder, the baseline and the noise of the machine."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Final

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.files import write_json
from fullstride.measure.compare import compare_rounds, noise_of
from fullstride.measure.measurement import Comparison, Round
from fullstride.measure.protocol import NARROW, Noise, Stop, Visit
from fullstride.measure.stats import Clock
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.rundir import Failure, RunDir
from fullstride.tune.again import record_of
from fullstride.tune.choose import Choice
from fullstride.tune.driver import Driver, Record, Session
from fullstride.tune.learned import Pricer, learn, predict
from fullstride.tune.pace import Pace
from fullstride.tune.progress import OnProgress, TunePhase, TuneProgress
from fullstride.tune.smaller import smaller
from fullstride.tune.trial import Ladder, Outcome, Trial

BASELINE: Final = "baseline"
_FIRST = Visit(index=0, label=BASELINE, warmup_steps=2, max_warmup_steps=8, round_steps=2)


class Ground:
    """The run in progress, but for its rungs; everything that must survive an interruption is in `ladder`."""

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
        self._now: tuple[TunePhase, Choice | None] = (BASELINE, None)
        self.troubles: list[str] = []
        """What went wrong without ending the run; said with the reason of its end."""
        self._proven: Comparison | None = None
        """The newest last measurement that was better."""
        self._again: Trial | None = None
        """The trial that is taken up again, while it is."""

    # -- time -----------------------------------------------------------------------------------------------------------

    @property
    def spent(self) -> float:
        """Seconds."""
        return self.clock() - self.start

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ladder.budget_seconds - self.spent

    @property
    def end_of_trials(self) -> float:
        """The last measurement must find what the trials found: it needs about as many alternations as the clearest did.

        Twice as many on a restless machine: there a trial that was kept early was lucky in part. After one that was better
        its own number is known.
        """
        if self._proven is not None:
            return self.start + self.ladder.budget_seconds - self.pace.seconds_of(self._proven.alternations)
        needed = min((t.comparison.alternations for t in self._kept() if t.comparison), default=0)
        needed *= 2 if self.ladder.noise > NARROW else 1
        return self.start + self.ladder.budget_seconds - self.pace.seconds_of(needed)

    # -- the ladder -----------------------------------------------------------------------------------------------------

    def begin(self, baseline: Plan, budget_seconds: float, resume: Ladder | None) -> None:
        """A new ladder, or the one of an interrupted run."""
        self.start = self.clock() - (resume.spent_seconds if resume else 0.0)
        if resume is None:
            started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S%z")
            self.ladder = Ladder(started=started, budget_seconds=budget_seconds, baseline_plan=baseline, best_plan=baseline)
        else:
            run = tuple(trial for trial in resume.trials if trial.outcome != "not tried")
            self.ladder = msgspec.structs.replace(resume, budget_seconds=budget_seconds, trials=run, final=None, stopped="")
        plan, measured = self.ladder.baseline_plan, self.ladder.baseline
        self.base = self.best = record_of(BASELINE, plan, measured) if measured else Record(name=BASELINE, plan=plan)
        for trial in self.ladder.trials:
            if trial.outcome == "kept":
                self.best = Record(name=name_of(trial.index), plan=trial.plan)

    def write(self, **changes: object) -> None:
        """Change the ladder and write it down."""
        self.ladder = msgspec.structs.replace(self.ladder, spent_seconds=self.spent, **changes)
        write_json(self.directory / "ladder.json", self.ladder)

    def record(self, choice: Choice, outcome: Outcome, reason: str, began: float, result: Comparison | Failure | None) -> None:
        """Add a trial that was run to the ladder."""
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
        self._now = (BASELINE, None)
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
        tried = Choice(lever=BASELINE, move=msgspec.structs.replace(move, plan=plan), ratio=1.0, estimate=estimate.estimate)
        self.ladder = msgspec.structs.replace(self.ladder, baseline_plan=move.plan)
        self.base = self.best = Record(name=f"{BASELINE}-{len(self.ladder.trials) + 1}", plan=move.plan)
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
        state = Noise(
            settings=self.pace.noise_settings(),
            label=self.base.name,
            deadline=deadline,
            rounds=earlier,
            rounds_of_a_build=8 if self.pace.side_by_side else 3,  # side by side two builds are compared from the start
        )
        why = ""
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
        if failure:
            self.troubles.append(f"profiling the baseline failed: {failure.message}")
        measured = self.driver.measurement(self.base)
        pair = [
            msgspec.structs.replace(measured, rounds=tuple(r for r in state.sides if r.label == side)) for side in ("a", "b")
        ]
        estimate = predict(self.base.plan, self.spec, self.cluster, learn(self.ladder), self.pricer)
        self.write(
            baseline=measured,
            baseline_estimate=estimate.estimate if estimate else None,
            noise=noise_of(compare_rounds(pair[0], pair[1])),
        )

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


def name_of(index: int) -> str:
    """What the plan of a trial is called in orders and rounds."""
    return f"trial-{index:02d}"
