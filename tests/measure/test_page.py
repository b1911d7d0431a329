"""Pages of measurements, comparisons and training runs."""

import math

import pytest

from fullstride.errors import BadInput
from fullstride.events import EventWriter, Memory, RunEnd, RunStart, Span, StepEnd
from fullstride.files import write_json
from fullstride.measure.measurement import Comparison, Health, Interval, Measurement, MemoryUse, Round, Share
from fullstride.measure.page import comparison_document, measurement_document, training_document
from fullstride.measure.training_page import MOST_POINTS
from fullstride.report.document import Chart, Stats, Timeline
from fullstride.report.html import html_of
from fullstride.report.terminal import text_of
from fullstride.rundir import Failure, RunDir


def interval(value, half=0.01):
    return Interval(value=value, low=value - half, high=value + half, confidence=0.99)


def measurement(label, seconds, **more):
    rounds = (
        Round(index=0, label=label, step_seconds=(seconds, seconds * 1.01, seconds * 0.99)),
        Round(index=2, label=label, step_seconds=(9.0,), void="loss not finite"),
    )
    given = {
        "shares": (Share(name="forward", seconds=seconds * 0.4), Share(name="exposed_comm", seconds=seconds * 0.6)),
        "health": (
            Health(name="throughput stability", value=0.01, limit=0.05, good=True, samples=3, note="needs 1,000 steps"),
            Health(name="communication efficiency", value=None, limit=0.75, good=None, samples=0, note="one rank"),
        ),
    }
    given |= {"exposed_comm_seconds": seconds * 0.6} | more
    return Measurement(
        plan_hash=f"{label:0<16}",
        work_hash="w" * 16,
        cluster="c",
        device="cpu",
        versions={"torch": "2.11"},
        form="short",
        started="2026-01-01T00:00:00+00:00",
        world_size=2,
        warmup_steps=3,
        rounds=rounds,
        step_seconds=interval(seconds),
        samples_per_step=8,
        tokens_per_step=4096,
        tokens_per_second=4096 / seconds,
        memory=MemoryUse(peak_allocated_bytes=0, peak_reserved_bytes=2**30, static_bytes=2**29),
        **given,
    )


def comparison(verdict="better", interleaved=True, **more):
    given = {"base": measurement("baseline", 1.0), "other": measurement("candidate", 0.8)} | more
    return Comparison(
        ratio=interval(1.25, 0.02),
        interleaved=interleaved,
        alternations=3 if interleaved else 0,
        threshold=1.005,
        verdict=verdict,
        reasons=("because",),
        **given,
    )


def test_a_measurement_shows_its_figures():
    text = text_of(measurement_document(measurement("baseline", 0.5)), 110)
    for expected in (
        "8.19 k tokens per second",
        "500 ms",
        "not applicable",
        "one rank",
        "loss not finite",
        "peak rate of this",
    ):
        assert expected in text, expected
    assert "300.0 ms a step" in text, "exposed communication beside the efficiency"
    assert "9.0" not in text.split("Shares")[0].split("middle half")[1][:40], "void rounds are no part of the distribution"


def test_recompilations_are_said_aloud():
    assert "3 recompilations" in text_of(measurement_document(measurement("a", 1.0, recompiles=3)))


@pytest.mark.parametrize("verdict", ["better", "worse", "no difference", "undetermined", "void"])
def test_a_comparison_says_its_verdict(verdict):
    document = comparison_document(comparison(verdict))
    text = text_of(document, 100)
    assert verdict in text
    assert "1.250 (1.230 to 1.270)" in text
    assert ("1.25 times as fast" in document.title) == (verdict in {"better", "worse"})
    assert html_of(document)


def test_two_files_apart_are_never_called_better():
    document = comparison_document(comparison(interleaved=False))
    text = text_of(document, 100)
    assert "not interleaved" in document.title
    assert "better" not in text
    assert "no verdict" in text


def test_equal_names_are_told_apart():
    same = measurement("baseline", 1.0)
    title = comparison_document(comparison(base=same, other=same)).title
    assert "baseline (second)" in title
    assert "baseline (first)" in title


def test_no_profile_and_no_health_are_said():
    bare = measurement("bare", 1.0, shares=(), health=(), exposed_comm_seconds=None)
    text = text_of(measurement_document(bare))
    assert "No profile was taken of: bare" in text
    assert "No health figure was taken" in text


