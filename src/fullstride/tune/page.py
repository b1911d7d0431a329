"""A tuning run as a page: what was won, rung by rung, and what was tried in vain."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal, TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.measure.blocks import (
    UNKNOWN,
    Named,
    bytes_words,
    confidence_words,
    health_table,
    interval_words,
    memory_table,
    not_profiled,
    percent_words,
    present,
    share_chart,
    share_table,
    step_time_chart,
)
from fullstride.measure.measurement import Measurement
from fullstride.plan.estimate import Estimate
from fullstride.plan.plan import Plan
from fullstride.plan.toml import plan_text
from fullstride.report.document import (
    AnyBlock,
    Chart,
    Code,
    Column,
    Document,
    Heading,
    Stat,
    Stats,
    Table,
    TableRow,
    Text,
    Tone,
    Trace,
)
from fullstride.report.words import DASH
from fullstride.tune.page_machine import machine_blocks
from fullstride.tune.page_predictions import ledger_blocks, prediction_blocks
from fullstride.tune.trial import Ladder, Outcome, Trial
from fullstride.units import format_count, format_seconds

State: TypeAlias = Literal["won", "stands", "unconfirmed", "other runs", "nothing runs"]
"""How a tuning run came out; `unconfirmed` when rungs were kept and the last measurement is missing."""

_OUTCOMES: dict[Outcome, Tone] = {"kept": "good", "undone": "plain", "failed": "bad", "not tried": "quiet"}


def ladder_document(
    ladder: Ladder, *, cluster: Cluster | None = None, spec_name: str = "", run_dir: str = "", train_command: str = ""
) -> Document:
    """The page of a tuning run, whatever came of it.

    Args:
        ladder: the record, finished or not.
        cluster: the machine, for its own section.
        spec_name: what to call the model; its source in the plan otherwise.
        run_dir: where the run lies.
        train_command: the exact command that trains with the best plan.
    """
    state = state_of(ladder)
    name = spec_name or ladder.best_plan.model.source
    named = before_and_after(ladder)
    blocks: list[AnyBlock] = [Stats(items=_stats(ladder, state, named))]
    blocks += present([_warning(state), Text(text=_story(ladder, cluster))])
    if train_command and state != "nothing runs":
        blocks.append(Code(text=train_command, title="train with the best plan", language="shell"))
    blocks += [Heading(text="The ladder"), *present([waterfall(ladder)]), trial_table(ladder)]
    blocks += _time_blocks(named, ladder.baseline_plan.layout.pp)
    blocks += _memory_blocks(ladder, named)
    blocks += [Heading(text="Predictions"), *prediction_blocks(ladder)]
    blocks += [Heading(text="Health"), health_table(named) or Text(text="No health figure was taken.", tone="quiet")]
    blocks += [Heading(text="Machine"), *machine_blocks(cluster, named)]
    file = "the baseline plan" if state == "nothing runs" else "best.toml"
    blocks += [Heading(text="Plan"), Code(text=plan_text(ladder.best_plan), title=file, language="toml")]
    where = f" Everything lies in {run_dir}." if run_dir else ""
    return Document(title=_headline(state, name, ladder), subtitle=_subtitle(state, ladder) + where, blocks=tuple(blocks))


def state_of(ladder: Ladder) -> State:
    """How it came out, judged by what was measured."""
    changed = ladder.best_plan.plan_hash != ladder.baseline_plan.plan_hash
    if ladder.baseline is None:
        return "other runs" if changed and any(trial.outcome == "kept" for trial in ladder.trials) else "nothing runs"
    if not changed:
        return "stands"
    # A final measurement may be of a plan that did not hold, and was taken back.
    final = ladder.final if ladder.final and ladder.final.other.plan_hash == ladder.best_plan.plan_hash else None
    return "won" if final and final.verdict == "better" else "unconfirmed"


def kept_trials(ladder: Ladder) -> list[Trial]:
    """The rungs, in the order they were climbed."""
    return [trial for trial in ladder.trials if trial.outcome == "kept"]


def best_measurement(ladder: Ladder) -> Measurement | None:
    """The best plan's latest measurement; None when it has none."""
    wanted = ladder.best_plan.plan_hash
    comparisons = [ladder.final, *[trial.comparison for trial in reversed(ladder.trials)]]
    for comparison in comparisons:
        for one in (comparison.other, comparison.base) if comparison else ():
            if one.plan_hash == wanted:
                return one
    return ladder.baseline if ladder.baseline and ladder.baseline.plan_hash == wanted else None


def before_and_after(ladder: Ladder) -> Named:
    """Baseline and best plan, measured together at the end where they were; the baseline alone when it stands."""
    changed = ladder.best_plan.plan_hash != ladder.baseline_plan.plan_hash
    before = ladder.final.base if ladder.final and changed else ladder.baseline
    after = best_measurement(ladder) if changed else None
    pairs = (("baseline", _profiled(before, ladder.baseline)), ("best plan", after))
    return [(name, one) for name, one in pairs if one is not None]


