"""What a person reads of a validation, and the file with every row."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from fullstride.plan.validation.conventions import convention_of
from fullstride.plan.validation.errors import Errors
from fullstride.plan.validation.predict import KINDS, Prediction
from fullstride.plan.validation.rows import GIB
from fullstride.report.document import AnyBlock, Column, Document, Heading, Table, TableRow, Text

WORDS = {
    "time": "step time",
    "naive_time": "by one constant utilisation",
    "static_memory": "static memory",
    "peak_memory": "peak memory",
}


def document_of(result: dict[str, Any], done: dict[str, list[Prediction]]) -> Document:
    """Errors by file, what was assumed by source, what was left out."""
    blocks: list[AnyBlock] = [_error_table(result), _coverage_table(result), Heading(text="What rows leave unsaid")]
    stated = sorted({convention_of(item.case.source).stated for each in done.values() for item in each})
    blocks += [Text(text=text, tone="quiet") for text in stated]
    return Document(
        title="Predictions against published runs",
        subtitle="absolute errors in per cent of the measured value; bias above zero predicts too much",
        blocks=tuple(blocks),
    )


def _error_table(result: dict[str, Any]) -> Table:
    names = ("file", "of", "n", "mean", "median", "90th", "worst", "bias")
    columns = tuple(Column(name=name, align="left" if index < 2 else "right") for index, name in enumerate(names))
    rows = []
    for name, entry in (*result["files"].items(), ("all", result["all"])):
        for kind in KINDS:
            if isinstance(found := entry.get(kind), Errors):
                values = (found.mean_abs_pct, found.median_abs_pct, found.p90_abs_pct, found.worst_abs_pct)
                cells = (name, WORDS[kind], str(found.n), *(f"{value:.1f}" for value in values), f"{found.bias_pct:+.1f}")
                rows.append(TableRow(cells=cells, tone="quiet" if kind == "naive_time" else "plain"))
    return Table(title="Errors", columns=columns, rows=tuple(rows))


def _coverage_table(result: dict[str, Any]) -> Table:
    rows = []
    for name, entry in result["files"].items():
        left = "; ".join(f"{count} x {reason}" for reason, count in entry["skipped"].items())
        rows.append(TableRow(cells=(name, str(entry["eligible"]), f"{entry['coverage_pct']:.1f} %", left)))
    columns = (Column(name="file"), Column(name="eligible", align="right"), Column(name="predicted", align="right"))
    return Table(title="Rows", columns=(*columns, Column(name="left out")), rows=tuple(rows))


def rows_csv(done: dict[str, list[Prediction]], skipped: Sequence[tuple[str, int, str]]) -> bytes:
    """Every row with its prediction, its errors and the terms of its time, as CSV."""
    every = [item for each in done.values() for item in each]
    names = list(dict.fromkeys(term.name for item in every for term in item.terms))
    head = ["file", "line", "source", "model", "gpu", "framework", "skipped", "step_time_s", "predicted_s", "naive_s"]
    head += ["static_gib", "predicted_static_gib", "peak_gib", "predicted_peak_gib", *(f"{kind}_error_pct" for kind in KINDS)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*head, *(f"{name} s" for name in names)])
    for item in every:
        case, shown = item.case, {term.name: term.exposed_seconds for term in item.terms}
        sizes = (case.static_bytes, item.static_bytes, case.peak_bytes, item.peak_bytes)
        writer.writerow(
            [
                *(case.file, case.line, case.source, case.model, case.kind, case.framework, ""),
                *map(_cell, (case.seconds, item.seconds, item.naive)),
                *(_cell(size / GIB if size is not None else None) for size in sizes),
                *(_cell(item.error(kind)) for kind in KINDS),
                *(_cell(shown.get(name)) for name in names),
            ]
        )
    for file, line, reason in skipped:
        writer.writerow([file, line, "", "", "", "", reason])
    return out.getvalue().encode()


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
