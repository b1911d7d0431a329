"""Blocks that pages about measurements share: distributions, attribution, health, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fullstride.measure.measurement import Health, Interval, Measurement, ShareName
from fullstride.measure.stats import variation
from fullstride.report.document import AnyBlock, Chart, Column, Stat, Table, TableRow, Text, Tone, Trace
from fullstride.report.words import DASH
from fullstride.units import format_bytes, format_count, format_percent, format_seconds

Named = Sequence[tuple[str, Measurement]]
"""Measurements with the name each goes by on the page."""

UNKNOWN = "unknown"

SHARE_WORDS: dict[ShareName, str] = {
    "forward": "forward",
    "backward": "backward",
    "exposed_comm": "exposed communication",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "offload": "offload",
    "host_gap": "host gaps",
    "rest": "rest",
    "unattributed": "unattributed",
}
"""What each share of a step is called, in the order in which they are stacked."""


def name_of(measurement: Measurement) -> str:
    """The label it was measured under, or the start of its plan's hash."""
    labels = {one.label for one in measurement.rounds if one.label}
    return labels.pop() if len(labels) == 1 else measurement.plan_hash[:8]


TOO_WIDE = 10.0
"""An interval whose ends lie further apart than this factor says nothing, and is not printed."""


def interval_words(interval: Interval, places: int = 3) -> str:
    """`1.412 (1.398 to 1.427)`; says so when the ends are not known."""
    if not math.isfinite(interval.value):
        return UNKNOWN
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return f"{interval.value:.{places}f} (interval unknown)"
    if interval.high > TOO_WIDE * abs(interval.low):
        return f"{interval.value:.{places}f} (too few rounds for an interval)"
    return f"{interval.value:.{places}f} ({interval.low:.{places}f} to {interval.high:.{places}f})"


def confidence_words(interval: Interval) -> str:
    """`99 % interval`."""
    return f"{interval.confidence * 100:g} % interval"


def seconds_words(interval: Interval) -> str:
    """`1.52 s (1.51 to 1.53)` in words of time."""
    if not math.isfinite(interval.value):
        return UNKNOWN
    ends = (interval.low, interval.high)
    known = all(math.isfinite(end) for end in ends)
    return format_seconds(interval.value) + (f" ({format_seconds(ends[0])} to {format_seconds(ends[1])})" if known else "")


def percent_words(share: float | None) -> str:
    """A share of one as percent, or `unknown`."""
    return UNKNOWN if share is None or not math.isfinite(share) else format_percent(share)


def bytes_words(amount: int) -> str:
    """Bytes, or `unknown` for none at all."""
    return format_bytes(amount) if amount > 0 else UNKNOWN


def counted_steps(measurement: Measurement) -> tuple[float, ...]:
    """Step times of the rounds that count."""
    return tuple(seconds for one in measurement.rounds if not one.void for seconds in one.step_seconds)


def milliseconds(seconds: float) -> float:
    """For axes in milliseconds."""
    return seconds * 1e3


def step_time_chart(named: Named) -> Chart | None:
    """Step times as distributions; None when nothing was timed."""
    traces = [
        Trace(name=name, x=(), y=tuple(milliseconds(seconds) for seconds in counted_steps(measurement)))
        for name, measurement in named
        if counted_steps(measurement)
    ]
    if not traces:
        return None
    spreads = [f"{name} {format_percent(variation(counted_steps(one)))}" for name, one in named if len(counted_steps(one)) > 1]
    note = f"Standard deviation over mean: {', '.join(spreads)}." if spreads else ""
    voids = sum(bool(one.void) for _, measurement in named for one in measurement.rounds)
    note += f" {voids} void round{'s' if voids > 1 else ''} left out." if voids else ""
    return Chart(title="Step time", form="box", traces=tuple(traces), y_label="ms", horizontal=True, note=note.strip())


def share_chart(named: Named) -> Chart | None:
    """Where the step goes, stacked; None when no step was profiled."""
    profiled = [(name, {share.name: share.seconds for share in one.shares}) for name, one in named if one.shares]
    if not profiled:
        return None
    names = tuple(name for name, _ in profiled)
    traces = [
        Trace(name=word, x=names, y=tuple(milliseconds(shares.get(key, 0.0)) for _, shares in profiled))
        for key, word in SHARE_WORDS.items()
        if any(shares.get(key, 0.0) > 0 for _, shares in profiled)
    ]
    lost = [name for name, shares in profiled if shares.get("unattributed", 0.0) > 0]
    note = f"Part of the step of {', '.join(lost)} could not be attributed." if lost else ""
    return Chart(
        title="Where a step goes", form="stacked", traces=tuple(traces), y_label="ms a step", horizontal=True, note=note
    )