def train(root, *, steps=30, ranks=2, resume_at=None, loss=lambda step: 5.0 / (step + 1), end=True):
    run_dir = RunDir(root=str(root))
    for rank in range(ranks):
        writer = EventWriter(run_dir.events(rank))
        for start in (0,) if resume_at is None else (0, resume_at):
            write_rank(writer, rank, start, steps, loss)
        if end:
            writer.write(RunEnd(time_ns=10**12, cause="done"))
        writer.close()
    return run_dir


def write_rank(writer, rank, start, steps, loss):
    common = {"rank": rank, "world_size": 2, "host": "h", "pid": 1, "plan_hash": "p", "work_hash": "w", "label": "tiny"}
    times = {"wall_clock": 1.0, "offset_ns": 1000 * rank, "build_seconds": 2.0, "first_step": start}
    writer.write(RunStart(time_ns=0, **common, **times))
    for step in range(start, steps):
        begin = step * 10**9
        span = {"step": step, "phase": "forward", "start_ns": begin, "end_ns": begin + 3 * 10**8}
        writer.write(Span(time_ns=begin, **span))
        figures = {"loss": loss(step), "grad_norm": 1.0, "lr": 1e-3, "samples": 8, "tokens": 4096}
        writer.write(StepEnd(time_ns=begin + 5 * 10**8, step=step, start_ns=begin, **figures))
        sizes = {"allocated_bytes": 2**28, "reserved_bytes": 2**29, "peak_allocated_bytes": 2**30 + rank}
        sizes |= {"peak_reserved_bytes": 2**30, "device_used_bytes": 2**30, "host_bytes": 2**30}
        writer.write(Memory(time_ns=begin, step=step, **sizes))


def test_a_training_run_has_a_page(tmp_path):
    run_dir = train(tmp_path)
    run_dir.done.touch()
    run_dir.command.write_text("torchrun things\n")
    document = training_document(run_dir)
    text = text_of(document, 100)
    assert document.title == "tiny: 30 steps, loss 0.1667"
    for expected in ("came to its end", "500 ms", "8.19 k", "torchrun things", "5.0000 at the start", "throughput stability"):
        assert expected in text, expected
    titles = [block.title for block in document.blocks if isinstance(block, Chart)]
    assert titles == ["Loss", "Gradient norm", "Learning rate", "Step time", "Memory of rank 0, the fullest"]
    timeline = next(block for block in document.blocks if isinstance(block, Timeline))
    assert {bar.lane: (bar.start, bar.end) for bar in timeline.bars} == {
        "rank 0": (0.0, 0.3),
        "rank 1": (1e-6, pytest.approx(0.300001)),
    }
    assert html_of(document)


def test_a_resumed_run_counts_each_step_once(tmp_path):
    document = training_document(train(tmp_path, steps=20, resume_at=12))
    loss = next(block for block in document.blocks if isinstance(block, Chart))
    assert loss.traces[0].x == tuple(float(step) for step in range(20))
    assert "started again" in text_of(document)


def test_a_failed_run_says_why(tmp_path):
    run_dir = train(tmp_path, steps=3, end=False)
    write_json(run_dir.failed, Failure(failure="out_of_memory", message="wanted 3 GiB", rank=1, fix="smaller micro-batch"))
    text = text_of(training_document(run_dir))
    assert "Failed on rank 1: out of memory: wanted 3 GiB" in text
    assert "smaller micro-batch" in text


def test_a_run_that_left_no_word_is_not_called_done(tmp_path):
    assert "left no word of its end" in text_of(training_document(train(tmp_path, steps=3, end=False)))


def test_losses_that_are_no_numbers_are_counted(tmp_path):
    document = training_document(train(tmp_path, loss=lambda step: math.nan if step > 25 else 2.0))
    stats = {stat.label: stat for block in document.blocks if isinstance(block, Stats) for stat in block.items}
    assert (stats["Loss"].value, stats["Loss"].note) == ("not finite", "2.0000 at the start; 4 steps not finite")
    assert "nan" not in document.title
    assert html_of(document)


def test_long_runs_are_thinned_and_say_so(tmp_path):
    document = training_document(train(tmp_path, steps=2 * MOST_POINTS + 1, ranks=1))
    loss = next(block for block in document.blocks if isinstance(block, Chart))
    assert len(loss.traces[0].x) <= MOST_POINTS
    assert "mean of 3 steps" in loss.note


def test_a_folder_without_events_is_the_users_mistake(tmp_path):
    with pytest.raises(BadInput, match="holds no events"):
        training_document(RunDir(root=str(tmp_path)))
    run_dir = train(tmp_path, steps=0, ranks=1)
    assert "no step was finished" in training_document(run_dir).title
