"""Which parts of the model a pipeline rank holds, and which rank is the busiest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.logits import loss_passes
from fullstride.plan.cost.pieces import Piece, once_for, pieces
from fullstride.plan.facts import Part, once, parts
from fullstride.plan.plan import Plan
from fullstride.plan.stages import chunks_of, place_of, stages_of


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
        "norm_activation": piece.bound_forward + plan.recompute.products * piece.products_forward + piece.tensor.again,
        "attention": piece.attention_forward,
        "full": piece.forward - piece.tensor.forward_exposed + piece.tensor.again,
    }[plan.recompute.mode]


def recomputed(plan: Plan, part: Part, count: float, blocks_here: float) -> float:
    """How many of `count` equal blocks of a rank are made again."""
    if plan.recompute.mode == "none" or part.group != "blocks":
        return 0.0
    if plan.recompute.blocks and blocks_here:
        chunks = max(1, plan.pipeline.chunks) if plan.layout.pp > 1 else 1
        return count * min(1.0, plan.recompute.blocks * chunks / blocks_here)
    return float(count // plan.recompute.every)


def sized(plan: Plan, size: int) -> Plan:
    """The plan with another micro-batch."""
    return plan if size == plan.batch.micro_batch else replace(plan, batch=replace(plan.batch, micro_batch=size))


def held_by(plan: Plan, spec: ModelSpec, cluster: Cluster, rank: int) -> tuple[Held, ...]:
    """What one pipeline rank holds."""
    if plan.pipeline.micro_batch_per_stage:
        return tuple(_held_at_sizes(plan, spec, cluster, rank))
    row, found = counts(plan, spec)[rank], pieces(plan, spec, cluster)
    here = sum(count for count, (part, _) in zip(row, found, strict=True) if part.group == "blocks")
    return tuple(
        Held(count, part, piece, recomputed(plan, part, count, here))
        for count, (part, piece) in zip(row, found, strict=True)
        if count
    )


def _held_at_sizes(plan: Plan, spec: ModelSpec, cluster: Cluster, rank: int) -> Iterator[Held]:
    """The same where stages have micro-batches of their own: by each one's size, for `batch.micro_batch` samples."""
    stages = stages_of(plan, spec)
    here = sum(stage.num_blocks for stage in stages if stage.rank == rank)
    for stage, size in zip(stages, plan.pipeline.micro_batch_per_stage, strict=True):
        if stage.rank != rank:
            continue
        many = {stack.first: count for stack, count in stage.stacks}
        ends = {"embedding": stage.has_embedding, "head": stage.has_head}
        for part, piece in pieces(sized(plan, size), spec, cluster):
            count = many.get(part.first, 0) if part.group == "blocks" else int(ends[part.group])
            if count:
                yield Held(count, part, piece.times(plan.batch.micro_batch / size), recomputed(plan, part, count, here))


def part_seconds(plan: Plan, spec: ModelSpec, cluster: Cluster, h: Held) -> float:
    """Device time of these parts: forward, backward and what is made again of one micro-batch, the head with its loss."""
    seconds = h.many * (h.piece.forward + h.piece.backward) + h.recomputed * again(plan, h.piece)
    return seconds + loss_passes(plan, spec, cluster).seconds if h.part.group == "head" else seconds


def micro_seconds(plan: Plan, spec: ModelSpec, cluster: Cluster, held: tuple[Held, ...]) -> float:
    """Device time of one micro-batch on one rank."""
    return sum(part_seconds(plan, spec, cluster, h) for h in held)


BACKWARD_LAUNCHES = 2.0
"""Operators of backward over those of forward."""
SELECTIVE_LAUNCHES = 3.0
"""Selective recompute passes every operator through a Python dispatch mode, twice; assumed."""
WRAPPER_SECONDS = 3e-4
"""Host time of FSDP2's hooks for one part and micro-batch, forward and backward; assumed."""
COLLECTIVE_LAUNCHES = 3.0
"""Operators that one collective of tensor parallelism is worth to the host."""


