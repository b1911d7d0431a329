"""Boundaries of stages and their micro-batch sizes for a pipeline that a search has found, chosen by the simulator.

The search prices closed forms, with blocks split as evenly as they go and one size for all stages. For the few plans that
come out best the simulator moves blocks and changes sizes; what it finds is kept where it is faster in the simulation, by the
closed forms as well, and fits.
"""

from __future__ import annotations

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.model.spec import ModelSpec
from fullstride.plan.axes import Wishes, legal
from fullstride.plan.cost.lanes import ranks
from fullstride.plan.cost.pieces import pieces
from fullstride.plan.pipeline import balanced_layers, choose_sizes, plan_timeline, samples_of
from fullstride.plan.placement import slowest
from fullstride.plan.plan import Plan
from fullstride.plan.price import price
from fullstride.plan.stages import num_stages
from fullstride.plan.verdict import Priced

MOST_PASSES = 1024
"""Forward passes of stages in one step up to which blocks are moved: some milliseconds a simulation."""
ACTIONS = 20_000
"""Actions that may be simulated for one plan."""
MOST_SIZED = 256
"""Passes up to which sizes are tried, of which there are many more."""
GAIN = 1e-3
"""A plan that is better by less stays as it is: equal stages are simpler."""


def refined(best: list[Priced], spec: ModelSpec, cluster: Cluster, wishes: Wishes) -> list[Priced]:
    """Plans with the stages that suit them best, in order again; those without a pipeline as they are.

    Blocks are moved in all of them, sizes of micro-batches tried in the one that is then fastest.

    Args:
        best: legal plans with their prices, fastest first.
        spec: their model.
        cluster: where.
        wishes: entries that stay as they are.
    """
    found = list(best)
    if "pipeline.layers_per_stage" not in wishes:
        found = [_better(item, _layered(item[0], spec, cluster), spec, cluster) for item in found]
    found.sort(key=lambda item: item[1].step_seconds)
    if not any(key.startswith("batch.") for key in wishes):
        found[0] = _better(found[0], _sized(found[0][0], spec, cluster), spec, cluster)
    return found


def _better(item: Priced, other: Plan | None, spec: ModelSpec, cluster: Cluster) -> Priced:
    """The other plan where it is faster in the simulation and by the terms, and fits."""
    plan, estimate = item
    if other is None or other == plan or not legal(other, spec, cluster):
        return item
    told = price(other, spec, cluster)
    if not told.fits or told.step_seconds >= estimate.step_seconds * (1 - GAIN):
        return item
    seconds = [plan_timeline(each, spec, cluster, record=False).step_seconds for each in (plan, other)]
    return (other, told) if seconds[1] < seconds[0] * (1 - GAIN) else item


def _passes(plan: Plan) -> int:
    return num_stages(plan) * plan.batch.accumulation


def _layered(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Plan | None:
    """Blocks balanced over stages; None where no move of a block can help."""
    if plan.layout.pp == 1 or _passes(plan) > MOST_PASSES:
        return None
    slow = slowest(cluster)
    seconds = ranks(plan, spec, slow).seconds
    block = min((p.forward + p.backward for part, p in pieces(plan, spec, slow) if part.group == "blocks"), default=0.0)
    if max(seconds) - min(seconds) <= block:
        return None
    try:
        layers = balanced_layers(plan, spec, cluster, most_actions=ACTIONS)
    except (DoesNotFit, RuleBroken):
        return None
    return replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=layers))


def _sized(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Plan | None:
    """A size for each stage; None where one size is best."""
    if plan.layout.pp == 1 or _passes(plan) > MOST_SIZED:
        return None
    each = 4 * num_stages(plan) * samples_of(plan)
    try:
        choice = choose_sizes(plan, spec, cluster, most_tries=max(8, ACTIONS // each))
    except (DoesNotFit, RuleBroken):
        return None
    if len(set(choice.best.sizes)) == 1:
        return None
    return replace(plan, pipeline=replace(plan.pipeline, micro_batch_per_stage=choice.best.sizes))
