import gzip
import json

import msgspec
import pytest

from fullstride.errors import BadInput
from fullstride.events import EventWriter, Memory, Span, StepEnd
from fullstride.measure.collect import (
    Flops,
    attribution_of,
    events_of_order,
    measurement_of,
    read_trace,
    read_versions,
    step_interval,
    step_seconds,
)
from fullstride.measure.compare import compare_files, compare_rounds, noise_of
from fullstride.measure.measurement import MemoryUse, Round
from fullstride.rundir import RunDir

USE = MemoryUse(peak_allocated_bytes=10, peak_reserved_bytes=12, static_bytes=8)
BILLION = 10**9


def write_steps(run_dir, rank, order, ends, start=0):
    writer = EventWriter(run_dir.events(rank))
    for number, end in enumerate(ends):
        writer.write(
            StepEnd(
                time_ns=end, step=number, start_ns=start, samples=8, tokens=8, loss=2.0, grad_norm=1.0, lr=1e-3, order=order
            )
        )
        writer.write(
            Memory(time_ns=end, step=number, allocated_bytes=1, reserved_bytes=100 + rank, peak_allocated_bytes=1,
                   peak_reserved_bytes=1, device_used_bytes=200 + rank, host_bytes=300)
        )  # fmt: skip
        start = end
    writer.close()


def test_step_time_is_that_of_the_slowest_rank(tmp_path):
    run_dir = RunDir(root=str(tmp_path))
    write_steps(run_dir, 0, "a/1", [BILLION, 2 * BILLION])
    write_steps(run_dir, 1, "a/1", [2 * BILLION, 3 * BILLION])
    write_steps(run_dir, 1, "b/2", [9 * BILLION], start=8 * BILLION)
    events = events_of_order(run_dir, "a/1", 3)
    assert step_seconds(events) == (2.0, 1.0)
    assert events.reserved_bytes == {0: (100, 100), 1: (101, 101)}
    assert events.device_used_bytes == 201
    assert step_seconds(events_of_order(run_dir, "nobody", 2)) == ()


def test_attribution_reads_the_slowest_ranks_trace(tmp_path):
    run_dir = RunDir(root=str(tmp_path))
    write_steps(run_dir, 0, "p", [100])
    assert attribution_of(run_dir, "p", 1) == ()
    trace = run_dir.trace(0)
    trace.parent.mkdir()
    spans = [Span(time_ns=60, step=0, phase="forward", start_ns=0, end_ns=60, clock="device")]
    raw = b"".join(msgspec.json.encode(s) + b"\n" for s in spans)
    trace.write_bytes(gzip.compress(raw))
    assert [(s.name, s.seconds) for s in attribution_of(run_dir, "p", 1)] == [("forward", 6e-8), ("rest", 4e-8)]
    trace.write_bytes(gzip.compress(raw * 50)[:-9])
    assert len(read_trace(trace)) > 0, "what stands before the damage is read"
    assert attribution_of(run_dir, "other", 1) == ()


def test_attribution_of_a_pipeline_is_that_of_the_rank_that_computes_most(tmp_path):
    run_dir = RunDir(root=str(tmp_path))
    for rank, (end, computed) in enumerate([(100, 60), (101, 20), (100, 90)]):
        write_steps(run_dir, rank, "p", [end])
        span = Span(time_ns=computed, step=0, phase="backward", start_ns=0, end_ns=computed, clock="device")
        run_dir.trace(rank).parent.mkdir(exist_ok=True)
        run_dir.trace(rank).write_bytes(gzip.compress(msgspec.json.encode(span) + b"\n"))
    assert attribution_of(run_dir, "p", 3)[0].seconds == 2e-8, "the slowest"
    assert attribution_of(run_dir, "p", 3, pipeline=(0, 1))[0].seconds == 6e-8
    assert attribution_of(run_dir, "p", 3, pipeline=(0, 1, 2))[0].seconds == 9e-8
    run_dir.trace(2).unlink()
    assert attribution_of(run_dir, "p", 3, pipeline=(0, 1, 2))[0].seconds == 6e-8
    assert attribution_of(run_dir, "p", 3, pipeline=(7,))[0].seconds == 2e-8, "a rank that wrote nothing is none"


def some_rounds(label, times, first=0):
    return [Round(index=first + 2 * i, label=label, step_seconds=(t,) * 3) for i, t in enumerate(times)]


def measured(plan, cluster, times, label="baseline", first=0, **more):
    return measurement_of(
        plan=plan, cluster=cluster, rounds=some_rounds(label, times, first), memory=USE, warmup_steps=2, form="short",
        started="2026-01-01T00:00:00+00:00", **more,
    )  # fmt: skip


def test_a_measurement(plan, cluster):
    value = measured(plan, cluster, [1.0, 1.0, 4.0], flops=Flops(full=2e9, causal=1e9))
    assert value.step_seconds.value == 1.0, "the slowest and the fastest round are dropped"
    assert value.step_seconds.high > 4.0, "but not from the interval"
    assert value.tokens_per_second == 800
    assert value.mfu_full == pytest.approx(2e9 * 800 / 2e12)
    assert value.mfu_causal == pytest.approx(value.mfu_full / 2)
    assert [h.name for h in value.health] == ["throughput stability", "memory volatility", "communication efficiency"]
    assert value.exposed_comm_seconds is None


def test_no_peak_no_mfu(plan, cluster):
    bf16 = msgspec.structs.replace(plan, precision=msgspec.structs.replace(plan.precision, cast="autocast", block="bf16"))
    assert measured(bf16, cluster, [1.0], flops=Flops(full=1.0, causal=1.0)).mfu_full is None


def test_void_rounds_alone_are_no_measurement():
    with pytest.raises(BadInput, match="no round"):
        step_interval([Round(index=0, label="a", step_seconds=(1.0,), void="nan")], "short")


def test_versions(tmp_path):
    run_dir = RunDir(root=str(tmp_path))
    assert read_versions(run_dir) == {}
    run_dir.versions.write_text(json.dumps({"torch": "2.13"}))
    assert read_versions(run_dir) == {"torch": "2.13"}


def test_compare_rounds(plan, cluster):
    base = measured(plan, cluster, [1.0, 1.001, 1.0])
    other = measured(plan, cluster, [0.9, 0.901, 0.9], "candidate", 1)
    comparison = compare_rounds(base, other)
    assert comparison.verdict == "better"
    assert comparison.interleaved
    assert comparison.alternations == 3
    assert comparison.ratio.value == pytest.approx(1 / 0.9, rel=1e-3)
    assert compare_rounds(other, base).verdict == "worse"
    assert 0 < noise_of(comparison) < 0.01
    assert compare_rounds(base, other, verdict="void", reasons=["nan"]).reasons == ("nan",)


def test_two_files_are_never_called_better(plan, cluster):
    comparison = compare_files(measured(plan, cluster, [1.0] * 3), measured(plan, cluster, [0.5] * 3))
    assert comparison.verdict == "undetermined"
    assert not comparison.interleaved
    assert comparison.ratio.value == pytest.approx(2.0)
    assert "not interleaved" in comparison.reasons[0]


def test_different_work_is_refused(plan, cluster):
    other = msgspec.structs.replace(plan, workload=msgspec.structs.replace(plan.workload, sequence_length=50))
    for compare in (compare_files, compare_rounds):
        with pytest.raises(BadInput, match="different work"):
            compare(measured(plan, cluster, [1.0]), measured(other, cluster, [1.0]))
