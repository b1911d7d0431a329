"""What `bench` and `compare` share: a plan that may run here, a fresh run directory, a driver over a worker session."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fullstride.cli.choose import checked, choose_model
from fullstride.cli.claim import error_of, plain_name
from fullstride.cli.command import refuse_existing
from fullstride.cli.foreign import plan_to_run
from fullstride.cli.output import Output
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import FullstrideError
from fullstride.files import write_json
from fullstride.launch.session import WorkerSession
from fullstride.measure.protocol import FULL, Settings
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.toml import write_plan
from fullstride.report.progress import ProgressView
from fullstride.rundir import Failure, RunDir
from fullstride.tune.driver import Driver

SHORT_MINUTES, FULL_MINUTES = 3.0, 600.0


def read_runnable(path: str, out: Output, model: str | None = None) -> tuple[Plan, ModelSpec, Cluster]:
    """A plan file (or another framework's, in the nearest form that runs) for this machine, with its model and the machine.

    Args:
        path: The file.
        out: Told what of a foreign file was not carried.
        model: For a foreign file that does not name one.

    Raises:
        BadInput: damaged, or forbidden by a rule here.
    """
    plan = plan_to_run(path, out, model=model)
    _, spec = choose_model(plan.model)
    cluster = probe_cluster(num_ranks=plan.layout.world_size)
    checked(plan, spec, cluster, out)
    return plan, spec, cluster


def fresh_run_dir(verb: str, output: str | None, name: str) -> RunDir:
    """A folder that is not there yet: the one asked for, or one named after the time."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = Path(output) if output else Path("runs") / f"{verb}-{stamp}-{plain_name(name)}"
    refuse_existing(path)
    return RunDir(root=str(path))


def settings_of(full: bool) -> Settings:
    """The protocol's form, for a measurement that decides nothing by itself."""
    return FULL if full else Settings(screen=False, promising_alternations=16)


@contextmanager
def driver_of(run_dir: RunDir, plan: Plan, spec: ModelSpec, cluster: Cluster, view: ProgressView) -> Iterator[Driver]:
    """A driver whose workers end when the block does, however it ends."""
    write_json(run_dir.cluster, cluster)
    write_json(run_dir.model, spec)
    write_plan(plan, run_dir.plan)
    session = WorkerSession(run_dir, plan)
    try:
        yield Driver(session, run_dir, cluster, spec=spec, watch=lambda name, seconds: view.step(seconds, label=name))
    finally:
        session.close()


def failed(failure: Failure, run_dir: RunDir) -> FullstrideError:
    """The error of a failed measurement; the failure stays in the run directory."""
    write_json(run_dir.failed, failure)
    return error_of(failure, run_dir)