def _profiled(one: Measurement | None, earlier: Measurement | None) -> Measurement | None:
    """The measurement that holds a profile, when only the earlier one of the same plan does."""
    return earlier if one and earlier and not one.shares and earlier.shares else one


def _headline(state: State, name: str, ladder: Ladder) -> str:
    if state == "won" and ladder.final:
        return f"{name} trains {ladder.final.ratio.value:.2f} times as fast"
    return {
        "stands": f"{name}: the baseline stands",
        "unconfirmed": f"{name}: faster plans found, not confirmed",
        "other runs": f"{name}: the baseline does not run, another plan does",
        "nothing runs": f"{name}: the baseline could not be measured",
        "won": name,
    }[state]


def _subtitle(state: State, ladder: Ladder) -> str:
    if state == "won" and ladder.final:
        ratio = ladder.final.ratio
        how = f"{ladder.final.alternations} alternations" if ladder.final.interleaved else "not interleaved"
        words = f"{confidence_words(ratio)} {ratio.low:.3f} to {ratio.high:.3f}, {how}, same work a step."
        return f"Best plan against the baseline: {words}"
    if state == "stands":
        return "No change was really faster on this machine."
    if state == "unconfirmed":
        product = math.prod(trial.ratio.value for trial in kept_trials(ladder) if trial.ratio)
        return f"The kept rungs multiply to {product:.2f}; the last measurement against the baseline is missing or not better."
    return "There is no baseline time to compare with." if state == "other runs" else "No plan was measured."


def _warning(state: State) -> Text | None:
    if state == "unconfirmed":
        return Text(text="No gain is claimed: the best plan was not measured to be better than the baseline.", tone="warn")
    if state == "nothing runs":
        return Text(text="The baseline did not run to its end; the ladder below says what happened.", tone="bad")
    return None


def _stats(ladder: Ladder, state: State, named: Named) -> tuple[Stat, ...]:
    items = [_speed_stat(ladder, state)]
    measured = dict(named)
    after, before = measured.get("best plan") or measured.get("baseline"), measured.get("baseline")
    if after is None:
        return (*items, _trials_stat(ladder))
    old = before if before is not after else None
    items.append(
        Stat(
            label="Tokens per second",
            value=format_count(after.tokens_per_second),
            note=f"{format_count(old.tokens_per_second)} before" if old else f"over {after.world_size} ranks",
        )
    )
    items.append(
        Stat(
            label="Step time",
            value=_seconds(after.step_seconds.value),
            note=f"{_seconds(old.step_seconds.value)} before" if old else f"{after.tokens_per_step:,} tokens",
        )
    )
    items.append(_mfu_stat(after, old))
    items.append(_memory_stat(after, old))
    return (*items, _trials_stat(ladder))


def _seconds(value: float) -> str:
    return format_seconds(value) if math.isfinite(value) else UNKNOWN


def _speed_stat(ladder: Ladder, state: State) -> Stat:
    if state == "won" and ladder.final:
        ratio = ladder.final.ratio
        note = f"{confidence_words(ratio)} {ratio.low:.3f} to {ratio.high:.3f}"
        return Stat(label="Speed against the baseline", value=f"{ratio.value:.2f} times", note=note, tone="good")
    if state == "stands":
        note = f"A/A noise of this machine: ±{percent_words(ladder.noise)}"
        return Stat(label="Speed against the baseline", value="unchanged", note=note)
    note = "not confirmed" if state == "unconfirmed" else "no baseline time"
    return Stat(label="Speed against the baseline", value=DASH, note=note, tone="warn")


def _mfu_stat(after: Measurement, old: Measurement | None) -> Stat:
    if after.mfu_full is None:
        return Stat(label="MFU", value=DASH, note="the peak rate of this device is not known")
    before = f"{percent_words(old.mfu_full)} before; " if old and old.mfu_full is not None else ""
    return Stat(label="MFU", value=percent_words(after.mfu_full), note=f"{before}causal {percent_words(after.mfu_causal)}")


def _memory_stat(after: Measurement, old: Measurement | None) -> Stat:
    allocated = after.memory.peak_allocated_bytes > 0
    field = "peak_allocated_bytes" if allocated else "peak_reserved_bytes"
    note = f"{bytes_words(getattr(old.memory, field))} before" if old else "largest over the ranks"
    label = "Peak memory" if allocated else "Resident memory"
    return Stat(label=label, value=bytes_words(getattr(after.memory, field)), note=note)


def _trials_stat(ladder: Ladder) -> Stat:
    counts = Counter(trial.outcome for trial in ladder.trials)
    others = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if outcome != "kept" and counts[outcome])
    return Stat(label="Changes kept", value=str(counts["kept"]), note=others or "no other was considered")


