"""`fullstride explain`: the ledger, the time terms and the timeline of one plan."""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from fullstride.cli.choose import choose_model
from fullstride.cli.command import positive
from fullstride.cli.foreign import tell
from fullstride.cli.machine import cluster_for, cluster_words
from fullstride.cli.output import Output
from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput, DoesNotFit
from fullstride.model.spec import ModelSpec
from fullstride.plan.calibration import calibrated
from fullstride.plan.coefficients_page import coefficients_table
from fullstride.plan.estimate import Estimate
from fullstride.plan.explain import against_blocks, explain_plan
from fullstride.plan.formats.detect import read_any
from fullstride.plan.plan import Plan
from fullstride.plan.price import price
from fullstride.plan.rules import inert, not_run, require
from fullstride.report.document import AnyBlock, Heading, Text
from fullstride.units import format_bytes

MOST_SIMULATED = 4096
"""Forward passes of stages (pp x chunks x micro-batches) up to which a timeline is drawn: a second of simulation."""


class Explain:
    """Show where a plan's memory and time go, row by row and term by term.

    PLAN is a plan file, or another framework's: DeepSpeed JSON, Megatron-LM arguments, torchtitan TOML, Accelerate YAML;
    what such a file does not say is given with --model, --gpus and --seq. Every row and term names its formula's source and
    how far to trust it. Prices the plan on this machine where it is of the kind that the plan was made for, else on an
    assumed cluster of that kind; --cluster decides otherwise. Layouts that this version does not run yet are priced too.
    """

    name = "explain"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("plan", metavar="PLAN", help="plan file (TOML), or another framework's configuration")
        parser.add_argument("--cluster", metavar="FILE", help="cluster file that `fullstride probe -o` wrote")
        parser.add_argument("--against", metavar="OTHER", help="another plan: which is faster, by tokens a second, and why")
        parser.add_argument("--model", metavar="MODEL", help="preset, config.json or directory, before what a file says")
        parser.add_argument("--gpus", type=positive, metavar="N", help="GPUs in all, before what another framework's file says")
        parser.add_argument("--seq", type=positive, metavar="S", help="tokens of a sample, before what such a file says")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Price and show."""
        plan, spec = _read(args.plan, args, out)
        here = cluster_for(plan, args.cluster)
        cluster = calibrated(here, plan.shard.carrier)
        if cluster.assumed:
            out.warn(cluster_words(cluster))
        estimate = _priced(plan, spec, cluster, out)
        document = explain_plan(plan, estimate, spec, cluster)
        more: list[AnyBlock] = [*_timeline(plan, spec, cluster), *coefficients_table(cluster)]
        if args.against:
            other, its_spec = _read(args.against, args, out)
            its = _priced(other, its_spec, calibrated(here, other.shard.carrier), out)
            more += against_blocks(plan, estimate, other, its)
        out.show(replace(document, blocks=(*document.blocks, *more)), estimate)
        return 0 if estimate.fits else DoesNotFit.exit_code


def _read(path: str, args: argparse.Namespace, out: Output) -> tuple[Plan, ModelSpec]:
    """A plan of any kind of file, and its model.

    Raises:
        BadInput: damaged, it says too little, or the plan was made for another network.
    """
    imported = read_any(path, args.model, num_ranks=args.gpus, sequence_length=args.seq)
    plan = imported.require_plan()
    tell(imported, out)
    spec = imported.spec() or choose_model(plan.model)[1]
    if imported.kind == "fullstride" and plan.model.digest and spec.digest != plan.model.digest:
        raise BadInput(
            f"{plan.model.source}: is another network than the plan was made for",
            fix="plan again for this model, or empty model.digest in the plan to use it all the same",
        )
    return plan, spec


def _priced(plan: Plan, spec: ModelSpec, cluster: Cluster, out: Output) -> Estimate:
    """The plan's estimate; says what keeps it from running or fitting.

    Raises:
        RuleBroken: no framework could do it.
    """
    require(plan, spec, cluster, to_run=False)
    if waiting := not_run(plan, spec, cluster):
        out.warn(f"priced, and not run by this version: {waiting[0].message}")
    for line in inert(plan):
        out.warn(line)
    estimate = price(plan, spec, cluster)
    if not estimate.fits:
        missing = format_bytes(estimate.peak_device_bytes - estimate.capacity_bytes)
        fix = f"`fullstride plan {plan.model.source}` looks for a plan that fits"
        out.warn(f"needs {format_bytes(estimate.peak_device_bytes)} on a device, {missing} more than it has; {fix}")
    return estimate


def _timeline(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[AnyBlock, ...]:
    """The pipeline's timeline, where there is one that can be looked at."""
    layout, passes = plan.layout, plan.layout.pp * plan.pipeline.chunks * plan.batch.accumulation
    if layout.pp == 1:
        return ()
    if passes > MOST_SIMULATED:
        told = f"{passes} passes of stages are too many for a picture; the bubble above is in closed form."
        return (Text(text=told, tone="quiet"),)
    # Other plans need no simulator, and the command starts faster without.
    from fullstride.plan.pipeline import plan_timeline
    from fullstride.plan.sizes_page import sizes_blocks
    from fullstride.plan.timeline_page import timeline_blocks

    timeline = plan_timeline(plan, spec, cluster)
    blocks: list[AnyBlock] = [Heading(text="The pipeline's timeline, simulated"), *timeline_blocks(timeline)]
    if plan.pipeline.schedule_file:
        order = f"In the order of {plan.pipeline.schedule_file}; terms and rows above are those of {plan.pipeline.schedule}."
        blocks.insert(1, Text(text=order))
        fullest, most = max(timeline.ranks, key=lambda rank: rank.peak_bytes), cluster.device.memory_bytes.value
        if fullest.peak_bytes > most:
            needs = f"{format_bytes(round(fullest.peak_bytes))} on a device of {format_bytes(round(most))}"
            blocks.insert(2, Text(text=f"In this order rank {fullest.rank} needs {needs}.", tone="bad"))
    return *blocks, *sizes_blocks(plan, spec, cluster, timeline)


VERB = Explain()
