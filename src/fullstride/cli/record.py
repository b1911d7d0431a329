"""Reading back whatever a verb left behind: a run directory, or one file of a known kind."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput
from fullstride.events import StepEnd, read_events
from fullstride.files import FileValue, Value, from_json, read_bytes, read_json
from fullstride.measure.measurement import Comparison, Measurement
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.toml import read_plan
from fullstride.report.document import Document
from fullstride.rundir import Failure, RunDir
from fullstride.tune.trial import Ladder

LADDER, BEST, COMPARISON, PAGE = "ladder.json", "best.toml", "comparison.json", "report.html"
"""Files that the verbs add to a run directory."""

Shown = Ladder | Comparison | Measurement | Document
"""Kinds of files that a page can be made of."""
F = TypeVar("F", bound=FileValue)


class RunRecord(Value, frozen=True, kw_only=True):
    """All that a run directory says; what it does not hold is None or empty."""

    root: str
    plan: Plan | None = None
    cluster: Cluster | None = None
    model: ModelSpec | None = None
    steps: tuple[StepEnd, ...] = ()
    """What rank 0 wrote, in order; a step that was taken again after a resume stands once, as it was taken last."""
    measurement: Measurement | None = None
    comparison: Comparison | None = None
    ladder: Ladder | None = None
    failure: Failure | None = None
    done: bool = False
    """The run ended well."""


def read_run(path: Path | str) -> RunRecord:
    """Read a run directory, whichever verb left it.

    Raises:
        BadInput: no such folder, nothing of a run in it, or a damaged file.
    """
    run_dir = RunDir(root=str(path))
    if not run_dir.path.is_dir():
        raise BadInput(f"{path}: no such folder", fix="give the run directory that a verb named")
    record = RunRecord(
        root=str(path),
        plan=read_plan(run_dir.plan) if run_dir.plan.exists() else None,
        cluster=_read(run_dir.cluster, Cluster),
        model=_read(run_dir.model, ModelSpec),
        steps=_steps(run_dir.events(0)),
        measurement=_read(run_dir.measurement, Measurement),
        comparison=_read(run_dir.path / COMPARISON, Comparison),
        ladder=_read(run_dir.path / LADDER, Ladder),
        failure=_read(run_dir.failed, Failure),
        done=run_dir.done.exists(),
    )
    if not (record.plan or record.ladder or record.measurement or record.comparison):
        raise BadInput(f"{path}: holds no plan, ladder or measurement", fix="give the run directory that a verb named")
    return record


def read_shown(path: Path) -> Shown:
    """Read one JSON file of a kind that a page can be made of.

    Raises:
        BadInput: not JSON, or of another kind.
    """
    raw = read_bytes(path)
    try:
        decoded = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: is not JSON ({error})", fix="give a run directory or a JSON file of fullstride's") from None
    kinds: dict[str, type[Shown]] = {
        "ladder": Ladder,
        "comparison": Comparison,
        "measurement": Measurement,
        "document": Document,
    }
    kind = decoded.get("kind") if isinstance(decoded, dict) else None
    if kind not in kinds:
        raise BadInput(f"{path}: kind is {kind!r}, there is no page for it", fix=f"give one of {', '.join(kinds)}")
    return from_json(raw, kinds[kind], str(path))


def _read(path: Path, value_type: type[F]) -> F | None:
    return read_json(path, value_type) if path.exists() else None


def _steps(path: Path) -> tuple[StepEnd, ...]:
    if not path.exists():
        return ()
    taken = {event.step: event for event in read_events(path) if isinstance(event, StepEnd)}
    return tuple(taken[step] for step in sorted(taken))
