"""A training run as a page, read from what its ranks wrote down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fullstride.errors import BadInput
from fullstride.events import AnyEvent, Memory, RunEnd, RunStart, Span, StepEnd, read_events
from fullstride.files import Value, read_json
from fullstride.measure.blocks import health_tone
from fullstride.measure.health import memory_volatility, throughput_stability
from fullstride.measure.measurement import Health
from fullstride.report.document import (
    AnyBlock,
    Bar,
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
    Timeline,
    Trace,
)
from fullstride.report.words import finite
from fullstride.rundir import Failure, RunDir
from fullstride.units import format_bytes, format_count, format_percent, format_seconds

MOST_POINTS = 800
"""A longer line is drawn as means of equal stretches."""
_MOST_RANKS = 8
_WARM_STEPS = 10


class RankEvents(Value, frozen=True, kw_only=True):
    """What one rank wrote."""

    rank: int
    starts: tuple[RunStart, ...]
    steps: tuple[StepEnd, ...]
    """Each step once: where a resumed run took it again, the last time."""
    memory: tuple[Memory, ...]
    spans: tuple[Span, ...]
    end: RunEnd | None
    """The last event, if the run ended in words."""


def read_ranks(run_dir: RunDir) -> tuple[RankEvents, ...]:
    """Events of all ranks.

    Raises:
        BadInput: the folder holds no events, or a file of them is damaged.
    """
    paths = sorted((run_dir.path / "events").glob("rank*.jsonl"))
    if not paths:
        raise BadInput(f"{run_dir.root}: holds no events of a run", fix="give the folder that `train` or `tune` wrote")
    return tuple(_one_rank(path) for path in paths)


def _one_rank(path: Path) -> RankEvents:
    starts: list[RunStart] = []
    steps: dict[int, StepEnd] = {}
    memory: list[Memory] = []
    spans: list[Span] = []
    last: AnyEvent | None = None
    for event in read_events(path):
        last = event
        if isinstance(event, RunStart):
            starts.append(event)
        elif isinstance(event, StepEnd):
            steps[event.step] = event
        elif isinstance(event, Memory):
            memory.append(event)
        elif isinstance(event, Span):
            # Only the last step that has spans is drawn: a long run's file holds millions.
            if spans and spans[-1].step != event.step:
                spans.clear()
            spans.append(event)
    return RankEvents(
        rank=int(path.stem.removeprefix("rank")),
        starts=tuple(starts),
        steps=tuple(steps[step] for step in sorted(steps)),
        memory=tuple(memory),
        spans=tuple(spans),
        end=last if isinstance(last, RunEnd) else None,
    )


def training_document(run_dir: RunDir) -> Document:
    """The page of a training run: loss, step times, memory, health, how it ended.

    Raises:
        BadInput: no events, or damaged ones.
    """
    ranks = read_ranks(run_dir)
    first = ranks[0]
    blocks: list[AnyBlock] = [_ending(run_dir, first), Stats(items=_stats(first, ranks))]
    command = run_dir.command.read_text() if run_dir.command.is_file() else ""
    if command:
        blocks.append(Code(text=command.strip(), title="the command that was started", language="shell"))
    if first.steps:
        blocks += _curves(first)
    if any(rank.memory for rank in ranks):
        blocks += [Heading(text="Memory"), _memory(ranks)]
    blocks += [Heading(text="Health"), _health(ranks)]
    timeline = step_timeline(ranks)
    if timeline:
        blocks += [Heading(text="A step"), timeline]
    if first.starts:
        blocks += [Heading(text="Starts"), _starts(first)]
    return Document(title=_headline(first), subtitle=str(run_dir.path), blocks=tuple(blocks))


def _headline(first: RankEvents) -> str:
    name = first.starts[-1].label if first.starts else ""
    if not first.steps:
        return f"{name or 'The run'}: no step was finished"
    last = first.steps[-1]
    return f"{name or 'Training'}: {last.step + 1} steps, loss {_loss_words(last.loss)}"


def _loss_words(loss: float) -> str:
    return f"{loss:.4f}" if math.isfinite(loss) else "not finite"


def _ending(run_dir: RunDir, first: RankEvents) -> Text:
    if run_dir.failed.is_file():
        failure = read_json(run_dir.failed, Failure)
        where = f" on rank {failure.rank}" if failure.rank >= 0 else ""
        fix = f"\n{failure.fix}" if failure.fix else ""
        return Text(text=f"Failed{where}: {failure.failure.replace('_', ' ')}: {failure.message}{fix}", tone="bad")
    if run_dir.done.exists():
        return Text(text="The run came to its end.", tone="good")
    if first.end:
        note = f": {first.end.note}" if first.end.note else ""
        return Text(text=f"The run was ended early ({first.end.cause}){note}.", tone="warn")
    return Text(text="The run is still going, or was killed: it left no word of its end.", tone="warn")


def _durations(steps: Sequence[StepEnd]) -> list[float]:
    return [(step.time_ns - step.start_ns) / 1e9 for step in steps]


def _warm(steps: Sequence[StepEnd]) -> Sequence[StepEnd]:
    """Without the first steps, which warm up, where enough follow."""
    return steps[_WARM_STEPS:] if len(steps) > 2 * _WARM_STEPS else steps


def _stats(first: RankEvents, ranks: Sequence[RankEvents]) -> tuple[Stat, ...]:
    items: list[Stat] = []
    if first.steps:
        warm = _warm(first.steps)
        mean = sum(_durations(warm)) / len(warm)
        tokens = sum(step.tokens for step in warm) / max(sum(_durations(warm)), 1e-9)
        skipped = sum(step.skipped for step in first.steps)
        losses = finite(step.loss for step in first.steps)
        bad = len(first.steps) - len(losses)
        loss_note = f"{losses[0]:.4f} at the start" if losses else "no finite loss"
        loss_note += f"; {bad} steps not finite" if bad else ""
        items.append(
            Stat(label="Loss", value=_loss_words(first.steps[-1].loss), note=loss_note, tone="bad" if bad else "plain")
        )
        items.append(Stat(label="Mean step", value=format_seconds(mean), note=f"over {len(warm)} steps"))
        items.append(Stat(label="Tokens per second", value=format_count(tokens), note="that counted towards the loss"))
        if skipped:
            items.append(Stat(label="Skipped steps", value=str(skipped), note="by the loss scaler", tone="warn"))
    peak = max((one.peak_allocated_bytes or one.peak_reserved_bytes for rank in ranks for one in rank.memory), default=0)
    items.append(Stat(label="Peak memory", value=format_bytes(peak) if peak else "unknown", note="largest over the ranks"))
    items.append(Stat(label="Ranks", value=str(len(ranks)), note=first.starts[-1].host if first.starts else ""))
    return tuple(items)


def _thinned(name: str, xs: Sequence[float], ys: Sequence[float]) -> tuple[Trace, int]:
    width = -(-len(xs) // MOST_POINTS) or 1
    if width == 1:
        return Trace(name=name, x=tuple(xs), y=tuple(ys)), 1
    cuts = range(0, len(xs), width)
    means = [sum(part) / len(part) if part else None for part in (finite(ys[cut : cut + width]) for cut in cuts)]
    return Trace(name=name, x=tuple(xs[cut] for cut in cuts), y=tuple(means)), width


def _curves(first: RankEvents) -> list[AnyBlock]:
    xs = [float(step.step) for step in first.steps]
    curves = (
        ("Loss", "mean per token", [step.loss for step in first.steps]),
        ("Gradient norm", "before clipping", [step.grad_norm for step in first.steps]),
        ("Learning rate", "", [step.lr for step in first.steps]),
        ("Step time", "seconds", _durations(first.steps)),
    )
    blocks: list[AnyBlock] = [Heading(text="Learning")]
    for title, label, ys in curves:
        trace, width = _thinned(title.lower(), xs, ys)
        notes = [f"Each point is the mean of {width} steps."] if width > 1 else []
        lost = len(ys) - len(finite(ys))
        notes += [f"{lost} values are not finite and are left out."] if lost else []
        if title == "Step time":
            blocks.append(Heading(text="Speed"))
        form = Chart(title=title, form="line", traces=(trace,), x_label="step", y_label=label, note=" ".join(notes))
        blocks.append(form)
    return blocks


def _memory(ranks: Sequence[RankEvents]) -> Chart:
    known = [rank for rank in ranks if rank.memory]
    fullest = max(known, key=lambda rank: max(one.peak_reserved_bytes for one in rank.memory))
    xs = [float(one.step) for one in fullest.memory]
    lines = (
        ("allocated", [one.allocated_bytes / 2**30 for one in fullest.memory]),
        ("reserved", [one.reserved_bytes / 2**30 for one in fullest.memory]),
        ("device in use", [one.device_used_bytes / 2**30 for one in fullest.memory]),
    )
    traces = tuple(_thinned(name, xs, ys)[0] for name, ys in lines if any(ys))
    title = f"Memory of rank {fullest.rank}, the fullest"
    return Chart(title=title, form="line", traces=traces, x_label="step", y_label="GiB")


def _health(ranks: Sequence[RankEvents]) -> Table:
    reserved = {rank.rank: [one.reserved_bytes for one in rank.memory[1:]] for rank in ranks}
    on_host = not any(one.device_used_bytes for rank in ranks for one in rank.memory)
    figures = (throughput_stability(_durations(_warm(ranks[0].steps))), memory_volatility(reserved, on_host=on_host))
    names = ("figure", "value", "limit", "samples", "note")
    columns = tuple(Column(name=name, align="right" if name in ("value", "samples") else "left") for name in names)
    return Table(columns=columns, rows=tuple(_health_row(figure) for figure in figures))


def _health_row(health: Health) -> TableRow:
    value = "unknown" if health.value is None else format_percent(health.value)
    cells = (health.name, value, f"under {format_percent(health.limit)}", str(health.samples), health.note)
    return TableRow(cells=cells, tone=health_tone(health))


def _starts(first: RankEvents) -> Table:
    names = ("label", "first step", "ranks", "host", "build", "plan hash")
    columns = tuple(Column(name=name, align="right" if name in ("first step", "ranks", "build") else "left") for name in names)
    rows = tuple(
        TableRow(
            cells=(
                start.label,
                str(start.first_step),
                str(start.world_size),
                start.host,
                format_seconds(start.build_seconds),
                start.plan_hash,
            )
        )
        for start in first.starts
    )
    note = "The run was started again where it had stopped." if len(rows) > 1 else ""
    return Table(columns=columns, rows=rows, note=note)


def step_timeline(ranks: Sequence[RankEvents]) -> Timeline | None:
    """The last step that has spans, ranks laid over each other by their clock offsets; None when there is none."""
    known = [rank for rank in ranks if rank.spans][:_MOST_RANKS]
    if not known:
        return None
    last = max(rank.spans[-1].step for rank in known)
    placed = [
        (rank, span, rank.starts[-1].offset_ns if rank.starts else 0)
        for rank in known
        for span in rank.spans
        if span.step == last
    ]
    zero = min(span.start_ns + offset for _, span, offset in placed)
    bars = [
        Bar(
            lane=f"rank {rank.rank}" + (f", {span.clock} {span.stream}" if span.clock == "device" else ""),
            name=f"{span.phase}{f' {span.kernel}' if span.kernel else ''}, micro-batch {span.micro_batch}",
            kind=span.phase,
            start=(span.start_ns + offset - zero) / 1e9,
            end=(span.end_ns + offset - zero) / 1e9,
        )
        for rank, span, offset in placed
    ]
    return Timeline(title=f"Step {last}", bars=tuple(bars))
