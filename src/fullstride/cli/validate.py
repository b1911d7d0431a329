"""`fullstride validate`: how far predictions are from published runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from fullstride.cli.command import refuse_existing
from fullstride.cli.output import Output
from fullstride.cli.record import read_run
from fullstride.errors import BadInput
from fullstride.files import write_bytes
from fullstride.measure.measurement import Measurement
from fullstride.plan.validation.measured import case_of
from fullstride.plan.validation.page import document_of, rows_csv
from fullstride.plan.validation.predict import predict_file, summary
from fullstride.plan.validation.rows import Case, Skip, read_rows


class Validate:
    """Hold predictions against published runs: error of time and memory, file by file and in all.

    FILE is a CSV file of published runs (one a row; columns as in docs/validation.md), or a run directory or its
    measurement.json that `bench` left. Beside each error stands that of the best constant-utilisation model, fitted on the
    same file. Rows that say too little are counted by reason.
    """

    name = "validate"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("files", metavar="FILE", nargs="+", help="CSV file of runs, or a run directory that was measured")
        parser.add_argument("--rows", metavar="FILE", help="write every row with its prediction and terms, as CSV")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Read, predict, write and show."""
        target = Path(args.rows) if args.rows else None
        if target:
            refuse_existing(target)
        files: dict[str, list[Case | Skip]] = {}
        for text in args.files:
            files[_free_name(Path(text), files)] = _read(Path(text))
        done = {name: predict_file(rows) for name, rows in files.items()}
        result = summary(files, done)
        if target:
            skipped = [(row.file, row.line, row.reason) for rows in files.values() for row in rows if isinstance(row, Skip)]
            write_bytes(target, rows_csv(done, skipped))
            out.note(f"wrote {target}")
        out.show(document_of(result, done), result, "validation")
        return 0


def _free_name(path: Path, taken: dict[str, list[Case | Skip]]) -> str:
    """A file's name; its whole path where two files have one name."""
    return path.name if path.name not in taken else str(path)


def _read(path: Path) -> list[Case | Skip]:
    if not path.exists():
        raise BadInput(f"{path}: no such file", fix="give a CSV file of published runs")
    if path.suffix != ".csv":
        return [_measured(path)]
    return read_rows(path)


def _measured(path: Path) -> Case | Skip:
    record = read_run(path if path.is_dir() else path.parent)
    measured = record.measurement or (record.comparison.base if record.comparison else None)
    if not isinstance(measured, Measurement):
        return Skip(path.name, 0, "holds no measurement")
    if record.plan is None or record.model is None or record.cluster is None:
        return Skip(path.name, 0, "plan, model or cluster does not stand beside the measurement")
    if record.plan.plan_hash != measured.plan_hash:
        return Skip(path.name, 0, "the measurement is of another plan than the one beside it")
    memory = measured.memory
    return case_of(
        str(path), record.plan, record.model, record.cluster, measured.step_seconds.value,
        memory.static_bytes, memory.peak_allocated_bytes,
    )  # fmt: skip


VERB = Validate()
"""The one object of this verb."""
