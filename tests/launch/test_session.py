"""Sessions with fake workers: orders and replies, and every way to fail."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.launch.helpers import HERE, gone, pids, plan_of, quick_job, until

from fullstride.files import read_json, write_json
from fullstride.launch.command import worker_command
from fullstride.launch.job import Job
from fullstride.launch.local import start
from fullstride.launch.session import WorkerSession
from fullstride.plan.plan import Batch, Comm, Threads
from fullstride.plan.toml import read_plan
from fullstride.rundir import AsideOrder, Reply, RunDir, RunOrder

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]


@pytest.fixture
def session(tmp_path):
    with WorkerSession(tmp_path / "run", plan_of(), command=quick_job) as session:
        yield session


def test_a_plan_that_is_set_aside_is_not_released_by_the_next_build(session):
    base, other = plan_of(), plan_of(batch=Batch(accumulation=2))
    assert session.build("base", base).ok and session.set_aside().ok and session.build("other", other).ok
    assert session.holds("base") and not session.holds("other")
    assert read_json(session.run_dir.order(2), AsideOrder) == AsideOrder(number=2)
    assert session.set_aside().ok and session.build("base", base).ok
    assert session.holds("other") and not session.holds("base")
    assert session.release().ok and not session.holds("other")
    assert session.build("base", base).ok and session.set_aside().ok
    session.close()
    assert not session.holds("base")


def test_plans_take_turns_in_one_worker(session):
    base, other = plan_of(), plan_of(batch=Batch(accumulation=2))
    replies = [
        session.build("base", base),
        session.run(3, "round 0"),
        session.build("other", other),
        session.run(2, "round 1", profile=True),
    ]
    assert all(reply.ok for reply in replies) and replies[1].peak_allocated_bytes == 7
    first = pids(session.run_dir.root)
    assert session.release().ok and session.build("base", base).ok
    assert pids(session.run_dir.root) == first
    assert [reply.number for reply in replies] == [1, 2, 4, 5]  # 3 released what was built
    assert read_json(session.run_dir.order(5), RunOrder) == RunOrder(number=5, steps=2, label="round 1", profile=True)
    assert read_plan(session.run_dir.plan_named("other")) == other
    session.close()
    assert all(gone(pid) for pid in first)
    assert "rank 1 is here" in session.run_dir.log(1).read_text()
    assert session.run_dir.command.read_text().strip()


def test_a_plan_with_another_environment_gets_a_fresh_worker(session):
    session.build("base", plan_of())
    first = pids(session.run_dir.root)
    assert "'OMP_NUM_THREADS': None" in (session.run_dir.path / "env0").read_text()
    assert session.build("other", plan_of(threads=Threads(compute=2), comm=Comm(env={"NCCL_DEBUG": "INFO"}))).ok
    assert pids(session.run_dir.root) != first and all(gone(pid) for pid in first)
    assert "'OMP_NUM_THREADS': '2', 'NCCL_DEBUG': 'INFO', 'WORLD_SIZE': '2'" in (session.run_dir.path / "env1").read_text()
    assert session.build("one", plan_of(1)).ok
    assert "'WORLD_SIZE': '1'" in (session.run_dir.path / "env0").read_text()


FAILURES = {
    "crash": ("crash", 0, 30.0),
    "rank1-crash": ("crash", 1, 30.0),
    "cuda-oom": ("out_of_memory", 0, 30.0),
    "rank1-kill": ("killed", 1, 30.0),
    "quit": ("hang", -1, 1.0),
    "rank1-hang": ("hang", -1, 1.0),
    "nan": ("not_finite", 0, 30.0),
}


@pytest.mark.slow
def test_failures_are_values_and_a_fresh_worker_follows(session):
    for word, (kind, rank, limit) in FAILURES.items():
        assert session.build("base", plan_of()).ok
        alive = pids(session.run_dir.root)
        reply = session.run(5, word, timeout_seconds=limit)
        assert not reply.ok and (reply.failure.failure, reply.failure.rank) == (kind, rank), word
        assert all(gone(pid) for pid in alive) and session.process is None
        # Answered, so that no later worker takes the order up.
        assert not read_json(session.run_dir.reply(reply.number), Reply).ok
        if kind == "hang":
            assert f"waited 1 s for 5 steps of base ({word})" in reply.failure.message
            assert "rank 1: rank 1 is here" in reply.failure.detail
    oom = session.build("cuda-oom", plan_of()).failure
    assert oom.failure == "out_of_memory" and oom.wanted_bytes == 2.5 * 2**30
    assert session.build("base", plan_of()).ok and session.run(1, "again").ok


def test_running_with_no_worker_is_refused(session):
    assert session.run(1, "x").failure.failure == "refused"
    assert session.build("base", plan_of()).number == 1


def test_orders_that_an_earlier_worker_left_open_are_answered(tmp_path):
    run_dir = RunDir(root=str(tmp_path / "run"))
    write_json(run_dir.order(1), RunOrder(number=1, steps=1, label="hang"))
    with WorkerSession(run_dir, plan_of(), command=quick_job) as session:
        reply = session.build("base", plan_of())
    assert reply.ok and reply.number == 2
    assert read_json(run_dir.reply(1), Reply).failure.failure == "killed"


def test_an_interrupt_leaves_no_worker(tmp_path):
    session = WorkerSession(tmp_path / "run", plan_of(), command=quick_job)
    session.build("base", plan_of())
    alive = pids(session.run_dir.root)
    old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.run(1, "hang")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert all(gone(pid) for pid in alive)


LAUNCHER = """
import sys, time
sys.path.insert(0, {tests!r})
from tests.launch.helpers import plan_of, quick_job
from fullstride.launch.session import WorkerSession
session = WorkerSession({root!r}, plan_of(), command=quick_job)
print(session.build("base", plan_of()).ok, flush=True)
time.sleep(60)
"""


def test_killing_the_launcher_leaves_no_worker(tmp_path):
    program = LAUNCHER.format(tests=str(HERE.parent.parent), root=str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"True\n"
    alive = [process.pid for process in psutil.Process(launcher.pid).children(recursive=True)]
    assert len(alive) >= 4 and set(pids(tmp_path)) < set(alive)
    launcher.kill()
    launcher.communicate()
    until(lambda: all(gone(pid) for pid in alive))


@pytest.mark.parametrize("which", ["guard", "launcher of ranks"])
def test_killing_what_is_between_leaves_no_rank(tmp_path, which):
    process = start(quick_job(RunDir(root=str(tmp_path)), plan_of()))
    try:
        alive = pids(tmp_path)
        agent = psutil.Process(process.pid).children()[0].pid
        os.kill(process.pid if which == "guard" else agent, signal.SIGKILL)
        until(lambda: all(gone(pid) for pid in [*alive, agent]))
        until(lambda: process.poll() is not None)
    finally:
        process.close()


def test_termination_reaches_all_ranks_at_once(tmp_path):
    process = start(quick_job(RunDir(root=str(tmp_path)), plan_of()))
    alive = pids(tmp_path)
    began = time.monotonic()
    assert process.terminate(grace_seconds=10.0) is not None
    assert time.monotonic() - began < 8 and all(gone(pid) for pid in alive)
    process.close()


def test_a_command_that_does_not_exist(tmp_path):
    process = start(Job(run_dir=str(tmp_path), num_processes=1, command=(str(tmp_path / "nothing"),)))
    assert process.wait(20.0) == 127
    process.close()
    assert "No such file" in (tmp_path / "logs" / "launcher.log").read_text()


@pytest.mark.slow
def test_the_real_torchrun_with_the_fake_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))

    def job(run_dir, plan):
        return worker_command(run_dir, plan, module="fake_worker")

    with WorkerSession(tmp_path, plan_of(), command=job) as session:
        assert session.build("base", plan_of()).ok and session.run(2, "round").ok
        alive = pids(tmp_path)
        failure = session.run(1, "rank1-kill", timeout_seconds=60.0).failure
        assert (failure.failure, failure.rank) == ("killed", 1)
        assert all(gone(pid) for pid in alive)
    assert "rank 1 is here" in session.run_dir.log(1).read_text()
