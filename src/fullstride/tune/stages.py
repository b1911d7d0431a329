"""Other ways to run a pipeline that is there: its schedule, blocks and micro-batches by stage.

The simulator chooses blocks and sizes, as it does for the planner; what it takes for that is bounded, since tuning asks again
before every trial.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import DoesNotFit, FullstrideError, RuleBroken
from fullstride.model.spec import ModelSpec
from fullstride.plan.axes import pipeline_of
from fullstride.plan.pipeline import balanced_layers, choose_sizes, num_passes, plan_schedule, samples_of, sizes_of
from fullstride.plan.plan import Pipeline, Plan, Schedule
from fullstride.plan.refine import ACTIONS, MOST_PASSES, MOST_SIZED
from fullstride.plan.rules import check
from fullstride.plan.stages import blocks_per_stage, num_stages

SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("interleaved", 2),
    ("bfs", 2),
    ("gpipe", 1),
)
"""Schedules with their chunks. Where two are priced alike the earlier one is taken: GPipe has the bubble of 1F1B and more
activations, and breadth-first has that of interleaving, also where micro-batches do not come in turns of pp."""


_LONG_RUN = 4
"""Equal entries that are still written out."""


def refused(plan: Plan, spec: ModelSpec, cluster: Cluster) -> str:
    """The first rule that a plan breaks, or why its schedule cannot be made, in words; empty where it may run."""
    if broken := check(plan, spec, cluster):
        return broken[0].message
    if plan.layout.pp > 1 and num_passes(plan) <= MOST_PASSES:
        try:
            plan_schedule(plan)
        except FullstrideError as error:
            return str(error)
    return ""


def other_schedules(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[tuple[Pipeline, str]]:
    """Every other schedule, and the change in words; none without a pipeline.

    Blocks stay where they are as long as the stages are as many. Other stages get their blocks by cost where they do not
    come out even, or did not lie evenly before.
    """
    if plan.layout.pp == 1:
        return
    old = plan.pipeline
    now = old.schedule_file or _named(old.schedule, old.chunks)
    for schedule, chunks in SCHEDULES:
        if (schedule, chunks) == (old.schedule, old.chunks) and not old.schedule_file:
            continue
        new = replace(old, schedule=schedule, chunks=chunks, schedule_file="")
        words = f"schedule {now} -> {_named(schedule, chunks)}"
        if chunks != old.chunks:
            new = _laid_out(replace(plan, pipeline=new), spec, cluster)
            if new.layers_per_stage:
                words += f", with {_listed(new.layers_per_stage)} blocks by stage"
            elif old.layers_per_stage:
                words += ", with equal stages"
            if old.micro_batch_per_stage:
                words += f", micro-batch {plan.batch.micro_batch} on all stages"
        yield new, words


def _named(schedule: Schedule, chunks: int) -> str:
    return f"{schedule} with {chunks} chunks" if chunks > 1 and schedule != "zb-v" else schedule


def _laid_out(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Pipeline:
    """Stages that were not there before: evenly, or by cost where that does not come out or was not so before."""
    asked, stages = plan.pipeline, num_stages(plan)
    new = replace(asked, layers_per_stage=(), micro_batch_per_stage=())
    if spec.num_blocks % stages == 0 and not asked.layers_per_stage:
        return new
    new = pipeline_of(asked.schedule, asked.chunks, plan.layout.pp, spec)
    layers = _by_cost(replace(plan, pipeline=new), spec, cluster)
    if layers is None:
        return new
    even = layers == (spec.num_blocks // stages,) * stages
    return replace(new, layers_per_stage=() if even else layers)


def balanced(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Pipeline, str] | None:
    """Blocks by what they cost, embedding, head and loss counted; None without a pipeline, or where they lie so."""
    layers = _by_cost(plan, spec, cluster) if plan.layout.pp > 1 else None
    now = blocks_per_stage(plan, spec)
    if layers is None or layers == now:
        return None
    return replace(plan.pipeline, layers_per_stage=layers), f"blocks by stage {_listed(now)} -> {_listed(layers)}"


def _by_cost(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[int, ...] | None:
    if num_passes(plan) > MOST_PASSES or num_stages(plan) > spec.num_blocks:
        return None
    try:
        return balanced_layers(plan, spec, cluster, most_actions=ACTIONS)
    except (DoesNotFit, RuleBroken):
        return None


def other_sizes(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[tuple[Pipeline, str]]:
    """The sizes that the simulator finds fastest, where they differ by stage; one size on all, where they differ now.

    None without a pipeline, or with a schedule from a file, which is made for its own sizes.
    """
    pipe = plan.pipeline
    if plan.layout.pp == 1 or pipe.schedule_file:
        return
    now = sizes_of(plan)
    best = _best_sizes(plan, spec, cluster)
    if best and best != now and len(set(best)) > 1:
        words = f"micro-batch by stage {_listed(now)} -> {_listed(best)}"
        yield replace(pipe, micro_batch_per_stage=best), words
    if pipe.micro_batch_per_stage:
        words = f"micro-batch by stage {_listed(now)} -> {plan.batch.micro_batch} on all"
        yield replace(pipe, micro_batch_per_stage=()), words


def _best_sizes(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[int, ...] | None:
    if num_passes(plan) > MOST_SIZED:
        return None
    tries = max(8, ACTIONS // (4 * num_stages(plan) * samples_of(plan)))
    try:
        return choose_sizes(plan, spec, cluster, most_tries=tries).best.sizes
    except (DoesNotFit, RuleBroken):
        return None


def _listed(counts: tuple[int, ...]) -> str:
    """`3 4(x30) 3`: long runs are counted."""
    found = []
    for value, run in itertools.groupby(counts):
        many = len(list(run))
        found += [f"{value}(x{many})"] if many > _LONG_RUN else [str(value)] * many
    return " ".join(found)
