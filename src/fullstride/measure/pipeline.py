"""The timeline of a pipeline as it was measured, in the form in which the simulator gives the planned one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fullstride.events import RunStart, Span, read_events
from fullstride.measure.collect import read_trace
from fullstride.measure.stats import clipped, length
from fullstride.plan.pipeline import plan_schedule
from fullstride.plan.plan import Plan
from fullstride.plan.schedule.action import Action
from fullstride.plan.schedule.text import Schedule
from fullstride.plan.simulate import ActionRun, PipelineTimeline, RankTimeline
from fullstride.plan.stages import pipeline_place
from fullstride.rundir import RunDir

_COMPUTE = ("forward", "backward", "weight_grad")
LEAST_GAP = 0.002
"""Of the span: a shorter stretch between two computations is no wait."""


def pipeline_ranks(plan: Plan) -> tuple[int, ...]:
    """The ranks of the world that are one pipeline, first to last: the one that has rank 0."""
    found: dict[int, int] = {}
    for rank in range(plan.layout.world_size):
        found.setdefault(pipeline_place(plan.layout, rank), rank)
    return tuple(found[place] for place in range(plan.layout.pp))


def measured_timeline(run_dir: RunDir, plan: Plan) -> PipelineTimeline | None:
    """The last profiled step of a run directory, of one pipeline.

    Args:
        run_dir: with traces of all ranks.
        plan: that was profiled, with pp above 1.

    Returns:
        None if no step was profiled on all of the pipeline's ranks.
    """
    spans = {}
    for place, rank in enumerate(pipeline_ranks(plan)):
        path = run_dir.trace(rank)
        offset = _offset(run_dir, rank)
        spans[place] = [_moved(span, offset) for span in read_trace(path)] if path.exists() else []
    steps = [{span.step for span in own if span.phase in _COMPUTE} for own in spans.values()]
    common = set.intersection(*steps) if steps else set()
    if not common:
        return None
    return timeline_of({place: [s for s in own if s.step == max(common)] for place, own in spans.items()}, plan_schedule(plan))


def timeline_of(spans: Mapping[int, Sequence[Span]], schedule: Schedule) -> PipelineTimeline:
    """A timeline from the spans of one step.

    A rank is busy where something of a forward or backward is computed: on a device, the union of its kernels but for those
    of communication, on a host its phases. Idle is the rest from the first forward of any rank to the last backward of any.

    Args:
        spans: of one step, by pipeline rank, all on one clock.
        schedule: what was run.
    """
    computed = {rank: _computed(own) for rank, own in spans.items()}
    first = min(span.start_ns for own in computed.values() for span in own)
    last = max(span.end_ns for own in computed.values() for span in own)
    window = (first, last)
    ranks, runs, waits = [], [], []
    for rank, own in sorted(computed.items()):
        busy = length(clipped(((s.start_ns, s.end_ns) for s in own), window))
        done = _runs(own, schedule, rank, first)
        runs += done
        waits += _waits(done, schedule, rank, LEAST_GAP * (last - first) / 1e9)
        ranks.append(
            RankTimeline(
                rank=rank,
                start=(min(s.start_ns for s in own) - first) / 1e9,
                end=(max(s.end_ns for s in own) - first) / 1e9,
                busy_seconds=busy / 1e9,
                idle_share=1.0 - busy / (last - first),
                peak_bytes=0.0,
                peak_samples=(),
            )
        )
        runs += _optimizer(spans[rank], schedule, rank, first)
    own_span = max(rank.end - rank.start for rank in ranks)
    busy_mean = sum(rank.busy_seconds for rank in ranks) / len(ranks)
    return PipelineTimeline(
        ranks=tuple(ranks),
        span_seconds=(last - first) / 1e9,
        step_seconds=max(run.end for run in runs),
        bubble_share=sum(rank.idle_share for rank in ranks) / len(ranks),
        own_bubble_share=1.0 - busy_mean / own_span,
        runs=tuple(sorted(runs, key=lambda run: (run.action.rank, run.start))),
        waits=tuple(sorted(waits, key=lambda run: (run.action.rank, run.start))),
    )


def _computed(spans: Sequence[Span]) -> list[Span]:
    on_device = any(span.clock == "device" for span in spans)
    clock = "device" if on_device else "host"
    return [s for s in spans if s.phase in _COMPUTE and s.clock == clock and s.kernel != "collective"]


def _runs(spans: Sequence[Span], schedule: Schedule, rank: int, zero: int) -> list[ActionRun]:
    """Each computation of a rank, from the start of its first span to the end of its last."""
    parts: dict[tuple[int, int, str], list[Span]] = defaultdict(list)
    for span in spans:
        parts[span.stage, span.micro_batch, span.phase].append(span)
    found = []
    for action in schedule.actions:
        phase = "backward" if action.kind == "input_grad" else action.kind
        own = parts.get((schedule.placement.stage(rank, action.chunk), action.lo, phase)) if action.rank == rank else None
        if own:
            start, end = min(s.start_ns for s in own), max(s.end_ns for s in own)
            found.append(ActionRun(action=action, start=(start - zero) / 1e9, end=(end - zero) / 1e9))
    return found


def _optimizer(spans: Sequence[Span], schedule: Schedule, rank: int, zero: int) -> list[ActionRun]:
    clock = "device" if any(span.clock == "device" for span in spans) else "host"
    own = [s for s in spans if s.phase == "optimizer" and s.clock == clock and s.kernel != "collective"]
    action = next((a for a in schedule.actions if a.rank == rank and a.kind == "optimizer"), None)
    if not own or action is None:
        return []
    start, end = min(s.start_ns for s in own), max(s.end_ns for s in own)
    return [ActionRun(action=action, start=(start - zero) / 1e9, end=(end - zero) / 1e9)]


def _waits(runs: Sequence[ActionRun], schedule: Schedule, rank: int, least: float) -> list[ActionRun]:
    """The gaps before computations: each waits for the message that it needs, or else for the host."""
    actions = [action for action in schedule.actions if action.rank == rank]
    place = {_key(action): number for number, action in enumerate(actions)}
    found, end = [], 0.0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start - end > least:
            before = actions[place[_key(run.action)] - 1] if place[_key(run.action)] else run.action
            cause = before if before.kind.startswith("recv") else run.action
            found.append(ActionRun(action=cause, start=end, end=run.start))
        end = max(end, run.end)
    return found


def _key(action: Action) -> tuple[str, int, int]:
    return action.kind, action.chunk, action.lo


def _moved(span: Span, offset_ns: int) -> Span:
    if not offset_ns:
        return span
    return Span(
        **{name: getattr(span, name) for name in span.__struct_fields__ if not name.endswith("_ns")},
        time_ns=span.time_ns + offset_ns,
        start_ns=span.start_ns + offset_ns,
        end_ns=span.end_ns + offset_ns,
    )


def _offset(run_dir: RunDir, rank: int) -> int:
    """Nanoseconds to add to a rank's clock to get rank 0's."""
    path = run_dir.events(rank)
    starts = [event for event in read_events(path) if isinstance(event, RunStart)] if path.exists() else []
    return starts[-1].offset_ns if starts else 0
