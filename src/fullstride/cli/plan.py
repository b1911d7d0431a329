"""`fullstride plan`: which plan, how long a step, how much memory, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from fullstride.cli.choose import choose_model, own_tokenizer
from fullstride.cli.command import add_dry_run, add_lora, add_parts, model_of, positive, refuse_existing
from fullstride.cli.machine import choose_cluster, cluster_words
from fullstride.cli.output import Output
from fullstride.cluster.cluster import Cluster
from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.model.spec import ModelSpec
from fullstride.plan.calibration import calibrated
from fullstride.plan.defaults import default_workload
from fullstride.plan.explain import explain_ranking
from fullstride.plan.plan import Plan, Recipe
from fullstride.plan.rules import not_run
from fullstride.plan.search import Ranking, search
from fullstride.plan.toml import write_plan

MULTIPLES = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


class PlanVerb:
    """Rank the plans for a model on a machine: time of a step, memory, and why.

    MODEL is a preset (llama3-8b, tiny, ...), a config.json, a model directory, or file.py:function or
    package.module:function that returns an nn.Module. Without a cluster file it plans for this machine's GPUs, else
    for an assumed h100-sxm cluster, which its first line then says. Neither torch nor a GPU is needed.

    Every layout is considered that any framework could run: data, tensor, pipeline, context and expert parallelism. What
    this version runs itself is marked, and -o writes the best of that; with --why, the best with that choice.
    """

    name = "plan"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("model", metavar="MODEL", help="preset, config.json, model directory, file.py:function")
        parser.add_argument("--cluster", metavar="FILE", help="cluster file that `fullstride probe -o` wrote")
        parser.add_argument("--gpu", metavar="KIND", help="kind of GPU, such as h200-sxm; cpu for this host's processors")
        parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs in all")
        parser.add_argument("--gpus-per-node", type=positive, metavar="M", help="GPUs in a node (8 when not given)")
        parser.add_argument("--seq", type=positive, metavar="S", help="tokens of a sample")
        parser.add_argument("--global-batch", type=positive, metavar="B", help="samples of one optimizer step, over all GPUs")
        add_lora(parser)
        add_parts(parser)
        parser.add_argument("--tokens", type=amount, metavar="T", help="budget of tokens, such as 15T: shows its GPU-days")
        parser.add_argument("--why", metavar="CHOICE", help="answer about a choice, such as tp=8,pp=4,zero=1,micro_batch=2")
        parser.add_argument("-o", dest="output", metavar="FILE", help="write the best plan that this version runs (TOML)")
        parser.add_argument("--any", action="store_true", help="with -o: write the best plan even if it is only priced so far")
        add_dry_run(parser, "written")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Search, write and show."""
        target = Path(args.output) if args.output else None
        if target:
            refuse_existing(target)
        cluster = calibrated(choose_cluster(args.cluster, args.gpu, args.gpus, args.gpus_per_node), "fsdp2")
        if cluster.assumed:
            out.warn(cluster_words(cluster))
        ranking, spec = _search(args, cluster)
        if args.why:
            return _answer(args, ranking, spec, cluster, out)
        if target:
            _write(_chosen(ranking, anyhow=args.any), target, args.dry_run, out)
        out.show(explain_ranking(ranking, spec, cluster, args.tokens), ranking)
        return 0


def amount(text: str) -> float:
    """A number of tokens: `15T`, `300B`, `1e12`."""
    factor = MULTIPLES.get(text[-1:], 1.0)
    number = float(text[:-1] if text[-1:] in MULTIPLES else text) * factor
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens")
    return number


def _search(args: argparse.Namespace, cluster: Cluster) -> tuple[Ranking, ModelSpec]:
    model, spec = choose_model(model_of(args.model, args.part))
    workload = default_workload(
        spec,
        cluster,
        sequence_length=args.seq,
        samples_per_step=args.global_batch,
        tokenizer=own_tokenizer(args.model),
        num_ranks=args.gpus,
        to_run=False,
    )
    return search(spec, cluster, model, workload, Recipe(), num_ranks=args.gpus, to_run=False, adapter=args.lora), spec


def _answer(args: argparse.Namespace, ranking: Ranking, spec: ModelSpec, cluster: Cluster, out: Output) -> int:
    """Answer `--why`; with -o the best plan with that choice is written.

    Raises:
        RuleBroken: there is none, or this version does not run it and --any is not given.
    """
    from fullstride.plan.why import why, why_document  # seldom asked, and the command starts faster without

    answer = why(args.why, ranking, spec, cluster)
    if args.output:
        if answer.plan is None:
            raise RuleBroken(f"--why {args.why}: {answer.words[0]}", fix="ask for another choice")
        waiting = () if args.any else not_run(answer.plan, spec, cluster)
        if waiting:
            raise RuleBroken(f"priced, and not run by this version: {waiting[0].message}", fix="--any writes it all the same")
        _write(answer.plan, Path(args.output), args.dry_run, out)
    out.show(why_document(answer, ranking, spec, cluster), answer)
    return 0


def _chosen(ranking: Ranking, *, anyhow: bool) -> Plan:
    """The plan to write.

    Raises:
        DoesNotFit: this version runs none of those that fit.
    """
    plan = ranking.best[0] if anyhow else ranking.best_runnable
    if plan is None:
        raise DoesNotFit(
            "no plan that this version runs fits", fix="use more or larger GPUs, or --any to write the plan that is only priced"
        )
    return plan


def _write(plan: Plan, target: Path, dry_run: bool, out: Output) -> None:
    if dry_run:
        out.note(f"would write {target}")
        return
    write_plan(plan, target)
    out.note(f"wrote {target}")


VERB = PlanVerb()
