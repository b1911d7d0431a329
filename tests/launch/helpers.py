"""Jobs that start the fake worker: through torchrun, or through a small stand-in for it that starts in a moment."""

import sys
import time
from pathlib import Path

import psutil

from fullstride.launch.command import worker_command
from fullstride.launch.job import Job
from fullstride.plan.plan import Layout, ModelRef, Plan, Workload

HERE = Path(__file__).parent


def plan_of(ranks=2, **parts):
    work = Workload(sequence_length=8, samples_per_step=ranks)
    return Plan(model=ModelRef(source="tiny"), workload=work, layout=Layout(dp_replicate=ranks), **parts)


def quick_job(run_dir, plan):
    """As `worker_command`, but with the stand-in for torchrun and the fake worker."""
    job = worker_command(run_dir, plan)
    command = (
        sys.executable,
        str(HERE / "fake_torchrun.py"),
        str(job.num_processes),
        str(HERE / "fake_worker.py"),
        job.run_dir,
    )
    return Job(run_dir=job.run_dir, num_processes=job.num_processes, command=command, env=job.env)


def pids(run_dir, ranks=2, seconds=20.0):
    """Process ids of the fake ranks, once they are up."""
    files = [Path(run_dir) / f"pid{rank}" for rank in range(ranks)]
    until(lambda: all(file.exists() for file in files), seconds)
    return [int(file.read_text().split()[0]) for file in files]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
