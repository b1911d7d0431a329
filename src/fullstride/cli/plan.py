"""`fullstride plan`: which plan, how long a step, how much memory, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from fullstride.cli.choose import rank_plans
from fullstride.cli.command import add_dry_run, positive, refuse_existing
from fullstride.cli.machine import choose_cluster, cluster_words
from fullstride.cli.output import Output
from fullstride.plan.explain import explain_ranking
from fullstride.plan.toml import write_plan


class PlanVerb:
    """Rank the plans for a model on a machine: time of a step, memory, and why.

    MODEL is a preset (llama3-8b, tiny, ...), a config.json, a model directory, or file.py:function or
    package.module:function that returns an nn.Module. Without a cluster file it plans for this machine's GPUs, else
    for an assumed h100-sxm cluster, which its first line then says. Neither torch nor a GPU is needed.
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
        parser.add_argument("-o", dest="output", metavar="FILE", help="write the best plan, a TOML file to read and edit")
        add_dry_run(parser, "written")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Search, write and show."""
        target = Path(args.output) if args.output else None
        if target:
            refuse_existing(target)
        cluster = choose_cluster(args.cluster, args.gpu, args.gpus, args.gpus_per_node)
        if cluster.assumed:
            out.warn(cluster_words(cluster))
        ranking, spec = rank_plans(
            args.model, cluster, sequence_length=args.seq, samples_per_step=args.global_batch, num_ranks=args.gpus
        )
        best = ranking.best[0]
        if target and args.dry_run:
            out.note(f"would write {target}")
        elif target:
            write_plan(best, target)
            out.note(f"wrote {target}")
        out.show(explain_ranking(ranking, spec, cluster), ranking)
        return 0


VERB = PlanVerb()
