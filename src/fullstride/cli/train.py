"""`fullstride train`: run a plan to its end, and go on where it stopped."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from fullstride.cli.choose import checked, choose_model, is_plan_file, override, own_tokenizer, plan_here
from fullstride.cli.claim import default_run_dir, error_of, fill, look, wait_until_filled
from fullstride.cli.command import add_dry_run, add_lora, add_parts, model_of, positive
from fullstride.cli.follow import Tail, show
from fullstride.cli.output import Output
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import BadInput, UsageError
from fullstride.launch.command import worker_command
from fullstride.launch.failure import failure_of, oom_kills
from fullstride.launch.job import Job
from fullstride.launch.local import Process, start
from fullstride.model.source import is_module_source
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.toml import read_plan
from fullstride.report.progress import ProgressView
from fullstride.rundir import RunDir

_POLL_SECONDS = 0.1
_SAVE_SECONDS = 120.0
"""How long an interrupted run may take to save before it is killed."""

_END_SECONDS = 5.0
"""How long workers may stay once one of them has told of a failure: their launcher would wait longer for one that hangs."""


class Train:
    """Train with a plan; the same command goes on from the newest whole checkpoint.

    PLAN is a plan file, or a model (preset, config.json, model directory, file.py:function) that is planned for this
    machine first. Where RANK and WORLD_SIZE are set (torchrun, Slurm, Kubernetes) it joins that group and launches
    nothing. Ctrl-C saves a checkpoint and ends.
    """

    name = "train"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("plan", metavar="PLAN", help="plan file, or a model to plan for first")
        parser.add_argument(
            "--data", metavar="PATH", help="text, JSONL or Parquet: a file or a folder (the plan's when not given)"
        )
        parser.add_argument("--eval", metavar="PATH", help="held-out data; its loss is printed")
        parser.add_argument("--init", metavar="DIR", help="model directory to start from (weights and config)")
        parser.add_argument("-o", dest="output", metavar="RUN_DIR", help="run directory (runs/train-MODEL-WORK)")
        parser.add_argument("--steps", type=positive, metavar="N", help="optimizer steps in all")
        parser.add_argument(
            "--set", action="append", default=[], metavar="TABLE.ENTRY=VALUE", help="replace an entry of the plan"
        )
        add_lora(parser)
        add_parts(parser)
        parser.add_argument("--save-every", type=positive, metavar="N", help="steps between checkpoints")
        parser.add_argument(
            "--export", metavar="DIR", help="write a Hugging Face model directory at the end; adapters alone, in PEFT's form"
        )
        parser.add_argument("--merge", action="store_true", help="with --export: the whole model, adapters merged into it")
        add_dry_run(parser, "launched")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Prepare the run directory, launch or join, follow, and say how it ended."""
        plan, spec, cluster = _resolve(args, out)
        run_dir = RunDir(root=args.output) if args.output else default_run_dir("train", spec, plan)
        claim = look(run_dir, plan)
        job = worker_command(run_dir, plan, train=True, save_every=args.save_every, export=args.export, merge=args.merge)
        if args.dry_run:
            out.note(f"would {'resume' if claim == 'resumed' else 'start'} {run_dir.root} with\n{shlex.join(job.command)}")
            out.show(None, job)
            return 0
        if claim == "finished":
            out.note(f"{run_dir.root}: done already; give more --steps to go on, or another -o")
            out.show(None, _summary(run_dir, plan, None), "training")
            return 0
        if _joins():
            out.note(f"joining a group of {plan.layout.world_size} ranks as rank {os.environ['RANK']}, in {run_dir.root}")
            return _join(run_dir, plan, spec, cluster, job)
        out.note(f"{'resuming' if claim == 'resumed' else 'starting'} {run_dir.root}, {plan.layout.world_size} ranks")
        fill(run_dir, plan, cluster, spec)
        tail = _launch(job, run_dir, plan, out)
        loss = f", loss {tail.last.loss:.4f}" if tail.last else ""
        out.note(f"done: {plan.recipe.steps} steps{loss}; for the page: fullstride report {run_dir.root}")
        out.show(None, _summary(run_dir, plan, tail), "training")
        return 0


