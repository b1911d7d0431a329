"""A simulated pipeline as a Document: the picture, idle shares, memory over time, and what the ranks wait for.

`report.perfetto.trace_json(timeline_block(...))` and `report.html.html_of(timeline_document(...))` make files of it.
"""

from __future__ import annotations

from typing import NamedTuple

from fullstride.plan.schedule.action import Action, ActionKind
from fullstride.plan.simulate import ActionRun, PipelineTimeline, RankTimeline
from fullstride.report.document import (
    AnyBlock,
    Bar,
    Chart,
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
from fullstride.units import format_bytes, format_percent, format_seconds

WORDS: dict[ActionKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input_grad": "input gradient",
    "weight_grad": "weight gradient",
    "send_forward": "send",
    "send_backward": "send",
    "reduce": "reduce",
    "optimizer": "optimizer",
}
WAIT = "wait"
_COMPUTE = ("forward", "backward", "input_grad", "weight_grad", "optimizer")
_MOST_BARS = 4000
"""A picture with more cannot be read, and takes long to open."""
_MOST_WAITS = 10
_MOST_LINES = 16


def timeline_document(
    timeline: PipelineTimeline, *, title: str, subtitle: str = "simulated, not measured", most_bars: int = _MOST_BARS
) -> Document:
    """Everything about a simulated step.

    Args:
        timeline: simulated with `record=True`.
        title: of the page.
        subtitle: under it.
        most_bars: bars of the picture; a longer step is cut, and the picture says where.
    """
    return Document(title=title, subtitle=subtitle, blocks=timeline_blocks(timeline, most_bars=most_bars))


def timeline_blocks(
    timeline: PipelineTimeline, *, title: str = "Pipeline", most_bars: int = _MOST_BARS
) -> tuple[AnyBlock, ...]:
    """The parts of `timeline_document`, for a page that shows more; `title`: of the picture."""
    picture = timeline_block(timeline, title=title, most_bars=most_bars)
    return (_figures(timeline), picture, _ranks(timeline), *_waits(timeline), *_memory(timeline))


def timeline_block(timeline: PipelineTimeline, *, title: str = "Pipeline", most_bars: int = 0) -> Timeline:
    """The picture: a lane a rank with what it waits for between computations, and one below it for its messages and reduces.

    Args:
        timeline: simulated with `record=True`.
        title: of the picture.
        most_bars: bars from the start on; 0 for all.
    """
    bars = [*map(_bar, timeline.runs), *(_gap_bar(gap) for gap in _gaps(timeline))]
    note = ""
    if most_bars and len(bars) > most_bars:
        end = sorted(bar.start for bar in bars)[most_bars]
        bars = [bar for bar in bars if bar.start < end]
        note = f"The first {format_seconds(end)} of {format_seconds(timeline.step_seconds)}."
    kinds = [*WORDS.values(), WAIT]
    bars.sort(key=lambda bar: (_lane_place(bar.lane), bar.start, kinds.index(bar.kind)))
    return Timeline(title=title, bars=tuple(bars), note=note, quiet=WAIT)


def _lane_place(lane: str) -> tuple[int, bool]:
    return int(lane.split()[1]), "messages" in lane


def _bar(run: ActionRun) -> Bar:
    lane = f"rank {run.action.rank}{'' if run.action.kind in _COMPUTE else ' messages'}"
    return Bar(lane=lane, name=action_words(run.action), kind=WORDS[run.action.kind], start=run.start, end=run.end)


class _Gap(NamedTuple):
    """A stretch in which a rank computes nothing, and why."""

    rank: int
    start: float
    end: float
    reason: str


def _gaps(timeline: PipelineTimeline) -> list[_Gap]:
    """All stretches between the first forward of any rank and the last backward of any, but for what is rounding."""
    last = max(rank.end for rank in timeline.ranks)
    late = ", ".join(str(rank.rank) for rank in timeline.ranks if rank.end == last)
    found = [_Gap(wait.action.rank, wait.start, wait.end, _reason(wait.action)) for wait in timeline.waits]
    if timeline.runs:
        rest = f"nothing: its last backward is done, that of rank {late} is not"
        found += [_Gap(rank.rank, rank.end, last, rest) for rank in timeline.ranks]
    least = 1e-6 * timeline.step_seconds
    return [gap for gap in found if gap.end - gap.start > least]


def _gap_bar(gap: _Gap) -> Bar:
    return Bar(lane=f"rank {gap.rank}", name=f"waits for {gap.reason}", kind=WAIT, start=gap.start, end=gap.end)


def action_words(action: Action) -> str:
    """`forward of samples 0 to 1, chunk 0`."""
    if action.kind == "optimizer":
        return "optimizer"
    if action.kind == "reduce":
        return f"reduce of chunk {action.chunk}"
    peer = f" to rank {action.peer}" if action.kind.startswith("send") else ""
    what = action.kind.replace("_", " ").replace("grad", "gradient")
    return f"{what} of {_samples(action)}, chunk {action.chunk}{peer}"


def _samples(action: Action) -> str:
    last = action.hi - 1
    return f"sample {last}" if last == action.lo else f"samples {action.lo} to {last}"


def _figures(timeline: PipelineTimeline) -> Stats:
    worst = max(timeline.ranks, key=lambda rank: rank.idle_share)
    items = [
        Stat(label="step", value=format_seconds(timeline.step_seconds), note="with reduces and optimizer"),
        Stat(
            label="bubble",
            value=format_percent(timeline.bubble_share),
            note="of first forward to last backward, mean over ranks",
        ),
        Stat(label="most idle", value=format_percent(worst.idle_share), note=f"rank {worst.rank}"),
    ]
    if timeline.peak_bytes > 0:
        fullest = max(timeline.ranks, key=lambda rank: rank.peak_bytes)
        items.append(Stat(label="peak", value=format_bytes(round(fullest.peak_bytes)), note=f"rank {fullest.rank}"))
    return Stats(items=tuple(items))


def _ranks(timeline: PipelineTimeline) -> Table:
    names = ("rank", "busy", "idle", "begins", "ends", "samples alive at most", "peak")
    return Table(
        title="Ranks",
        columns=tuple(Column(name=name, align="left" if name == "rank" else "right") for name in names),
        rows=tuple(TableRow(cells=_rank_cells(rank)) for rank in timeline.ranks),
        note="Samples alive are given by chunk, from forward until the weights' gradients are made.",
    )


def _rank_cells(rank: RankTimeline) -> tuple[str, ...]:
    times = (format_seconds(rank.busy_seconds), format_percent(rank.idle_share), *map(format_seconds, (rank.start, rank.end)))
    alive = " + ".join(str(count) for count in rank.peak_samples) or "-"
    return (str(rank.rank), *times, alive, format_bytes(round(rank.peak_bytes)) if rank.peak_bytes else "-")


def _waits(timeline: PipelineTimeline) -> tuple[AnyBlock, ...]:
    gaps = _gaps(timeline)
    if not gaps:
        return ()
    longest = sorted(gaps, key=lambda gap: gap.start - gap.end)[:_MOST_WAITS]
    rows = [
        TableRow(cells=(str(gap.rank), format_seconds(gap.end - gap.start), format_seconds(gap.start), gap.reason))
        for gap in longest
    ]
    total = sum(gap.end - gap.start for gap in gaps)
    told = f"{len(gaps)} waits, {format_seconds(total / len(timeline.ranks))} a rank on average; the longest:"
    names = ("rank", "waits", "from", "for")
    columns = tuple(Column(name=name, align="right" if name in ("waits", "from") else "left") for name in names)
    return Heading(text="What ranks wait for"), Text(text=told), Table(columns=columns, rows=tuple(rows))


def _reason(action: Action) -> str:
    if not action.kind.startswith("recv"):
        return f"the host to launch the {action_words(action)}"
    what = "activations" if action.kind == "recv_forward" else "gradients"
    return f"{what} of {_samples(action)} for chunk {action.chunk}, from rank {action.peer}"


def _memory(timeline: PipelineTimeline) -> tuple[AnyBlock, ...]:
    shown = [rank for rank in timeline.ranks if len(rank.memory) > 1][:_MOST_LINES]
    if not shown or timeline.peak_bytes <= 0:
        return ()
    note = "" if len(shown) == len(timeline.ranks) else f"The first {len(shown)} of {len(timeline.ranks)} ranks."
    chart = Chart(
        title="Memory over the step",
        form="line",
        traces=tuple(_memory_trace(rank) for rank in shown),
        x_label="seconds",
        y_label="GiB",
        note=note,
    )
    return (chart,)


def _memory_trace(rank: RankTimeline) -> Trace:
    """Memory as steps: each point twice, with the bytes before and after."""
    times: list[float] = []
    sizes: list[float] = []
    for time, size in rank.memory:
        if sizes:
            times.append(time)
            sizes.append(sizes[-1])
        times.append(time)
        sizes.append(size / 2**30)
    return Trace(name=f"rank {rank.rank}", x=tuple(times), y=tuple(sizes))
