"""Trials that looked like a gain and could not be decided: what it takes to go on with them.

Derived from the ladder alone, so that a resumed run can do it as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullstride.measure.compare import THRESHOLD
from fullstride.measure.measurement import Comparison, Measurement, Round
from fullstride.measure.stats import trimmed_mean
from fullstride.plan.plan import Plan
from fullstride.tune.choose import Choice, Situation
from fullstride.tune.driver import Record
from fullstride.tune.learned import Pricer, predict
from fullstride.tune.levers import Lever
from fullstride.tune.stages import refused
from fullstride.tune.trial import Ladder, Trial


def unfinished(ladder: Ladder, threshold: float) -> list[Trial]:
    """Trials that were not decided, with a ratio above 1 + threshold, the largest ratio first.

    One that was too small a difference for the noise known then is undecided again where less noise is known now.
    """
    found = [
        (trial.comparison.ratio.value, trial)
        for trial in ladder.trials
        if trial.outcome == "undone" and trial.comparison and trial.comparison.verdict in ("undetermined", "no difference")
    ]
    return [trial for ratio, trial in sorted(found, key=lambda pair: -pair[0]) if ratio > 1 + threshold]


def barred_by_noise(ladder: Ladder) -> Comparison | None:
    """The best trial on today's best plan that would look like a gain, were it not for the noise of the machine."""
    compared = (trial.comparison for trial in unfinished(ladder, THRESHOLD))
    return next((c for c in compared if c and c.base.plan_hash == ladder.best_plan.plan_hash), None)


def rounds_of(base: tuple[str, Measurement], other: tuple[str, Measurement]) -> tuple[Round, ...]:
    """Rounds of a comparison in the order of time, under the names that the two plans have now."""
    named = [
        Round(index=r.index, label=name, step_seconds=r.step_seconds, void=r.void)
        for name, measured in (base, other)
        for r in measured.rounds
    ]
    return tuple(sorted(named, key=lambda r: r.index))


def record_of(name: str, plan: Plan, measured: Measurement) -> Record:
    """What is known of a plan that was measured before."""
    counted = [r for r in measured.rounds if not r.void]
    return Record(
        name=name,
        plan=plan,
        losses=list(measured.losses),
        grad_norms=list(measured.grad_norms),
        memory=measured.memory,
        build_seconds=measured.build_seconds,
        warmup_steps=measured.warmup_steps,
        recompiles=measured.recompiles,
        shares=measured.shares,
        profiled=bool(measured.shares),
        started=measured.started,
        known_seconds=trimmed_mean(counted[-1].step_seconds) if counted else 0.0,
    )


def on_top_of(situation: Situation, trial: Trial, levers: Sequence[Lever], pricer: Pricer) -> Choice | None:
    """The trial's change on today's best plan; None where it cannot be made there, does not fit or was tried."""
    now = predict(situation.plan, situation.spec, situation.cluster, situation.learned, pricer)
    moves = [
        move
        for lever in levers
        if lever.name == trial.lever
        for move in lever.changes(situation.plan, situation.spec, situation.cluster)
        if move.words == trial.change
    ]
    for move in moves:
        if move.plan.plan_hash in situation.learned.tried or refused(move.plan, situation.spec, situation.cluster):
            continue
        then = predict(move.plan, situation.spec, situation.cluster, situation.learned, pricer)
        if now and then and then.fits:
            return Choice(lever=trial.lever, move=move, ratio=now.seconds / then.seconds, estimate=then.estimate)
    return None