def _resolve(args: argparse.Namespace, out: Output) -> tuple[Plan, ModelSpec, Cluster]:
    """The plan with all that the command line changes in it, checked against the model and this machine."""
    joined = int(os.environ["WORLD_SIZE"]) if _joins() else None
    plan = (
        read_plan(args.plan) if is_plan_file(args.plan) else plan_here(model_of(args.plan, args.part), joined, out, args.lora)
    )
    if args.part and is_plan_file(args.plan):
        raise UsageError("--part with a plan: it names the parts itself", fix="use --set model.head=PATH, or edit the plan")
    quoted = [
        ("workload.data", args.data),
        ("workload.eval_data", args.eval),
        ("model.source", args.init),
    ]
    settings = [f"{entry}={_quote(value)}" for entry, value in quoted if value is not None]
    settings += [f"recipe.steps={args.steps}"] if args.steps else []
    settings += [f"adapter.rank={args.lora.rank}"] if args.lora else []
    plan = _with_tokenizer(override(plan, [*settings, *args.set]), args, out)
    _, spec = choose_model(plan.model)
    if args.merge and not (args.export and plan.adapter.rank):
        raise UsageError("--merge: there is nothing to merge", fix="give --export DIR and --lora RANK with it")
    if plan.adapter.rank and not is_module_source(plan.model.source) and not Path(plan.model.source).is_dir():
        out.warn(
            f"adapters beside weights of {plan.model.source} that nobody trained; start from a model directory with --init"
        )
    if joined is not None and joined != plan.layout.world_size:
        raise BadInput(
            f"WORLD_SIZE is {joined}, the plan is for {plan.layout.world_size} ranks", fix="start as many ranks as the plan has"
        )
    cluster = probe_cluster(num_ranks=plan.layout.world_size)
    checked(plan, spec, None if joined is not None else cluster, out)
    return plan, spec, cluster


def _with_tokenizer(plan: Plan, args: argparse.Namespace, out: Output) -> Plan:
    """Weights of a directory go on with its own tokenizer, unless the user names another."""
    named = any(setting.partition("=")[0].strip() == "workload.tokenizer" for setting in args.set)
    own = own_tokenizer(plan.model.source)
    if own is None or named or plan.workload.tokenizer != "bytes":
        return plan
    if args.init:
        out.note(f"tokens are those of {own}/tokenizer.json")
        return override(plan, [f"workload.tokenizer={_quote(own)}"])
    out.warn(
        f"the plan's tokenizer is bytes, and weights of {own} know the numbers of its own tokenizer.json; "
        f"--set workload.tokenizer={own} takes that"
    )
    return plan


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _joins() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _join(run_dir: RunDir, plan: Plan, spec: ModelSpec, cluster: Cluster, job: Job) -> int:
    """Become a worker of the group that somebody else started; this process is replaced."""
    if os.environ["RANK"] == "0":
        fill(run_dir, plan, cluster, spec)
    else:
        wait_until_filled(run_dir, plan)
    words = worker_words(job)
    os.environ.update(job.env)
    sys.stdout.flush()
    os.execv(words[0], list(words))


def worker_words(job: Job) -> tuple[str, ...]:
    """One rank's own command out of the launcher's: this Python, the worker's module, its arguments.

    Raises:
        UsageError: the job starts no worker module.
    """
    if "-m" not in job.command:
        raise UsageError("the job names no worker module", fix="launch it with its own command")
    last = len(job.command) - 1 - job.command[::-1].index("-m")
    return (sys.executable, *job.command[last:])


def _launch(job: Job, run_dir: RunDir, plan: Plan, out: Output) -> Tail:
    """Start the workers, show their steps, and wait for the end.

    Raises:
        RunFailed: they ended badly; the exit code follows the cause.
    """
    tail, kills, failed_at = Tail(run_dir.events(0)), oom_kills(), 0.0
    process = start(job)
    try:
        with ProgressView(f"train {plan.model.source}") as view:
            view.phase("building")
            while (code := process.poll()) is None:
                failed_at = (failed_at or time.monotonic()) if run_dir.failed.exists() else 0.0
                if failed_at and time.monotonic() - failed_at > _END_SECONDS:
                    process.kill()
                began = tail.last is not None
                told = tail.read()
                if tail.last and not began:
                    view.phase("training")
                show(told, view, plan.recipe.steps)
                time.sleep(_POLL_SECONDS)
            show(tail.read(), view, plan.recipe.steps)
    except KeyboardInterrupt:
        _let_it_save(process, out, run_dir)
        raise
    finally:
        process.close()
    if code != 0 or not run_dir.done.exists():
        raise error_of(failure_of(run_dir, code, oom_kills_before=kills), run_dir)
    return tail


def _let_it_save(process: Process, out: Output, run_dir: RunDir) -> None:
    out.note("saving a checkpoint (Ctrl-C again to kill)")
    process.terminate(grace_seconds=_SAVE_SECONDS)
    out.note(f"the same command resumes {run_dir.root}")


def _summary(run_dir: RunDir, plan: Plan, tail: Tail | None) -> dict[str, Any]:
    last, evaluation = (tail.last, tail.evaluation) if tail else (None, None)
    return {
        "run_dir": run_dir.root,
        "steps": plan.recipe.steps,
        "last_step": last.step if last else None,
        "loss": last.loss if last else None,
        "held_out_loss": evaluation.loss if evaluation else None,
    }


VERB = Train()
