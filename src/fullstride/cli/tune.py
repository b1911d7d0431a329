"""`fullstride tune`: the closed loop."""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from fullstride.cli.command import add_dry_run, add_lora, add_parts, minutes, model_of, positive
from fullstride.cli.foreign import is_own_plan, plan_to_run
from fullstride.cli.output import Output
from fullstride.cli.record import PAGE, read_run
from fullstride.cli.report import ladder_page
from fullstride.cli.tuning import DEFAULT_MODEL, Task, best_path, carry_out, new_task, resumed_task, task_of_plan
from fullstride.errors import RunFailed, UsageError
from fullstride.plan.plan import Plan
from fullstride.plan.toml import plan_text
from fullstride.report.document import AnyBlock, Chart, Code, Document, Heading, Tone
from fullstride.report.progress import ProgressView
from fullstride.tune.loop import MAX_RUNGS
from fullstride.tune.progress import TunePhase, TuneProgress
from fullstride.tune.trial import Ladder, Outcome


class Tune:
    """Find what is really fastest here: measure, change one thing, keep it only if it is proven better.

    With no arguments it tunes a small real model on this machine. The baseline is what a user would write by hand, or
    --baseline. Ends with best.toml, ladder.json and report.html in the run directory; where nothing wins it says that
    the baseline stands, which is a result and exits 0. Ctrl-C stops it, and --resume goes on.
    """

    name = "tune"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("model", metavar="MODEL", nargs="?", help=f"as for plan ({DEFAULT_MODEL})")
        parser.add_argument("--data", metavar="PATH", help="text, JSONL or Parquet (the Python library's sources)")
        parser.add_argument("--seq", type=positive, metavar="S", help="tokens of a sample")
        parser.add_argument("--global-batch", type=positive, metavar="B", help="samples of one optimizer step, over all ranks")
        add_lora(parser)
        add_parts(parser)
        parser.add_argument("--minutes", type=minutes, metavar="M", help="time allowed (4.5 on CPUs, 10 on GPUs)")
        parser.add_argument("--baseline", metavar="FILE", help="your own plan, DeepSpeed JSON or torchtitan TOML to start from")
        parser.add_argument("-o", dest="output", metavar="DIR", help="run directory (runs/tune-DATE-MODEL)")
        parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in -o DIR")
        add_dry_run(parser, "tuned")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Tune, then show what came of it."""
        task = _task(args, out)
        if args.dry_run:
            time = f"{task.budget_seconds / 60:g} minutes"
            out.note(f"would tune {task.spec.name} in {task.directory} for {time}, starting from this plan")
            plan = Code(text=plan_text(task.baseline), title="the baseline", language="toml")
            out.show(Document(title=f"{task.spec.name}: where tuning would start", blocks=(plan,)), task.baseline)
            return 0
        ladder = _watched(task, out)
        if ladder.baseline is None:
            raise RunFailed(ladder.stopped or "the baseline was not measured", fix=f"see {task.directory}/logs")
        record = read_run(task.directory)
        out.note(f"wrote {best_path(task.directory)} and {record.root}/{PAGE}")
        out.show(summary_of(ladder_page(ladder, record)), ladder)
        return 0


def _task(args: argparse.Namespace, out: Output) -> Task:
    work = {"MODEL": args.model, "--data": args.data, "--seq": args.seq, "--global-batch": args.global_batch}
    work |= {"--lora": args.lora, "--part": args.part or None}
    given = [name for name, value in work.items() if value is not None]
    if args.resume:
        if not args.output:
            raise UsageError("--resume needs the run to go on with", fix="give its directory with -o")
        if given or args.baseline:
            raise UsageError(
                f"--resume and {(given or ['--baseline'])[0]}: the work is that of the run in -o", fix="leave it out"
            )
        return resumed_task(args.output, args.minutes)
    if args.baseline:
        return task_of_plan(_baseline(args, given, out), out, minutes=args.minutes, directory=args.output)
    return new_task(
        model_of(args.model or DEFAULT_MODEL, args.part),
        data=args.data,
        sequence_length=args.seq,
        samples_per_step=args.global_batch,
        minutes=args.minutes,
        directory=args.output,
        adapter=args.lora,
    )


def _baseline(args: argparse.Namespace, given: list[str], out: Output) -> Plan:
    """The plan to start from; another framework's file leaves parts of the work open, which the options then say."""
    if given and is_own_plan(args.baseline):
        raise UsageError(f"--baseline and {given[0]}: the plan says what the work is", fix="change it in the plan file")
    plan = plan_to_run(
        args.baseline,
        out,
        model=args.model,
        sequence_length=args.seq,
        samples_per_step=args.global_batch,
        data=args.data,
    )
    plan = replace(plan, model=model_of(plan.model.source, args.part)) if args.part else plan
    return replace(plan, adapter=args.lora) if args.lora else plan


def _watched(task: Task, out: Output) -> Ladder:
    title = f"tune {task.spec.name} in {task.directory}"
    try:
        with ProgressView(title, budget_seconds=task.budget_seconds, num_trials=MAX_RUNGS) as view:
            return carry_out(task, view.phase, lambda text: view.note(text, "quiet"), Watcher(view))
    except KeyboardInterrupt:
        out.note(f"stopped; `fullstride tune --resume -o {task.directory}` goes on")
        raise


_PHASES: dict[TunePhase, str] = {
    "baseline": "measuring the baseline",
    "noise": "measuring the baseline against itself",
    "final": "measuring the best plan against the baseline",
    "done": "finishing",
}
_TONES: dict[Outcome, Tone] = {"kept": "good", "undone": "plain", "failed": "bad", "not tried": "quiet"}


class Watcher:
    """Turns what the loop tells into lines of the progress view."""

    def __init__(self, view: ProgressView) -> None:
        """Begin before the first phase."""
        self._view = view
        self._now: tuple[str, int] = ("", -1)

    def __call__(self, told: TuneProgress) -> None:
        """Show one sign of life."""
        if told.ended:
            trial = told.ended
            self._view.verdict(trial.lever, trial.outcome, f"{trial.change}: {trial.reason}", _TONES[trial.outcome])
            return
        now = (told.phase, told.index if told.phase == "trial" else 0)
        if now != self._now:
            self._now = now
            if told.phase == "trial":
                self._view.trial(told.lever, told.change, told.predicted_ratio)
            else:
                self._view.phase(_PHASES[told.phase])
        if told.step_seconds is not None:
            self._view.step(told.step_seconds, label=told.plan_name)


_SHORT_SECTIONS = ("", "The ladder", "Predictions")


def summary_of(page: Document) -> Document:
    """The parts of the page that fit a terminal: the answer, the ladder, how far off the predictions were."""
    section, kept = "", list[AnyBlock]()
    for block in page.blocks:
        section = block.text if isinstance(block, Heading) else section
        if section in _SHORT_SECTIONS and not isinstance(block, Chart):
            kept.append(block)
    return Document(title=page.title, subtitle=page.subtitle, blocks=tuple(kept))


VERB = Tune()