def share_table(named: Named) -> Table | None:
    """The same in figures, with the change when there are two."""
    profiled = [(name, {share.name: share.seconds for share in one.shares}) for name, one in named if one.shares]
    if not profiled:
        return None
    keys = [key for key in SHARE_WORDS if any(shares.get(key, 0.0) for _, shares in profiled)]
    columns = [Column(name="share"), *[Column(name=name, align="right") for name, _ in profiled]]
    rows = []
    for key in keys:
        values = [shares.get(key, 0.0) for _, shares in profiled]
        cells = [SHARE_WORDS[key], *[f"{milliseconds(value):.1f} ms" for value in values]]
        if len(values) == 2:
            cells.append(f"{milliseconds(values[1] - values[0]):+.1f} ms")
        rows.append(TableRow(cells=tuple(cells)))
    if len(profiled) == 2:
        columns.append(Column(name="change", align="right"))
    return Table(title="Shares of the mean step", columns=tuple(columns), rows=tuple(rows))


def health_value(health: Health) -> str:
    """The figure itself."""
    return "not applicable" if health.value is None else format_percent(health.value)


def health_tone(health: Health) -> Tone:
    """Good within the limit, a warning outside it."""
    return "plain" if health.good is None else "good" if health.good else "warn"


def health_table(named: Named) -> Table | None:
    """Health figures of each measurement beside the limits; None when there is none."""
    rows = []
    for name, measurement in named:
        for health in measurement.health:
            bound = "over" if health.name == "communication efficiency" else "under"
            tone = health_tone(health)
            word = DASH if health.good is None else "within" if health.good else "outside"
            cells = (health.name, name, health_value(health), f"{bound} {format_percent(health.limit)}", word)
            rows.append(TableRow(cells=(*cells, str(health.samples), health.note), tone=tone))
    if not rows:
        return None
    rows.sort(key=lambda row: row.cells[0])
    names = ("figure", "plan", "value", "limit", "", "samples", "note")
    rights = {"value", "samples"}
    columns = tuple(Column(name=name, align="right" if name in rights else "left") for name in names)
    return Table(title="Figures against their limits", columns=columns, rows=tuple(rows), note=exposed_note(named))


def exposed_note(named: Named) -> str:
    """Exposed communication in milliseconds, which the efficiency figure must never stand without."""
    known = [(name, one.exposed_comm_seconds) for name, one in named if one.exposed_comm_seconds is not None]
    parts = [f"{name} {milliseconds(seconds):.1f} ms a step" for name, seconds in known]
    return f"Exposed communication: {', '.join(parts)}." if parts else ""


def memory_table(named: Named) -> Table:
    """Memory of each measurement, largest over the ranks."""
    fields = (
        ("held between steps", "static_bytes"),
        ("peak allocated", "peak_allocated_bytes"),
        ("peak reserved", "peak_reserved_bytes"),
        ("device in use", "device_used_bytes"),
        ("host", "host_bytes"),
    )
    columns = (Column(name="memory"), *[Column(name=name, align="right") for name, _ in named])
    rows = [
        TableRow(cells=(word, *[bytes_words(getattr(one.memory, field)) for _, one in named]))
        for word, field in fields
        if any(getattr(one.memory, field) for _, one in named)
    ]
    return Table(title="Memory, largest over the ranks", columns=columns, rows=tuple(rows))


def speed_stats(measurement: Measurement) -> tuple[Stat, ...]:
    """The figures people ask for first."""
    step = measurement.step_seconds
    ends = (
        f"{confidence_words(step)} {format_seconds(step.low)} to {format_seconds(step.high)}"
        if math.isfinite(step.low) and math.isfinite(step.high)
        else "interval unknown"
    )
    mfu = f"attention counted whole; causal: {percent_words(measurement.mfu_causal)}"
    return (
        Stat(label="Step time", value=format_seconds(step.value) if math.isfinite(step.value) else UNKNOWN, note=ends),
        Stat(
            label="Tokens per second",
            value=format_count(measurement.tokens_per_second),
            note=f"{format_count(measurement.tokens_per_step)} tokens a step, {measurement.world_size} ranks",
        ),
        Stat(label="MFU", value=percent_words(measurement.mfu_full), note=mfu)
        if measurement.mfu_full is not None
        else Stat(label="MFU", value=UNKNOWN, note="the peak rate of this device is not known"),
        Stat(
            label="Peak memory",
            value=bytes_words(measurement.memory.peak_allocated_bytes or measurement.memory.peak_reserved_bytes),
            note="allocated" if measurement.memory.peak_allocated_bytes else "resident set",
        ),
    )


def present(blocks: Iterable[AnyBlock | None]) -> list[AnyBlock]:
    """Without the blocks that had nothing to show."""
    return [block for block in blocks if block is not None]


def not_profiled(named: Named) -> Text | None:
    """Says whose steps were not profiled."""
    missing = [name for name, one in named if not one.shares]
    return Text(text=f"No profile was taken of: {', '.join(missing)}.", tone="quiet") if missing else None