def operators(plan: Plan, h: Held) -> float:
    """Launches of these parts in one micro-batch; none where they are replayed as a graph."""
    if plan.compile.graphs:
        return 0.0
    extra = {"none": 0.0, "full": 1.0, "attention": 0.2}.get(plan.recompute.mode, 1.0)
    if plan.recompute.mode == "norm_activation" and plan.compile.mode != "block":
        extra = SELECTIVE_LAUNCHES
    sums = 2 * COLLECTIVE_LAUNCHES if plan.layout.tp > 1 and h.part.group == "blocks" else 0.0
    return (h.piece.operators + sums) * (h.many * (1 + BACKWARD_LAUNCHES) + h.recomputed * extra)


def part_host_seconds(plan: Plan, cluster: Cluster, h: Held) -> float:
    """Host time of these parts in one micro-batch; ranks that meet in every block wait for the slowest of their hosts."""
    reached = cluster.reached
    seconds = operators(plan, h) * rates.launch_seconds(cluster).seconds * (1 + reached.drift * (plan.layout.tp - 1))
    if plan.shard.carrier == "fsdp2":
        seconds += h.many * WRAPPER_SECONDS
    return seconds + reached.loss_seconds if h.part.group == "head" else seconds


def host_seconds(plan: Plan, cluster: Cluster, held: tuple[Held, ...]) -> float:
    """Host time of one micro-batch on one rank."""
    return sum(part_host_seconds(plan, cluster, h) for h in held)


def paced(device: float, host: float, cluster: Cluster) -> float:
    """Seconds of work that the host launches while the device does it.

    Within a block some operators are longer than their launch and some shorter, and the host runs ahead of the device only so
    far: near balance neither hides the other. The root of the sum of squares is the larger one far from it and is 1.4 times
    either at it (the form is assumed; small blocks, which take as long to launch as to compute, follow it). A CPU does both.
    """
    return device + host if cluster.device.kind == "cpu" else math.hypot(device, host)


def rank_seconds(plan: Plan, spec: ModelSpec, cluster: Cluster, held: tuple[Held, ...]) -> float:
    """One micro-batch on one rank, by host and device."""
    return sum(paced(part_seconds(plan, spec, cluster, h), part_host_seconds(plan, cluster, h), cluster) for h in held)


class Ranks(NamedTuple):
    """All pipeline ranks, in seconds of one micro-batch."""

    busiest: tuple[Held, ...]
    seconds: tuple[float, ...]
    """By host and device (`rank_seconds`), for `batch.micro_batch` samples; empty where there is one stage."""
    filling: tuple[float, ...]
    """Of one micro-batch of the rank's own size."""


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
        return Ranks(held_by(plan, spec, cluster, 0), (), ())
    found = pieces(plan, spec, cluster)
    sizes = plan.pipeline.micro_batch_per_stage
    key = ("ranks", id(found), counts(plan, spec), sizes, plan.recompute, plan.compile, plan.shard.carrier, plan.loss)

    def make() -> Ranks:
        all_held = [held_by(plan, spec, cluster, rank) for rank in range(plan.layout.pp)]
        seconds = tuple(rank_seconds(plan, spec, cluster, held) for held in all_held)
        own = _sizes_by_rank(plan)
        filling = tuple(each * size for each, size in zip(seconds, own, strict=True)) if own else seconds
        return Ranks(all_held[seconds.index(max(seconds))], seconds, filling)

    return once_for(spec, cluster, key, make)


def _sizes_by_rank(plan: Plan) -> list[float]:
    """Micro-batch of each rank's stages over `batch.micro_batch`, on average; empty where all have the same."""
    sizes, found = plan.pipeline.micro_batch_per_stage, [0.0] * plan.layout.pp
    for index, size in enumerate(sizes):
        found[place_of(plan, index)[0]] += size / chunks_of(plan) / plan.batch.micro_batch
    return found if sizes else []


def busiest(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Held, ...]:
    """What the busiest pipeline rank holds."""
    return ranks(plan, spec, cluster).busiest
