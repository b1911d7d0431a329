"""Plans from any kind of file, for the verbs that take one: what could not be carried is told on the way."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from fullstride.cli.output import Output
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import BadInput
from fullstride.plan.formats.detect import kind_of_file, read_any
from fullstride.plan.formats.imported import NAMES, Imported, NotCarried
from fullstride.plan.formats.runnable import runnable
from fullstride.plan.plan import Plan, Workload


def is_own_plan(path: str) -> bool:
    """Whether a file is a fullstride plan, which says all of the work, and not another framework's.

    Raises:
        BadInput: no such file, or of no known kind.
    """
    return kind_of_file(path) == "fullstride"


def tell(imported: Imported, out: Output) -> None:
    """Say what a foreign file left behind and what was assumed; nothing of a plan's own file."""
    if imported.kind == "fullstride":
        return
    for line in imported.assumed:
        out.note(f"assumed: {line}")
    _tell(imported.not_carried, out, f"{imported.where}: not carried: ")


def _tell(left: tuple[NotCarried, ...], out: Output, before: str) -> None:
    for one in left:
        if one.matters:
            out.warn(f"{before}{one.key} = {one.value} ({one.why})")
    quiet = [one.key for one in left if not one.matters]
    if quiet:
        out.note(f"{before}{', '.join(quiet)} (logging, files, launching and the like)")


def plan_to_run(
    path: str,
    out: Output,
    *,
    model: str | None = None,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
    data: str | None = None,
) -> Plan:
    """The plan of a file that is to run here: a plan's own, or another framework's in the nearest form that runs.

    Args:
        path: The file.
        out: Told what was not carried.
        model: For a foreign file that does not name one.
        sequence_length: Tokens of a sample, for a foreign file.
        samples_per_step: Samples of the world in a step, for a foreign file.
        data: Text, JSONL or Parquet, for a foreign file.

    Raises:
        BadInput: damaged, or it says too little; names what is missing.
    """
    imported = read_any(path, model, sequence_length=sequence_length, samples_per_step=samples_per_step)
    if imported.plan is not None and imported.kind == "fullstride":
        return imported.plan
    if imported.plan is None:  # the ranks may be what is missing, and this machine has so many
        ranks = probe_cluster().num_devices
        with_ranks = read_any(path, model, num_ranks=ranks, sequence_length=sequence_length, samples_per_step=samples_per_step)
        if with_ranks.missing != imported.missing:
            out.note(f"assumed: {ranks} ranks, those of this machine")
            imported = with_ranks
    plan = imported.require_plan()
    if imported.config or imported.shape:
        raise BadInput(
            f"{path}: describes its model by sizes, and a run needs one to build",
            fix=f"`fullstride convert {path} --to fullstride -o plan.toml` writes its config.json, or name a model",
        )
    tell(imported, out)
    plan, changes = runnable(plan)
    _tell(changes, out, f"{NAMES[imported.kind]}: ")
    return _with_files(plan, data, out)


def _with_files(plan: Plan, data: str | None, out: Output) -> Plan:
    """The workload with data and tokenizer that are there: another framework's names for them need not be."""
    workload, plain = plan.workload, Workload(sequence_length=2, samples_per_step=1)
    if data is not None:
        workload = replace(workload, data=data)
    for name in ("data", "tokenizer"):
        value, default = getattr(workload, name), getattr(plain, name)
        if value != default and not Path(value).exists() and not (name == "data" and data is not None):
            out.warn(f"workload.{name} = {value} is not there: {default} is taken")
            workload = replace(workload, **{name: default})
    return replace(plan, workload=workload)