def _story(ladder: Ladder, cluster: Cluster | None) -> str:
    work, ranks = ladder.baseline_plan.workload, ladder.baseline_plan.layout.world_size
    device = f" on {cluster.num_devices} x {cluster.device.name}" if cluster else ""
    text = (
        f"Each step is the same work throughout: {work.samples_per_step} samples of {work.sequence_length:,} tokens over "
        f"{ranks} rank{'s' if ranks > 1 else ''}{device}. A change is kept only if its gain is larger than "
        f"the noise of the machine (A/A half-width {percent_words(ladder.noise)}) and the learning stays the same."
    )
    budget = f"{format_seconds(ladder.spent_seconds)} of {format_seconds(ladder.budget_seconds)}"
    started = ladder.started[:16].replace("T", " ")
    return f"{text}\nStarted {started}; took {budget}." + (f" {_sentence(ladder.stopped)}" if ladder.stopped else "")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def waterfall(ladder: Ladder) -> Chart | None:
    """Milliseconds that each rung took off the step; None when no rung was kept or the baseline has no time.

    Each rung's share is its own measured ratio, applied in turn to the baseline's time in the last measurement; what the
    last measurement adds to that is shown as drift, so that the bars sum.
    """
    rungs = [trial for trial in kept_trials(ladder) if trial.ratio and trial.ratio.value > 0]
    start = ladder.final.base if ladder.final else ladder.baseline
    if not rungs or start is None or not math.isfinite(start.step_seconds.value):
        return None
    level = start.step_seconds.value * 1e3
    names, values = ["baseline"], [level]
    for trial in rungs:
        after = level / trial.ratio.value if trial.ratio else level
        names.append(trial.lever)
        values.append(after - level)
        level = after
    note = "Each rung's own measured ratio, in turn."
    if ladder.final and ladder.final.other.plan_hash == ladder.best_plan.plan_hash:
        last = ladder.final.other.step_seconds.value * 1e3
        names.append("drift at the end")
        values.append(last - level)
        level = last
        note += " Drift is what the last interleaved measurement found beyond their product."
    names.append("best plan")
    trace = Trace(name="ms a step", x=tuple(names), y=(*values, level))
    return Chart(title="Step time, rung by rung", form="waterfall", traces=(trace,), y_label="ms", horizontal=True, note=note)


def trial_table(ladder: Ladder) -> AnyBlock:
    """Every lever with its verdict and the reason."""
    if not ladder.trials:
        return Text(text="No lever was tried.", tone="quiet")
    names = ("lever", "verdict", "change", "predicted", "measured", "why", "took")
    rights = {"predicted", "measured", "took"}
    columns = tuple(Column(name=name, align="right" if name in rights else "left") for name in names)
    rows = tuple(TableRow(cells=_trial_cells(trial), tone=_OUTCOMES[trial.outcome]) for trial in ladder.trials)
    note = "Predicted and measured: time before over time after, above 1 is faster; the interval is in brackets."
    return Table(title="Every lever", columns=columns, rows=rows, note=note)


def _trial_cells(trial: Trial) -> tuple[str, ...]:
    why = trial.reason
    if trial.failure and trial.failure.message not in why:
        why = f"{why}{': ' if why else ''}{trial.failure.failure.replace('_', ' ')}, {trial.failure.message}"
    predicted = f"{trial.predicted_ratio:.3f}" if math.isfinite(trial.predicted_ratio) else DASH
    measured = interval_words(trial.ratio) if trial.ratio else DASH
    took = format_seconds(trial.seconds) if trial.seconds > 0 else DASH
    return (trial.lever, trial.outcome, trial.change, predicted, measured, why, took)


def _time_blocks(named: Named, pp: int) -> list[AnyBlock]:
    if not named:
        return []
    waits = _waits(pp) if share_chart(named) else None
    charts = present([step_time_chart(named), share_chart(named), waits, share_table(named), not_profiled(named)])
    return [Heading(text="Time"), *charts]


def _waits(pp: int) -> Text | None:
    """What the shares of a pipeline do not say by themselves."""
    if pp == 1:
        return None
    text = (
        f"The shares are those of the busiest of {pp} pipeline ranks; what it waits for the others is in exposed communication."
    )
    return Text(text=text, tone="quiet")


def _memory_blocks(ladder: Ladder, named: Named) -> list[AnyBlock]:
    blocks = ledger_blocks(estimate_of(ladder, ladder.best_plan), best_measurement(ladder))
    if named:
        blocks.append(memory_table(named))
    return [Heading(text="Memory"), *blocks] if blocks else []


def estimate_of(ladder: Ladder, plan: Plan) -> Estimate | None:
    """What was predicted for a plan of this run."""
    wanted = plan.plan_hash
    if ladder.baseline_plan.plan_hash == wanted and ladder.baseline_estimate:
        return ladder.baseline_estimate
    return next((trial.estimate for trial in reversed(ladder.trials) if trial.plan.plan_hash == wanted), None)
