"""Each case priced, each file summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullstride.plan.cost.table import terms
from fullstride.plan.estimate import MomentName, Row, Term
from fullstride.plan.ledger.table import OUTSIDE, ledger, moments_of, peak_of
from fullstride.plan.validation.errors import Errors, errors_of, naive_seconds
from fullstride.plan.validation.rows import Case, Skip

KINDS = ("time", "naive_time", "static_memory", "peak_memory")
BETWEEN: MomentName = "checkpoint"
"""The moment between two steps: what stays allocated."""


@dataclass(frozen=True)
class Prediction:
    """One case and what was said of it."""

    case: Case
    terms: tuple[Term, ...]
    rows: tuple[Row, ...]
    seconds: float | None
    static_bytes: float | None
    peak_bytes: float | None
    naive: float | None = None

    def error(self, kind: str) -> float | None:
        """Signed error in per cent; None where there is nothing to compare."""
        case = self.case
        said, seen = {
            "time": (self.seconds, case.seconds),
            "naive_time": (self.naive, case.seconds),
            "static_memory": (self.static_bytes, case.static_bytes),
            "peak_memory": (self.peak_bytes, case.peak_bytes),
        }[kind]
        return 100 * (said / seen - 1) if said is not None and seen else None


def predict(case: Case) -> Prediction:
    """Price what the case published: seconds if it has a time, bytes if it has memory."""
    found = terms(case.plan, case.spec, case.cluster) if case.seconds else ()
    rows: tuple[Row, ...] = ()
    if case.static_bytes or case.peak_bytes:
        rows = ledger(case.plan, case.spec, case.cluster)
        if case.last_rank:
            rows = tuple(row for row in rows if row.stage == case.plan.layout.pp - 1)
    inside = tuple(row for row in rows if row.kind not in OUTSIDE)
    return Prediction(
        case=case,
        terms=found,
        rows=rows,
        seconds=sum(term.exposed_seconds for term in found) if case.seconds else None,
        static_bytes=sum(row.bytes for row in inside if BETWEEN in row.moments) if rows and case.static_bytes else None,
        peak_bytes=_peak(case, rows) if rows and case.peak_bytes else None,
    )


def _peak(case: Case, rows: tuple[Row, ...]) -> float:
    """The fullest rank's peak of the kind that the case published: allocated, reserved, or all that the device holds."""
    if case.reserved:
        rows = tuple(row for row in rows if row.kind != "context")
    return peak_of(moments_of(rows, inside=not (case.whole_device or case.reserved))).bytes


def predict_file(found: Sequence[Case | Skip]) -> list[Prediction]:
    """All cases of one file, each with its time by the file's one utilisation."""
    done = [predict(item) for item in found if isinstance(item, Case)]
    timed = [item for item in done if item.case.seconds]
    naive = dict(zip(map(id, timed), naive_seconds([item.case for item in timed]), strict=True)) if timed else {}
    return [Prediction(**{**vars(item), "naive": naive.get(id(item))}) for item in done]


def statistics(done: Sequence[Prediction]) -> dict[str, Errors]:
    """Errors by kind, of the kinds there is something of."""
    found = {}
    for kind in KINDS:
        errors = errors_of([error for item in done if (error := item.error(kind)) is not None])
        if errors:
            found[kind] = errors
    return found


def summary(files: Mapping[str, Sequence[Case | Skip]], done: dict[str, list[Prediction]]) -> dict[str, Any]:
    """What `validate --json` carries: errors by file and in all, eligible rows, coverage, what was left out and why."""
    found: dict[str, Any] = {}
    for name, rows in files.items():
        skips = [row for row in rows if isinstance(row, Skip)]
        predicted = len(rows) - len(skips)
        eligible = predicted + sum(skip.eligible for skip in skips)
        found[name] = {
            **statistics(done[name]),
            "eligible": eligible,
            "coverage_pct": 100.0 * predicted / eligible if eligible else 0.0,
            "skipped": dict(Counter(skip.reason for skip in skips).most_common()),
        }
    return {"files": found, "all": statistics([item for each in done.values() for item in each])}
