"""`fullstride explain`: the ledger, the time terms and the timeline of one plan."""

from __future__ import annotations

import argparse

from fullstride.cli.choose import checked, choose_model
from fullstride.cli.machine import cluster_for, cluster_words
from fullstride.cli.output import Output
from fullstride.errors import DoesNotFit
from fullstride.plan.explain import explain_plan
from fullstride.plan.price import price
from fullstride.plan.toml import read_plan
from fullstride.units import format_bytes


class Explain:
    """Show where a plan's memory and time go, row by row and term by term.

    Every row and term names its formula's source and how far to trust it. Prices the plan on this machine where it is
    of the kind that the plan was made for, else on an assumed cluster of that kind; --cluster decides otherwise.
    """

    name = "explain"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Options of the verb."""
        parser.add_argument("plan", metavar="PLAN", help="plan file (TOML)")
        parser.add_argument("--cluster", metavar="FILE", help="cluster file that `fullstride probe -o` wrote")

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Price and show."""
        plan = read_plan(args.plan)
        cluster = cluster_for(plan, args.cluster)
        if cluster.assumed:
            out.warn(cluster_words(cluster))
        _, spec = choose_model(plan.model.source)
        checked(plan, spec, cluster, out)
        estimate = price(plan, spec, cluster)
        for warning in estimate.warnings:
            out.warn(warning)
        if not estimate.fits:
            missing = format_bytes(estimate.peak_device_bytes - estimate.capacity_bytes)
            fix = f"`fullstride plan {plan.model.source}` looks for a plan that fits"
            out.warn(f"needs {format_bytes(estimate.peak_device_bytes)} on a device, {missing} more than it has; {fix}")
        out.show(explain_plan(plan, estimate, spec, cluster), estimate)
        return 0 if estimate.fits else DoesNotFit.exit_code


VERB = Explain()
