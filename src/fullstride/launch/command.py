"""The one place that builds a worker's command: torchrun of this very Python, one process a rank, also for a single rank."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from fullstride.launch.job import Job
from fullstride.plan.plan import Plan
from fullstride.rundir import WORKER_MODULE, RunDir

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def worker_command(
    run_dir: RunDir | str | Path,
    plan: Plan,
    *,
    train: bool = False,
    save_every: int | None = None,
    export: str | None = None,
    merge: bool = False,
    module: str = WORKER_MODULE,
) -> Job:
    """What starts the workers of a plan on this host; starts nothing and writes nothing.

    Args:
        run_dir: where the worker finds its plan and its orders.
        plan: decides the number of ranks and the environment.
        train: run the plan to its end instead of waiting for orders.
        save_every: steps between checkpoints; the worker's own default if not given.
        export: folder for a Hugging Face model at the end.
        merge: with adapters: export the whole model with them merged into it.
        module: what each rank runs.
    """
    root = str(run_dir.path if isinstance(run_dir, RunDir) else run_dir)
    ranks = plan.layout.world_size
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--log-dir", str(Path(root) / "logs"), "--redirects", "3", "-m", module]
    worker = [root]
    if train:
        worker.append("--train")
    if save_every is not None:
        worker += ["--save-every", str(save_every)]
    if export is not None:
        worker += ["--export", export]
    if merge:
        worker.append("--merge")
    return Job(run_dir=root, num_processes=ranks, command=(*launcher, *worker), env=worker_env(plan, train=train))


def worker_env(plan: Plan, *, train: bool = False) -> dict[str, str]:
    """Variables that a plan's workers are started with, over those of the caller.

    Plans that give the same variables can take turns in one worker.
    """
    env = dict(sorted(plan.comm.env.items()))
    if plan.threads.compute:
        # Left out otherwise, so that torchrun's default holds: one thread a rank where a host has several ranks.
        env["OMP_NUM_THREADS"] = str(plan.threads.compute)
    if plan.made_for.device != "cpu" and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        # Segments that grow: without them blocks of many sizes leave gaps that cost up to a tenth of the memory.
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    env["TOKENIZERS_PARALLELISM"] = "false"  # its threads and fork() do not go together
    env["PYTHONUNBUFFERED"] = "1"  # the last lines before a crash are the ones that matter
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "120" if train else "5"  # seconds to save, or only to end
    return env


def shown(job: Job) -> str:
    """The command with its variables, as one would type it; the content of `command.txt`."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in job.env.items()]
    return " ".join([*variables, shlex.join(job.command)]) + "\n"
