"""Which parts of the model a pipeline rank holds, and which rank is the busiest."""

from __future__ import annotations

from typing import NamedTuple

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
        "norm_activation": piece.bound_forward,
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


class Ranks(NamedTuple):
    """All pipeline ranks, in seconds of one micro-batch."""

    busiest: tuple[Held, ...]
    seconds: tuple[float, ...]


def ranks(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Ranks:
    """The pipeline ranks; the busiest one paces all."""
    if plan.layout.pp == 1:
        held = held_by(plan, spec, cluster, 0)
        return Ranks(held, (micro_seconds(plan, held),))
    found = pieces(plan, spec, cluster)
    key = ("ranks", id(found), counts(plan, spec), plan.recompute)

    def make() -> Ranks:
        all_held = [held_by(plan, spec, cluster, rank) for rank in range(plan.layout.pp)]
        seconds = tuple(micro_seconds(plan, held) for held in all_held)
        return Ranks(all_held[seconds.index(max(seconds))], seconds)

    return once_for(spec, cluster, key, make)


def busiest(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Held, ...]:
    """What the busiest pipeline rank holds."""
    return ranks(plan, spec, cluster).busiest
