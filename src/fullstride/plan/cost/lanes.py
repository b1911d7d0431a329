"""Which parts of the model a pipeline rank holds, and which rank is the busiest."""

from __future__ import annotations

from typing import NamedTuple

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.pieces import Piece, once_for, pieces
from fullstride.plan.facts import Part, once, parts
from fullstride.plan.plan import Plan
from fullstride.plan.stages import stages_of


class Held(NamedTuple):
    """Some equal parts on the busiest rank."""

    many: float
    part: Part
    piece: Piece
    recomputed: float
    """How many of them are made again in backward."""


def counts(plan: Plan, spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """For each pipeline rank, how many of each of `facts.parts(spec)` it holds."""
    if plan.layout.pp == 1:
        return (tuple(part.count for part in parts(spec)),)
    pipeline = plan.pipeline
    key = ("lanes", plan.layout.pp, pipeline.chunks, pipeline.schedule, pipeline.layers_per_stage)
    return once(spec, key, lambda: _counts(plan, spec))


def _counts(plan: Plan, spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    found = [[0] * (len(spec.stacks) + 2) for _ in range(plan.layout.pp)]
    place = {stack.first: index + 1 for index, stack in enumerate(spec.stacks)}
    for stage in stages_of(plan, spec):
        row = found[stage.rank]
        row[0] += stage.has_embedding
        row[-1] += stage.has_head
        for stack, count in stage.stacks:
            row[place[stack.first]] += count
    return tuple(tuple(row) for row in found)


def again(plan: Plan, piece: Piece) -> float:
    """What one block made again costs."""
    return {
        "none": 0.0,
        "norm_activation": piece.bound_forward + plan.recompute.products * piece.products_forward,
        "attention": piece.attention_forward,
        "full": piece.forward,
    }[plan.recompute.mode]


def recomputed(plan: Plan, part: Part, count: float, blocks_here: float) -> float:
    """How many of `count` equal blocks of a rank are made again."""
    if plan.recompute.mode == "none" or part.group != "blocks":
        return 0.0
    if plan.recompute.blocks and blocks_here:
        chunks = max(1, plan.pipeline.chunks) if plan.layout.pp > 1 else 1
        return count * min(1.0, plan.recompute.blocks * chunks / blocks_here)
    return float(count // plan.recompute.every)


def held_by(plan: Plan, spec: ModelSpec, cluster: Cluster, rank: int) -> tuple[Held, ...]:
    """What one pipeline rank holds."""
    row, found = counts(plan, spec)[rank], pieces(plan, spec, cluster)
    here = sum(count for count, (part, _) in zip(row, found, strict=True) if part.group == "blocks")
    return tuple(
        Held(count, part, piece, recomputed(plan, part, count, here))
        for count, (part, piece) in zip(row, found, strict=True)
        if count
    )


def micro_seconds(plan: Plan, held: tuple[Held, ...]) -> float:
    """Forward, backward and what is made again of one micro-batch on one rank."""
    return sum(h.many * (h.piece.forward + h.piece.backward) + h.recomputed * again(plan, h.piece) for h in held)


BACKWARD_LAUNCHES = 2.0
"""Operators of backward over those of forward."""
SELECTIVE_LAUNCHES = 3.0
"""Selective recompute passes every operator through a Python dispatch mode, twice; assumed."""
WRAPPER_SECONDS = 3e-4
"""Host time of FSDP2's hooks for one part and micro-batch, forward and backward; assumed."""
COLLECTIVE_LAUNCHES = 3.0
"""Operators that one collective of tensor parallelism is worth to the host."""


def operators(plan: Plan, held: tuple[Held, ...]) -> float:
    """Launches of one micro-batch on one rank; none where they are replayed as a graph."""
    if plan.compile.graphs:
        return 0.0
    extra = {"none": 0.0, "full": 1.0, "attention": 0.2}.get(plan.recompute.mode, 1.0)
    if plan.recompute.mode == "norm_activation" and plan.compile.mode != "block":
        extra = SELECTIVE_LAUNCHES
    sums = 2 * COLLECTIVE_LAUNCHES if plan.layout.tp > 1 else 0.0
    return sum(
        (h.piece.operators + sums * (h.part.group == "blocks")) * (h.many * (1 + BACKWARD_LAUNCHES) + h.recomputed * extra)
        for h in held
    )


def host_seconds(plan: Plan, cluster: Cluster, held: tuple[Held, ...]) -> float:
    """Host time of one micro-batch on one rank; ranks that meet in every block wait for the slowest of their hosts."""
    seconds = operators(plan, held) * rates.launch_seconds(cluster).seconds * (1 + cluster.reached.drift * (plan.layout.tp - 1))
    if plan.shard.carrier == "fsdp2":
        seconds += sum(h.many for h in held) * WRAPPER_SECONDS
    return seconds


class Ranks(NamedTuple):
    """All pipeline ranks, in seconds of one micro-batch."""

    busiest: tuple[Held, ...]
    seconds: tuple[float, ...]
    """Of device or host, whichever is slower."""


_LAST: list[tuple[Plan, ModelSpec, Cluster, Ranks]] = []
"""What was asked last: a dozen terms of one plan ask for the same in a row."""


def ranks(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Ranks:
    """The pipeline ranks; the busiest one paces all."""
    if _LAST and _LAST[0][0] is plan and _LAST[0][1] is spec and _LAST[0][2] is cluster:
        return _LAST[0][3]
    found = _ranks(plan, spec, cluster)
    _LAST[:] = [(plan, spec, cluster, found)]
    return found


def _ranks(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Ranks:
    if plan.layout.pp == 1:
        held = held_by(plan, spec, cluster, 0)
        return Ranks(held, (max(micro_seconds(plan, held), host_seconds(plan, cluster, held)),))
    found = pieces(plan, spec, cluster)
    key = ("ranks", id(found), counts(plan, spec), plan.recompute, plan.compile, plan.shard.carrier)

    def make() -> Ranks:
        all_held = [held_by(plan, spec, cluster, rank) for rank in range(plan.layout.pp)]
        seconds = tuple(max(micro_seconds(plan, held), host_seconds(plan, cluster, held)) for held in all_held)
        return Ranks(all_held[seconds.index(max(seconds))], seconds)

    return once_for(spec, cluster, key, make)


def busiest(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Held, ...]:
    """What the busiest pipeline rank holds."""
    return ranks(plan, spec, cluster).busiest
