"""What a failure was, told from texts and statuses."""

import pytest

from fullstride.files import write_json
from fullstride.launch import failure as module
from fullstride.launch.failure import classify, failure_of, hang
from fullstride.launch.logs import gather_logs, launcher_log
from fullstride.plan.plan import Layout, ModelRef, Pipeline, Plan, Workload
from fullstride.plan.toml import write_plan
from fullstride.rundir import Failure, RunDir

TEXTS = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has": ("out_of_memory", 20 * 2**20),
    "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.": (
        "out_of_memory",
        4096,
    ),
    "Traceback\nMemoryError": ("out_of_memory", 0),
    "OSError: [Errno 28] No space left on device": ("environment", 0),
    "torch._inductor.exc.InvalidCxxCompiler: No working C++ compiler found in": ("unavailable", 0),
    "[rank1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3": ("hang", 0),
    "RuntimeError: Timed out waiting 1800000ms for recv operation to complete": ("hang", 0),
    "loss is not finite at step 3": ("not_finite", 0),
}


@pytest.mark.parametrize(("text", "expected"), TEXTS.items())
def test_signs(text, expected):
    found = classify("INFO start\n" + text + "\nmore", 1)
    assert (found.failure, found.wanted_bytes, found.rank) == (*expected, 1)
    assert found.message == text.splitlines()[-1] and found.fix


def test_an_ordinary_traceback_is_no_known_sign():
    assert classify("Traceback (most recent call last):\nValueError: no") is None


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(root=str(tmp_path))


def left(run_dir, launcher="", **ranks):
    launcher_log(run_dir).parent.mkdir(parents=True, exist_ok=True)
    launcher_log(run_dir).write_text(launcher)
    for name, text in ranks.items():
        folder = run_dir.path / "logs" / "none_1" / "attempt_0" / name.removeprefix("rank")
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(text)


def root_cause(rank, code):
    words = f"rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: 9)"
    return f"--- start\nRoot Cause (first observed failure):\n[0]:\n  {words}\n"


def test_the_worker_s_own_word_counts_first(run_dir):
    left(run_dir, rank0="CUDA out of memory. Tried to allocate 1.00 GiB")
    write_json(run_dir.failed, Failure(failure="not_finite", message="its own"))
    assert failure_of(run_dir, 1).message == "its own"
    run_dir.failed.write_bytes(b"{ torn")
    assert failure_of(run_dir, 1).failure == "out_of_memory"


def test_the_first_rank_that_failed_is_named(run_dir):
    left(run_dir, root_cause(1, 1), rank0="RuntimeError: Connection closed by peer", rank1="Traceback\nValueError: odd")
    found = failure_of(run_dir, 1)
    assert (found.failure, found.rank, found.message) == ("crash", 1, "ValueError: odd")


def test_a_rank_that_waited_in_vain_is_not_the_cause(run_dir):
    waits = "RuntimeError: Timed out waiting 600000ms for recv operation to complete"
    left(run_dir, root_cause(0, 1), rank0=waits, rank1="torch.OutOfMemoryError: CUDA out of memory.")
    assert (failure_of(run_dir, 1).failure, failure_of(run_dir, 1).rank) == ("out_of_memory", 1)


def test_beside_a_killed_rank_the_others_are_not_asked(run_dir):
    left(run_dir, root_cause(1, -9), rank0="RuntimeError: Timed out waiting 600000ms for recv operation", rank1="")
    assert (failure_of(run_dir, 1).failure, failure_of(run_dir, 1).rank) == ("killed", 1)


@pytest.mark.parametrize(
    ("schedule", "chunks", "words"),
    [("1f1b", 1, "rank 1 is stage 1 of 2"), ("zb-v", 2, "rank 1 is stage 1 and 2 of 4"), ("none", 1, "was killed (signal 9)")],
)
def test_a_failure_in_a_pipeline_names_the_stage(run_dir, schedule, chunks, words):
    layout = Layout(dp_replicate=2) if schedule == "none" else Layout(pp=2)
    plan = Plan(
        model=ModelRef(source="tiny"),
        workload=Workload(sequence_length=8, samples_per_step=4),
        layout=layout,
        pipeline=Pipeline(schedule=schedule, chunks=chunks),
    )
    write_plan(plan, run_dir.plan)
    left(run_dir, root_cause(1, -9), rank0="", rank1="")
    assert words in failure_of(run_dir, 1).message
    assert ("stage" in failure_of(run_dir, 1).message) is (schedule != "none")
    write_json(run_dir.failed, Failure(failure="refused", rank=1, message="no such file"))
    assert failure_of(run_dir, 1).message == "no such file"  # every rank refuses, and the first to speak is no culprit


@pytest.mark.parametrize(("before", "now", "expected"), [(3, 4, "out_of_memory"), (3, 3, "killed"), (None, 4, "killed")])
def test_a_kill_is_out_of_memory_only_if_the_kernel_says_so(run_dir, monkeypatch, before, now, expected):
    monkeypatch.setattr(module, "oom_kills", lambda: now)
    left(run_dir, root_cause(1, -9), rank0="", rank1="fine")
    found = failure_of(run_dir, 1, oom_kills_before=before)
    assert (found.failure, found.rank) == (expected, 1)


def test_no_words_at_all(run_dir):
    assert "status 3 and printed nothing" in failure_of(run_dir, 3).message
    assert failure_of(run_dir, 139).message == "a worker was ended by signal 11"


def test_a_hang_says_who_was_where(run_dir):
    left(run_dir, rank0="step 4\n", rank1="")
    found = hang("3 steps of base (x)", 5, run_dir)
    assert found.message == "waited 5 s for 3 steps of base (x)"
    assert found.detail.splitlines() == ["rank 0: step 4", "rank 1: (printed nothing)"]


def test_logs_are_gathered(run_dir):
    left(run_dir, rank0="hello\n", rank1="")
    gather_logs(run_dir, 2)
    assert run_dir.log(0).read_text() == "hello\n" and not run_dir.log(1).exists()
