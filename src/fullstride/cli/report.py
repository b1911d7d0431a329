"""`fullstride report`: the page of whatever ran."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from fullstride.cli.command import add_dry_run, refuse_existing
from fullstride.cli.output import Output
from fullstride.cli.record import BEST, PAGE, RunRecord, Shown, read_run, read_shown
from fullstride.files import write_bytes
from fullstride.measure.measurement import Comparison, Measurement
from fullstride.measure.page import comparison_document, measurement_document
from fullstride.measure.pipeline_page import pipeline_blocks, with_pipeline
from fullstride.measure.training_page import training_document
from fullstride.report.document import AnyBlock, Document
from fullstride.report.html import html_of
from fullstride.rundir import RunDir
from fullstride.tune.page import ladder_document
from fullstride.tune.trial import Ladder


class Report:
    """Make the page of a run: one HTML file that needs nothing else.

    RUN is a run directory of train, bench, compare or tune, or a JSON file that one of them wrote. The page is made
    from what the run left on disk, on any machine, without torch.
    """

    name = "report"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("run", metavar="RUN", help="run directory, or a ladder, comparison or measurement file")
        parser.add_argument("-o", dest="output", metavar="FILE.html", help="where the page goes (RUN/report.html)")
        add_dry_run(parser, "written")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Read, write the page, say where it is."""
        source = Path(args.run)
        target = Path(args.output) if args.output else default_page(source)
        if args.output or not source.is_dir():
            refuse_existing(target)
        document = page_of_record(read_run(source)) if source.is_dir() else page_of_value(read_shown(source))
        if args.dry_run:
            out.note(f"would write {target}")
        else:
            renewed = target.exists()
            write_bytes(target, html_of(document).encode())
            out.note(f"{'renewed' if renewed else 'wrote'} {target}")
        out.show(None, {"page": str(target), "title": document.title}, "report")
        return 0


def default_page(source: Path) -> Path:
    """`report.html` in a run directory, which is made anew each time; beside a file, under its name."""
    return source / PAGE if source.is_dir() else source.with_suffix(".html")


def page_of_record(record: RunRecord) -> Document:
    """The page of a run directory: of its ladder, else its comparison, its measurement, its training."""
    if record.ladder:
        return ladder_page(record.ladder, record)
    if record.comparison:
        return comparison_document(record.comparison)
    if record.measurement:
        return with_pipeline(measurement_document(record.measurement), _pipeline(record))
    return training_document(RunDir(root=record.root))


def _pipeline(record: RunRecord) -> tuple[AnyBlock, ...]:
    """The pipeline of a measured plan, where there is one."""
    if record.plan is None or record.model is None or record.cluster is None:
        return ()
    return pipeline_blocks(RunDir(root=record.root), record.plan, record.model, record.cluster)


def ladder_page(ladder: Ladder, record: RunRecord) -> Document:
    """The page of a tuning run, with the machine and the command to train with."""
    return ladder_document(
        ladder,
        cluster=record.cluster,
        spec_name=record.model.name if record.model else ladder.best_plan.model.source,
        run_dir=record.root,
        train_command=train_command(record.root, ladder),
    )


def page_of_value(value: Shown) -> Document:
    """The page of one file."""
    if isinstance(value, Document):
        return value
    if isinstance(value, Comparison):
        return comparison_document(value)
    if isinstance(value, Measurement):
        return measurement_document(value)
    return ladder_page(value, RunRecord(root="."))


def train_command(root: str, ladder: Ladder) -> str:
    """The line that trains with the best plan of a tuning run."""
    return shlex.join(["fullstride", "train", str(Path(root) / BEST), "--data", ladder.best_plan.workload.data])


VERB = Report()
