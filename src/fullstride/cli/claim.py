"""Taking a run directory: a new one is filled, one of the same work is resumed, anything else is left alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput, RunFailed, TimedOut
from fullstride.files import write_json
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.toml import read_plan, write_plan
from fullstride.rundir import Failure, RunDir

Claim: TypeAlias = Literal["new", "resumed", "finished"]


def default_run_dir(verb: str, spec: ModelSpec, plan: Plan) -> RunDir:
    """The folder that the same command finds again: named after the model and the work."""
    return RunDir(root=str(Path("runs") / f"{verb}-{plain_name(spec.name)}-{plan.work_hash[:8]}"))


def plain_name(name: str) -> str:
    """A name without what a shell or a file system minds."""
    return "".join(letter if letter.isalnum() or letter in ".-_" else "-" for letter in Path(name).stem) or "model"


def look(run_dir: RunDir, plan: Plan) -> Claim:
    """What taking this folder would mean; changes nothing.

    Raises:
        BadInput: it holds something else, or a run of other work.
    """
    if not run_dir.path.exists() or (run_dir.path.is_dir() and not any(run_dir.path.iterdir())):
        return "new"
    if not run_dir.plan.exists():
        raise BadInput(f"{run_dir.root}: is there already and holds no run", fix="choose another place with -o")
    before = read_plan(run_dir.plan)
    for part in ("model", "workload"):
        if getattr(before, part) != getattr(plan, part):
            raise BadInput(
                f"{run_dir.root}: holds a run of other work, its [{part}] differs from this one's",
                fix="choose another place with -o, or give the same model and data to resume",
            )
    return "finished" if run_dir.done.exists() and before.recipe.steps >= plan.recipe.steps else "resumed"


def fill(run_dir: RunDir, plan: Plan, cluster: Cluster, spec: ModelSpec) -> None:
    """Write what a run starts from (plan, cluster, model); marks of an earlier end are taken away.

    Raises:
        EnvironmentFault: the disk refuses.
    """
    run_dir.failed.unlink(missing_ok=True)
    run_dir.done.unlink(missing_ok=True)
    write_json(run_dir.cluster, cluster)
    write_json(run_dir.model, spec)
    write_plan(plan, run_dir.plan, overwrite=True)


def wait_until_filled(run_dir: RunDir, plan: Plan, seconds: float = 300.0) -> None:
    """On ranks other than 0 of a group that somebody else started: until rank 0 has written the same plan.

    Raises:
        TimedOut: it did not.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if run_dir.plan.exists() and read_plan(run_dir.plan) == plan:
            return
        time.sleep(0.05)
    raise TimedOut(
        f"waited {seconds:.0f} s for rank 0 to write {run_dir.plan}",
        fix="give all ranks the same command line and a -o on storage that they share",
    )


def error_of(failure: Failure, run_dir: RunDir) -> RunFailed:
    """The error that a verb ends with; its exit code follows the class of the failure."""
    rank = f" on rank {failure.rank}" if failure.rank >= 0 else ""
    error = RunFailed(
        f"{failure.failure.replace('_', ' ')}{rank}: {failure.message}", fix=failure.fix or f"see {run_dir.root}/logs"
    )
    error.exit_code = EXIT_CODES[failure.failure]
    return error


EXIT_CODES = {
    "out_of_memory": 4,
    "environment": 5,
    "unavailable": 5,
    "refused": 3,
    "hang": 7,
    "crash": 6,
    "killed": 6,
    "not_finite": 6,
}
"""By class of failure: those of `errors.py` for the same cause."""
