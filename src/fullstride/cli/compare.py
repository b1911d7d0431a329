"""`fullstride compare`: is the second plan really better than the first?"""

from __future__ import annotations

import argparse
import time

from fullstride.cli.choose import is_plan_file
from fullstride.cli.command import add_dry_run, minutes
from fullstride.cli.measuring import (
    FULL_MINUTES,
    SHORT_MINUTES,
    driver_of,
    failed,
    fresh_run_dir,
    read_runnable,
    settings_of,
)
from fullstride.cli.output import Output
from fullstride.cli.record import COMPARISON, PAGE
from fullstride.errors import BadInput, RunFailed, Undetermined, UsageError
from fullstride.files import read_json, write_bytes, write_json
from fullstride.measure.compare import compare_files
from fullstride.measure.measurement import Comparison, Measurement
from fullstride.measure.page import comparison_document
from fullstride.report.html import html_of
from fullstride.report.progress import ProgressView
from fullstride.rundir import Failure, RunDir
from fullstride.tune.driver import Record, compare


class Compare:
    """Say whether plan B is really better than plan A, with an interval.

    Two plan files are measured in turns on this machine (A B A B ...), on the same samples. Two measurement files are
    only set beside each other: the ratio is then marked "not interleaved", and there is no verdict.
    """

    name = "compare"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("a", metavar="A", help="plan file (TOML), or measurement file (JSON)")
        parser.add_argument("b", metavar="B", help="the same kind of file")
        parser.add_argument("-o", dest="output", metavar="RUN_DIR", help="run directory (runs/compare-TIME-MODEL)")
        parser.add_argument("--full", action="store_true", help="300 + 1,000 steps, three rounds each")
        parser.add_argument("--minutes", type=minutes, metavar="M", help="stop after this long (6; with --full 1200)")
        add_dry_run(parser, "launched")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Measure in turns, or read; then write and show."""
        if is_plan_file(args.a) != is_plan_file(args.b):
            raise UsageError(f"{args.a} and {args.b} are not the same kind of file", fix="give two plans or two measurements")
        if not is_plan_file(args.a):
            comparison = compare_files(read_json(args.a, Measurement), read_json(args.b, Measurement))
            out.show(comparison_document(comparison), comparison)
            return 0
        return self._in_turns(args, out)

    def _in_turns(self, args: argparse.Namespace, out: Output) -> int:
        plan_a, spec, cluster = read_runnable(args.a, out)
        plan_b, _, _ = read_runnable(args.b, out)
        for part in ("model", "workload", "recipe"):
            if getattr(plan_a, part) != getattr(plan_b, part):
                raise BadInput(f"{args.a} and {args.b}: [{part}] differs, so they do different work", fix="make it equal")
        run_dir = fresh_run_dir("compare", args.output, spec.name)
        if args.dry_run:
            out.note(f"would measure {args.a} and {args.b} in turns into {run_dir.root}")
            out.show(None, {"a": args.a, "b": args.b, "run_dir": run_dir.root}, "dry run")
            return 0
        budget = 60 * (args.minutes or 2 * (FULL_MINUTES if args.full else SHORT_MINUTES))
        deadline = time.monotonic() + budget
        with (
            ProgressView(f"compare {args.a} {args.b}", budget_seconds=budget) as view,
            driver_of(run_dir, plan_a, spec, cluster, view) as driver,
        ):
            view.phase("measuring in turns")
            records = Record(name="A", plan=plan_a), Record(name="B", plan=plan_b)
            comparison = compare(driver, *records, settings_of(args.full), deadline)
        if isinstance(comparison, Failure):
            raise failed(comparison, run_dir)
        return _show(comparison, run_dir, out)


def _show(comparison: Comparison, run_dir: RunDir, out: Output) -> int:
    document = comparison_document(comparison)
    write_json(run_dir.path / COMPARISON, comparison)
    write_bytes(run_dir.path / PAGE, html_of(document).encode())
    write_bytes(run_dir.done, b"")
    out.note(f"wrote {run_dir.path / COMPARISON} and {run_dir.path / PAGE}")
    out.show(document, comparison)
    return {"undetermined": Undetermined.exit_code, "void": RunFailed.exit_code}.get(comparison.verdict, 0)


VERB = Compare()
