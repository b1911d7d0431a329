"""Predicted beside measured: the ledger against the memory that was used, and every trial's errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from fullstride.files import Value
from fullstride.measure.blocks import bytes_words
from fullstride.measure.measurement import Measurement
from fullstride.plan.estimate import Estimate, Moment, Row, RowKind
from fullstride.report.document import AnyBlock, Chart, Column, Stat, Stats, Table, TableRow, Text, Tone, Trace
from fullstride.report.words import DASH
from fullstride.tune.trial import Ladder
from fullstride.units import format_bytes, format_percent, format_seconds

MEMORY_LIMIT = 0.10
"""Allocated peak: predicted within this share of what was measured."""
TIME_LIMIT = 0.15
"""Step time, likewise."""

_MOST_KINDS = 6
_KIND_WORDS: dict[RowKind, str] = {
    "weights": "weights",
    "master": "fp32 master weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "recompute": "recomputed activations",
    "logits": "logits",
    "gathered": "gathered weights",
    "buckets": "gradient buckets",
    "communication": "communication buffers",
    "temporary": "temporaries",
    "context": "device context",
    "fragmentation": "fragmentation",
}


class Prediction(Value, frozen=True, kw_only=True):
    """One plan's prediction beside its measurement."""

    name: str
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    bytes: int
    """Allocated peak; 0 where the device does not count it."""

    @property
    def time_error(self) -> float | None:
        """(Predicted - measured) / measured; None where there is no measurement."""
        return self.predicted_seconds / self.seconds - 1 if self.seconds > 0 and math.isfinite(self.seconds) else None

    @property
    def memory_error(self) -> float | None:
        """Likewise."""
        return self.predicted_bytes / self.bytes - 1 if self.bytes > 0 else None


def predictions(ladder: Ladder) -> list[Prediction]:
    """Baseline and every trial that has both a prediction and a measurement."""
    pairs = [("baseline", ladder.baseline_estimate, ladder.baseline)]
    pairs += [(trial.lever, trial.estimate, trial.comparison.other if trial.comparison else None) for trial in ladder.trials]
    return [_prediction(name, estimate, one) for name, estimate, one in pairs if estimate and one]


def _prediction(name: str, estimate: Estimate, one: Measurement) -> Prediction:
    return Prediction(
        name=name,
        predicted_seconds=estimate.step_seconds,
        seconds=one.step_seconds.value,
        predicted_bytes=estimate.peak_allocated_bytes,
        bytes=one.memory.peak_allocated_bytes,
    )


def prediction_blocks(ladder: Ladder) -> list[AnyBlock]:
    """Errors of time and memory, summed up and one by one."""
    found = predictions(ladder)
    if not found:
        return [Text(text="No plan of this run has both a prediction and a measurement.", tone="quiet")]
    columns = (
        Column(name="plan"),
        *[
            Column(name=name, align="right")
            for name in (
                "step, predicted",
                "step, measured",
                "error of time",
                "peak, predicted",
                "peak, measured",
                "error of memory",
            )
        ],
    )
    table = Table(
        title="Predicted against measured",
        columns=columns,
        rows=tuple(_prediction_row(one) for one in found),
        note=(
            f"Marked where time is off by more than {TIME_LIMIT * 100:.0f} % "
            f"or the allocated peak by more than {MEMORY_LIMIT * 100:.0f} %."
        ),
    )
    items = (
        _error_stat("Step time", [one.time_error for one in found], TIME_LIMIT),
        _error_stat("Allocated peak", [one.memory_error for one in found], MEMORY_LIMIT),
    )
    return [Stats(items=items), table]


def _error_stat(label: str, errors: Sequence[float | None], limit: float) -> Stat:
    sizes = [abs(error) for error in errors if error is not None]
    if not sizes:
        return Stat(label=f"{label}: median error", value=DASH, note="not measured on this device")
    inside = sum(size <= limit for size in sizes)
    note = f"largest {format_percent(max(sizes))}; {inside} of {len(sizes)} within {limit * 100:.0f} %"
    tone: Tone = "good" if inside == len(sizes) else "warn"
    return Stat(label=f"{label}: median error", value=format_percent(median(sizes)), note=note, tone=tone)


