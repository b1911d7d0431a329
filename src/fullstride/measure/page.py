"""Measurements, comparisons and training runs as pages."""

from __future__ import annotations

import math

from fullstride.measure.blocks import (
    Named,
    confidence_words,
    health_table,
    interval_words,
    memory_table,
    name_of,
    not_profiled,
    present,
    seconds_words,
    share_chart,
    share_table,
    speed_stats,
    step_time_chart,
)
from fullstride.measure.measurement import Comparison, Measurement, Verdict
from fullstride.measure.training_page import training_document
from fullstride.report.document import AnyBlock, Column, Document, Heading, Stat, Stats, Table, TableRow, Text, Tone
from fullstride.report.words import DASH
from fullstride.units import format_count, format_seconds

__all__ = ["comparison_document", "measurement_document", "training_document"]

_TONES: dict[Verdict, Tone] = {
    "better": "good",
    "worse": "bad",
    "no difference": "plain",
    "undetermined": "warn",
    "void": "warn",
}


def measurement_document(measurement: Measurement) -> Document:
    """One plan's speed, memory and health."""
    named = [(name_of(measurement), measurement)]
    blocks: list[AnyBlock] = [Stats(items=speed_stats(measurement))]
    if measurement.recompiles:
        words = f"{measurement.recompiles} recompilations in the timed steps: this is no steady state"
        blocks.append(Text(text=words, tone="warn"))
    blocks += _details(named)
    blocks += present([_rounds(named), _conditions(named)])
    return Document(
        title=f"{format_count(measurement.tokens_per_second)} tokens per second",
        subtitle=f"{named[0][0]}, {measurement.form} form, {measurement.started}, on {measurement.device}",
        blocks=tuple(blocks),
    )


def comparison_document(comparison: Comparison) -> Document:
    """Two plans beside each other, and whether the second is really faster."""
    base, other = name_of(comparison.base), name_of(comparison.other)
    if base == other:
        base, other = f"{base} (first)", f"{other} (second)"
    named = [(base, comparison.base), (other, comparison.other)]
    blocks: list[AnyBlock] = [Stats(items=_comparison_stats(comparison, base, other))]
    blocks += [Text(text=reason, tone="quiet") for reason in comparison.reasons]
    if not comparison.interleaved:
        words = "Not interleaved: the two were measured apart, so the machine's drift is in the ratio and no verdict is given."
        blocks.append(Text(text=words, tone="warn"))
    blocks += _details(named)
    blocks += present([_rounds(named), _conditions(named)])
    return Document(title=_headline(comparison, base, other), subtitle=_ratio_line(comparison), blocks=tuple(blocks))


def _headline(comparison: Comparison, base: str, other: str) -> str:
    ratio = comparison.ratio.value
    if not math.isfinite(ratio):
        return f"{other} and {base} cannot be compared"
    if not comparison.interleaved:
        return f"{other}: {ratio:.3f} times the speed of {base}, not interleaved"
    words = {
        "better": f"{other} is {ratio:.2f} times as fast as {base}",
        "worse": f"{other} is slower than {base}: {ratio:.2f} times as fast",
        "no difference": f"No difference between {other} and {base}",
        "undetermined": f"Not enough evidence for {other} or {base}",
        "void": f"{other} did not do the same work as {base}",
    }
    return words[comparison.verdict]


def _ratio_line(comparison: Comparison) -> str:
    ratio = comparison.ratio
    how = f"{comparison.alternations} alternations" if comparison.interleaved else "not interleaved"
    return f"Time before over time after: {interval_words(ratio)}, {confidence_words(ratio)}, {how}."


def _comparison_stats(comparison: Comparison, base: str, other: str) -> tuple[Stat, ...]:
    # A comparison of files apart never says which is better (law 5), whatever word the value holds.
    verdict = comparison.verdict if comparison.interleaved else "no verdict"
    tone = _TONES[comparison.verdict] if comparison.interleaved else "plain"
    need = f"a gain is called when the lower end is above {comparison.threshold:.4f}"
    times = [seconds_words(one.step_seconds) for one in (comparison.base, comparison.other)]
    rates = [format_count(one.tokens_per_second) for one in (comparison.base, comparison.other)]
    return (
        Stat(label="Verdict", value=verdict, note=need, tone=tone),
        Stat(label="Ratio of times", value=f"{comparison.ratio.value:.3f}", note=interval_words(comparison.ratio)),
        Stat(label=f"Step time of {other}", value=times[1].split(" (")[0], note=f"{base}: {times[0]}"),
        Stat(label=f"Tokens per second of {other}", value=rates[1], note=f"{base}: {rates[0]}"),
    )


def _details(named: Named) -> list[AnyBlock]:
    return present(
        [
            Heading(text="Time"),
            step_time_chart(named),
            share_chart(named),
            share_table(named),
            not_profiled(named),
            Heading(text="Memory"),
            memory_table(named),
            Heading(text="Health"),
            health_table(named) or Text(text="No health figure was taken.", tone="quiet"),
        ]
    )


def _rounds(named: Named) -> Table | None:
    several = len(named) > 1
    rows = []
    for name, measurement in named:
        for one in measurement.rounds:
            mean = format_seconds(sum(one.step_seconds) / len(one.step_seconds)) if one.step_seconds else DASH
            cells = (str(one.index), *((name,) if several else ()), str(len(one.step_seconds)), mean, one.void)
            rows.append((one.index, TableRow(cells=cells, tone="warn" if one.void else "plain")))
    if not rows:
        return None
    rows.sort(key=lambda row: row[0])
    names = ("round", *(("plan",) if several else ()), "steps", "mean step", "void because")
    columns = tuple(Column(name=name, align="right" if name in ("steps", "mean step") else "left") for name in names)
    return Table(title="Rounds, in the order they were run", columns=columns, rows=tuple(row for _, row in rows))


def _conditions(named: Named) -> Table:
    rows = []
    for word, of in (
        ("device", lambda one: one.device),
        ("cluster", lambda one: one.cluster),
        ("ranks", lambda one: str(one.world_size)),
        ("samples a step", lambda one: str(one.samples_per_step)),
        ("warm-up steps", lambda one: str(one.warmup_steps)),
        ("build", lambda one: format_seconds(one.build_seconds)),
        ("plan hash", lambda one: one.plan_hash),
        ("work hash", lambda one: one.work_hash),
    ):
        rows.append(TableRow(cells=(word, *[of(one) for _, one in named])))
    versions = dict.fromkeys(name for _, one in named for name in one.versions)
    rows += [TableRow(cells=(name, *[one.versions.get(name, "unknown") for _, one in named])) for name in versions]
    columns = (Column(name="condition"), *[Column(name=name) for name, _ in named])
    return Table(title="Conditions", columns=columns, rows=tuple(rows))
