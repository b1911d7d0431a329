"""The closed loop as a function: probe, measure the machine, write down the baseline, tune, leave a directory behind."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path

from fullstride.cli.choose import checked, choose_model, own_tokenizer
from fullstride.cli.claim import plain_name
from fullstride.cli.command import refuse_existing
from fullstride.cli.output import Output
from fullstride.cli.record import BEST, LADDER, PAGE, read_run
from fullstride.cli.report import ladder_page
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.measuring import measure_cluster
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import BadInput
from fullstride.files import Value, read_json, write_bytes, write_json
from fullstride.launch.session import WorkerSession
from fullstride.model.spec import ModelSpec
from fullstride.plan.baseline import baseline_plan
from fullstride.plan.defaults import default_workload
from fullstride.plan.plan import Adapter, ModelRef, Plan, Recipe
from fullstride.report.html import html_of
from fullstride.rundir import RunDir
from fullstride.tune.loop import tune
from fullstride.tune.progress import OnProgress
from fullstride.tune.trial import Ladder

DEFAULT_MODEL = "tiny"
CPU_SEQUENCE, CPU_SAMPLES = 256, 8
"""What two CPU cores step in about a second with the default model."""
CPU_MINUTES, GPU_MINUTES = 4.5, 10.0
_LEAST_SECONDS = 30.0
"""Left to the loop, whatever the machine's measurement took."""

Say = Callable[[str], None]


class Task(Value, frozen=True, kw_only=True):
    """All that a tuning run starts from."""

    directory: str
    spec: ModelSpec
    cluster: Cluster
    baseline: Plan
    budget_seconds: float
    ladder: Ladder | None = None
    """Of the run that is resumed."""


def default_directory(name: str) -> Path:
    """`runs/tune-DATE-NAME`, with the time where that is taken."""
    now = datetime.datetime.now(datetime.UTC)
    path = Path("runs") / f"tune-{now:%Y%m%d}-{plain_name(name)}"
    return path if not path.exists() else path.with_name(f"tune-{now:%Y%m%d-%H%M%S}-{plain_name(name)}")


def budget_seconds(minutes: float | None, cluster: Cluster) -> float:
    """The time asked for, else 4.5 minutes on CPUs and 10 on GPUs."""
    return 60 * (minutes or (CPU_MINUTES if cluster.device.kind == "cpu" else GPU_MINUTES))


def new_task(
    model: str | ModelRef = DEFAULT_MODEL,
    *,
    data: str | None = None,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
    minutes: float | None = None,
    directory: str | None = None,
    adapter: Adapter | None = None,
) -> Task:
    """A task from a model: the baseline is what a user would write by hand for this machine.

    Raises:
        BadInput: no such model, or sizes that cannot be.
        DoesNotFit: the baseline fits in no form; says by how much, and what would.
    """
    reference, spec = choose_model(model)
    cluster = probe_cluster()
    if cluster.device.kind == "cpu":
        sequence_length = sequence_length or min(CPU_SEQUENCE, spec.max_sequence or CPU_SEQUENCE)
        samples_per_step = samples_per_step or CPU_SAMPLES
    workload = default_workload(
        spec,
        cluster,
        sequence_length=sequence_length,
        samples_per_step=samples_per_step,
        data=data,
        tokenizer=own_tokenizer(reference.source),
    )
    baseline = baseline_plan(spec, cluster, reference, workload, Recipe(), adapter=adapter)
    return _task(directory, spec, cluster, baseline, minutes)


def task_of_plan(baseline: Plan, out: Output, *, minutes: float | None = None, directory: str | None = None) -> Task:
    """A task from the user's own plan.

    Raises:
        BadInput: it cannot run here.
    """
    _, spec = choose_model(baseline.model)
    cluster = probe_cluster(num_ranks=baseline.layout.world_size)
    checked(baseline, spec, cluster, out)
    return _task(directory, spec, cluster, baseline, minutes)


def _task(directory: str | None, spec: ModelSpec, cluster: Cluster, baseline: Plan, minutes: float | None) -> Task:
    path = Path(directory) if directory else default_directory(spec.name)
    refuse_existing(path)
    budget = budget_seconds(minutes, cluster)
    return Task(directory=str(path), spec=spec, cluster=cluster, baseline=baseline, budget_seconds=budget)