def _prediction_row(one: Prediction) -> TableRow:
    off = _beyond(one.time_error, TIME_LIMIT) or _beyond(one.memory_error, MEMORY_LIMIT)
    cells = (
        one.name,
        format_seconds(one.predicted_seconds) if math.isfinite(one.predicted_seconds) else DASH,
        format_seconds(one.seconds) if one.time_error is not None else DASH,
        _error(one.time_error),
        bytes_words(one.predicted_bytes),
        bytes_words(one.bytes),
        _error(one.memory_error),
    )
    return TableRow(cells=cells, tone="warn" if off else "plain")


def _beyond(error: float | None, limit: float) -> bool:
    return error is not None and abs(error) > limit


def _error(error: float | None) -> str:
    return DASH if error is None or not math.isfinite(error) else f"{error * 100:+.1f} %"


def peak_rows(estimate: Estimate) -> tuple[Moment | None, list[Row]]:
    """The fullest moment, and its rows on the fullest stage, with what stands beside it all the time."""
    if not estimate.moments:
        return None, []
    moment = max(estimate.moments, key=lambda one: one.bytes)
    there = [row for row in estimate.rows if moment.name in row.moments or row.kind in ("context", "fragmentation")]
    if not there:
        return moment, []
    sums: dict[int, int] = {}
    for row in there:
        sums[row.stage] = sums.get(row.stage, 0) + row.bytes
    fullest = max(sums, key=lambda stage: sums[stage])
    return moment, [row for row in there if row.stage == fullest]


def ledger_blocks(estimate: Estimate | None, used: Measurement | None) -> list[AnyBlock]:
    """The best plan's ledger at its fullest moment, beside what was used."""
    if estimate is None:
        return []
    moment, rows = peak_rows(estimate)
    if moment is None or not rows:
        return []
    traces = [
        Trace(name=word, x=("predicted",), y=(size / 2**30,)) for word, size in _by_kind(rows) if size > 0
    ] + _used_traces(used)
    when, capacity = moment.name.replace("_", " "), format_bytes(estimate.capacity_bytes)
    note = f"Predicted at its fullest moment, {when}; the device has {capacity}."
    chart = Chart(
        title="Memory, predicted and used", form="stacked", traces=tuple(traces), y_label="GiB", horizontal=True, note=note
    )
    return [chart, _ledger_table(rows)]


def _by_kind(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Bytes by kind, in the ledger's order; the smallest kinds together, so that the colours stay apart."""
    sums: dict[RowKind, int] = {}
    for row in rows:
        sums[row.kind] = sums.get(row.kind, 0) + row.bytes
    large = set(sorted(sums, key=lambda kind: -sums[kind])[:_MOST_KINDS])
    kinds = [(word, sums[kind]) for kind, word in _KIND_WORDS.items() if kind in large]
    rest = sum(size for kind, size in sums.items() if kind not in large)
    return [*kinds, ("other kinds", rest)] if rest else kinds


def _used_traces(used: Measurement | None) -> list[Trace]:
    if used is None:
        return []
    memory = used.memory
    allocated = memory.peak_allocated_bytes
    parts = (
        ("used: between steps", min(memory.static_bytes, allocated) if allocated else 0),
        ("used: within the step", max(allocated - memory.static_bytes, 0)),
        (
            "used: reserved or outside the allocator",
            max(max(memory.device_used_bytes, memory.peak_reserved_bytes) - allocated, 0),
        ),
    )
    return [Trace(name=word, x=("used",), y=(size / 2**30,)) for word, size in parts if size > 0]


def _ledger_table(rows: Sequence[Row]) -> Table:
    columns = (
        Column(name="row"),
        Column(name="kind"),
        Column(name="bytes", align="right"),
        Column(name="confidence"),
        Column(name="source"),
    )
    ordered = sorted(rows, key=lambda row: -row.bytes)
    cells = [(row.name, _KIND_WORDS[row.kind], format_bytes(row.bytes), row.confidence, row.source) for row in ordered]
    total = ("together", "", format_bytes(sum(row.bytes for row in rows)), "", "")
    lines = tuple(TableRow(cells=cell) for cell in (*cells, total))
    return Table(title="The ledger of the best plan, at its fullest moment", columns=columns, rows=lines)
