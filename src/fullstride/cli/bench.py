"""`fullstride bench`: one plan, measured by the protocol."""

from __future__ import annotations

import argparse
import time

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
from fullstride.cli.record import PAGE
from fullstride.files import write_bytes, write_json
from fullstride.measure.page import measurement_document
from fullstride.measure.pipeline_page import pipeline_blocks, with_pipeline, write_perfetto
from fullstride.report.html import html_of
from fullstride.report.progress import ProgressView
from fullstride.rundir import Failure
from fullstride.tune.driver import Record, bench


class Bench:
    """Measure a plan: step time with its interval, where the time goes, memory, health.

    The short form stops once the interval is narrow enough; --full is the form for figures to publish: 300 warm-up
    steps, 1,000 timed ones, three rounds.
    """

    name = "bench"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument(
            "plan", metavar="PLAN", help="plan file, DeepSpeed JSON, torchtitan TOML or another that convert reads"
        )
        parser.add_argument("--model", metavar="MODEL", help="as for plan, where PLAN is a foreign file that names none")
        parser.add_argument("-o", dest="output", metavar="RUN_DIR", help="run directory (runs/bench-TIME-MODEL)")
        parser.add_argument("--full", action="store_true", help="300 + 1,000 steps, three rounds")
        parser.add_argument("--minutes", type=minutes, metavar="M", help="stop after this long (3; with --full 600)")
        add_dry_run(parser, "launched")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Measure, write, show."""
        plan, spec, cluster = read_runnable(args.plan, out, args.model)
        run_dir = fresh_run_dir("bench", args.output, spec.name)
        if args.dry_run:
            out.note(f"would measure {args.plan} with {plan.layout.world_size} ranks into {run_dir.root}")
            out.show(None, plan)
            return 0
        budget = 60 * (args.minutes or (FULL_MINUTES if args.full else SHORT_MINUTES))
        deadline = time.monotonic() + budget
        with (
            ProgressView(f"bench {args.plan}", budget_seconds=budget) as view,
            driver_of(run_dir, plan, spec, cluster, view) as driver,
        ):
            view.phase("measuring")
            measured = bench(driver, Record(name="plan", plan=plan), settings_of(args.full), deadline)
        if isinstance(measured, Failure):
            raise failed(measured, run_dir)
        document = with_pipeline(measurement_document(measured), pipeline_blocks(run_dir, plan, spec, cluster))
        write_perfetto(run_dir, plan, spec, cluster)
        write_json(run_dir.measurement, measured)
        write_bytes(run_dir.path / PAGE, html_of(document).encode())
        write_bytes(run_dir.done, b"")
        out.note(f"wrote {run_dir.measurement} and {run_dir.path / PAGE}")
        out.show(document, measured)
        return 0


VERB = Bench()
