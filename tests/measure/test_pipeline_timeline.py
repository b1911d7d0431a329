"""The measured timeline of a pipeline: spans of actions, idle shares, and the reason of each gap."""

import gzip

import msgspec
import pytest

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.events import Span
from fullstride.measure.pipeline import measured_timeline, pipeline_ranks, timeline_of
from fullstride.measure.pipeline_page import PERFETTO, pipeline_blocks, write_perfetto
from fullstride.model.source import load_spec
from fullstride.plan.pipeline import plan_schedule
from fullstride.plan.plan import Batch, Layout, ModelRef, Pipeline, Plan, Workload
from fullstride.plan.simulate import simulate, uniform_durations
from fullstride.report.document import Timeline
from fullstride.rundir import RunDir

MS = 1_000_000


def plan_of(schedule="1f1b", **layout):
    return Plan(
        model=ModelRef(source="tiny"),
        workload=Workload(sequence_length=64, samples_per_step=4 * layout.get("dp_shard", 1)),
        layout=Layout(pp=2, **layout),
        pipeline=Pipeline(schedule=schedule),
        batch=Batch(accumulation=4),
    )


def spans_of(timeline, schedule, step=3):
    """Spans as a worker writes them, from a simulated timeline of milliseconds."""
    found = {}
    for run in timeline.runs:
        if run.action.kind not in ("forward", "backward", "input_grad", "weight_grad"):
            continue
        stage = schedule.placement.stage(run.action.rank, run.action.chunk)
        phase = "backward" if run.action.kind == "input_grad" else run.action.kind
        start, end = round(run.start * MS), round(run.end * MS)
        span = Span(time_ns=end, step=step, phase=phase, start_ns=start, end_ns=end, micro_batch=run.action.lo, stage=stage)
        found.setdefault(run.action.rank, []).append(span)
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_measured_timeline_says_what_the_simulator_said_of_the_same_times(schedule):
    lists = plan_schedule(plan_of(schedule))
    planned = simulate(lists.actions, uniform_durations(2), lists.placement, record=True)
    found = timeline_of(spans_of(planned, lists), lists)
    assert found.bubble_share == pytest.approx(planned.bubble_share)
    assert found.span_seconds == pytest.approx(planned.span_seconds / 1000)
    computed = [run.action for run in planned.runs if run.action.kind in ("forward", "backward", "input_grad", "weight_grad")]
    assert sorted(run.action.text() for run in found.runs) == sorted(action.text() for action in computed)
    told = {(wait.action.text(), round(wait.end - wait.start, 9)) for wait in planned.waits}
    assert {(wait.action.text(), round((wait.end - wait.start) * 1000, 9)) for wait in found.waits} == told


def test_a_gap_without_a_message_waits_for_the_host():
    lists = plan_schedule(plan_of())
    spans = spans_of(simulate(lists.actions, uniform_durations(2), lists.placement, record=True), lists)
    late = [msgspec.structs.replace(s, start_ns=s.start_ns + 9 * MS, end_ns=s.end_ns + 9 * MS) for s in spans[0]]
    spans[0] = [*spans[0][:1], *late[1:]]  # the second forward of rank 0, which needs nobody
    waits = [wait.action for wait in timeline_of(spans, lists).waits if wait.action.rank == 0]
    assert (waits[0].kind, waits[0].lo) == ("forward", 1)


def test_communication_and_the_other_clock_are_no_computation():
    lists = plan_schedule(plan_of())
    spans = spans_of(simulate(lists.actions, uniform_durations(2), lists.placement, record=True), lists)
    kernels = {r: [msgspec.structs.replace(s, clock="device", kernel="matmul") for s in own] for r, own in spans.items()}
    wanted = timeline_of(kernels, lists).bubble_share
    noise = {
        r: [msgspec.structs.replace(s, start_ns=0, end_ns=99 * MS, kernel="collective") for s in own]
        for r, own in kernels.items()
    }
    assert timeline_of({r: own + noise[r] + spans[r] for r, own in kernels.items()}, lists).bubble_share == wanted


def test_ranks_of_one_pipeline_follow_the_layout():
    assert pipeline_ranks(plan_of(dp_shard=3)) == (0, 3)
    assert pipeline_ranks(plan_of(dp_shard=3, order=("dp_replicate", "dp_shard", "cp", "tp", "pp"))) == (0, 1)


def test_a_run_directory_gives_page_and_perfetto_file(tmp_path):
    plan, run_dir = plan_of(), RunDir(root=str(tmp_path))
    spec, cluster = load_spec("tiny"), assumed_cluster(num_devices=2)
    assert measured_timeline(run_dir, plan) is None
    assert "No step was profiled" in str(pipeline_blocks(run_dir, plan, spec, cluster))
    assert not write_perfetto(run_dir, plan, spec, cluster)
    lists = plan_schedule(plan)
    (tmp_path / "trace").mkdir()
    for rank, own in spans_of(simulate(lists.actions, uniform_durations(2), lists.placement, record=True), lists).items():
        run_dir.trace(rank).write_bytes(gzip.compress(b"".join(msgspec.json.encode(span) + b"\n" for span in own)))
    blocks = pipeline_blocks(run_dir, plan, spec, cluster)
    assert [block.title for block in blocks if isinstance(block, Timeline)] == ["Planned", "Measured"]
    assert write_perfetto(run_dir, plan, spec, cluster)
    names = {
        e["args"]["name"]
        for e in msgspec.json.decode((tmp_path / PERFETTO).read_bytes())["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    }
    assert {"rank 0 measured", "rank 1 planned"} <= names