def resumed_task(directory: str, minutes: float | None = None) -> Task:
    """The task of an interrupted run, from its directory; the machine's measurement is kept.

    Raises:
        BadInput: no ladder there, or it was begun on another machine.
    """
    run_dir, path = RunDir(root=directory), Path(directory) / LADDER
    if not path.exists():
        raise BadInput(f"{directory}: holds no {LADDER} to resume from", fix="begin anew without --resume")
    ladder = read_json(path, Ladder)
    cluster, here = read_json(run_dir.cluster, Cluster), probe_cluster(num_ranks=ladder.baseline_plan.layout.world_size)
    if (cluster.device.name, cluster.num_devices) != (here.device.name, here.num_devices):
        raise BadInput(
            f"{directory}: was begun on {cluster.num_devices} x {cluster.device.name}, "
            f"this machine has {here.num_devices} x {here.device.name}",
            fix="resume it there, or begin anew",
        )
    return Task(
        directory=directory,
        spec=read_json(run_dir.model, ModelSpec),
        cluster=cluster,
        baseline=ladder.baseline_plan,
        budget_seconds=60 * minutes if minutes else ladder.budget_seconds,
        ladder=ladder,
    )


def carry_out(task: Task, phase: Say, note: Say, on_progress: OnProgress | None = None) -> Ladder:
    """Measure the machine, tune, and write the page; also where the user stops it, as far as it got.

    Args:
        task: What to tune.
        phase: Told what begins, before the loop does.
        note: Told what the machine's measurement had to leave out.
        on_progress: Told by the loop.

    Raises:
        EnvironmentFault: the directory cannot be written.
    """
    began, run_dir, cluster = time.monotonic(), RunDir(root=task.directory), task.cluster
    if task.ladder is None:
        phase("measuring the machine")
        cluster = measure_cluster(cluster, quick=True, warn=note)
        write_json(run_dir.cluster, cluster)
        write_json(run_dir.model, task.spec)
    left = max(_LEAST_SECONDS, task.budget_seconds - (time.monotonic() - began))
    session = WorkerSession(run_dir, task.baseline)
    try:
        ladder = tune(
            spec=task.spec,
            cluster=cluster,
            baseline=task.baseline,
            session=session,
            run_dir=run_dir,
            directory=run_dir.path,
            budget_seconds=left,
            resume=task.ladder,
            on_progress=on_progress,
        )
        write_bytes(run_dir.done, b"")
    finally:
        session.close()
        write_page(run_dir.path)
    return ladder


def write_page(directory: Path) -> None:
    """The page of the ladder as it stands; nothing where there is no ladder yet."""
    if (directory / LADDER).exists():
        record = read_run(directory)
        assert record.ladder is not None
        write_bytes(directory / PAGE, html_of(ladder_page(record.ladder, record)).encode())


def autotune(
    model: str | ModelRef = DEFAULT_MODEL,
    *,
    data: str | None = None,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
    minutes: float | None = None,
    baseline: Plan | None = None,
    directory: str | None = None,
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> Ladder:
    """Tune a model on this machine, as the verb `tune` does.

    Args:
        model: A preset, a `config.json`, a model directory, or `file.py:function`; with `baseline`, its model counts.
        data: A file or folder of text, JSONL or Parquet.
        sequence_length: Tokens of a sample.
        samples_per_step: Samples of one optimizer step over all ranks.
        minutes: Time allowed, the machine's measurement included; 4.5 on CPUs and 10 on GPUs when None.
        baseline: What everything is compared with; what a user would write by hand when None.
        directory: Gets the ladder, the best plan and the page; must be new unless `resume`.
        resume: Go on with the interrupted run in `directory`.
        on_progress: Told after every order and every verdict.

    Returns:
        The ladder; `best_plan` is the plan to train with, `final` its interval against the baseline.

    Raises:
        BadInput: no such model, sizes that cannot be, a directory in use.
        DoesNotFit: no form of the baseline fits.
    """
    out = Output()
    if resume:
        if directory is None:
            raise BadInput("resume without a directory", fix="give the directory of the interrupted run")
        task = resumed_task(directory, minutes)
    elif baseline is not None:
        task = task_of_plan(baseline, out, minutes=minutes, directory=directory)
    else:
        task = new_task(
            model,
            data=data,
            sequence_length=sequence_length,
            samples_per_step=samples_per_step,
            minutes=minutes,
            directory=directory,
        )
    return carry_out(task, out.note, out.note, on_progress)


def best_path(directory: str) -> Path:
    """Where the best plan lies."""
    return Path(directory) / BEST
