"""A Plan's pipeline put before the simulator: what its stages cost, its timeline, and the layers and sizes that suit it.

Seconds are those of the cost's own pieces, stage by stage; bytes are those of the ledger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.errors import RuleBroken
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost import comm, compute
from fullstride.plan.cost.lanes import Held, again, rank_seconds, recomputed, sized
from fullstride.plan.cost.logits import loss_passes
from fullstride.plan.cost.pieces import Piece, local_tokens, pieces
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import Part, compute_bytes
from fullstride.plan.ledger.alive import alive, micro_batch_of
from fullstride.plan.ledger.table import ledger, moments_of, peak_of
from fullstride.plan.placement import slowest
from fullstride.plan.plan import Plan
from fullstride.plan.schedule.balance import balance_stages
from fullstride.plan.schedule.checker import faults
from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.placement import placement_of
from fullstride.plan.schedule.sizes import SizeChoice, choose_micro_batches
from fullstride.plan.schedule.text import Schedule, read_schedule
from fullstride.plan.simulate import Durations, PipelineTimeline, StageDurations, simulate
from fullstride.plan.stages import Stage, chunks_of, num_stages, stages_of

RUNNING: tuple[MomentName, ...] = ("forward_end", "loss", "backward")
"""Moments of the ledger at which the pipeline is at work."""
MOST_ACTIONS = 100_000
"""Some tenths of a second of simulation."""


def schedule_of(plan: Plan) -> str:
    """The schedule that is simulated; a pipeline whose plan names none is taken as 1F1B."""
    name = plan.pipeline.schedule
    return "1f1b" if name == "none" and plan.layout.pp > 1 else name


def sizes_of(plan: Plan) -> tuple[int, ...]:
    """Samples of a micro-batch on each stage."""
    return plan.pipeline.micro_batch_per_stage or (plan.batch.micro_batch,) * num_stages(plan)


def samples_of(plan: Plan) -> int:
    """Samples of one step on one pipeline."""
    return plan.batch.micro_batch * plan.batch.accumulation


def num_passes(plan: Plan) -> int:
    """Forward passes of stages in one step: what a simulation takes grows with them."""
    return num_stages(plan) * -(-samples_of(plan) // min(sizes_of(plan)))


def plan_schedule(plan: Plan) -> Schedule:
    """What each pipeline rank does in one step.

    Raises:
        RuleBroken: the schedule cannot work with the plan's chunks, micro-batches or sizes, or the schedule file is for others
            or cannot be run: names the actions at fault.
        BadInput: no such schedule file, or its content is none.
    """
    name, pp, chunks, samples = schedule_of(plan), plan.layout.pp, chunks_of(plan), samples_of(plan)
    if plan.pipeline.schedule_file:
        return _from_file(plan)
    actions = generate(name, pp, chunks, samples, sizes_of(plan))
    return Schedule(name=name, placement=placement_of(name, pp, chunks), samples=samples, actions=actions)


def _from_file(plan: Plan) -> Schedule:
    where = f"pipeline.schedule_file {plan.pipeline.schedule_file}"
    if plan.layout.pp == 1:
        raise RuleBroken(f"{where} with layout.pp = 1: one stage takes no turns", fix="empty pipeline.schedule_file")
    found = read_schedule(plan.pipeline.schedule_file)
    wanted = placement_of(schedule_of(plan), plan.layout.pp, chunks_of(plan))
    if found.placement != wanted or found.samples != samples_of(plan):
        has, asked = (
            f"pp {where.pp}, chunks {where.chunks}, placement {where.style}, samples {count}"
            for where, count in ((found.placement, found.samples), (wanted, samples_of(plan)))
        )
        raise RuleBroken(
            f"{where} has {has}, the plan {asked}",
            fix="set layout.pp, pipeline.schedule, pipeline.chunks and the samples of a step to the file's",
        )
    if broken := faults(found.actions, found.placement, found.samples):
        more = f" (and {len(broken) - 1} faults more)" if len(broken) > 1 else ""
        raise RuleBroken(f"{where}: {broken[0].message}{more}", fix="correct the schedule")
    split = next((action for action in found.actions if action.kind == "input_grad"), None)
    if split and plan.shard.carrier == "fsdp2":  # what the rules refuse by a schedule's name is refused in a file too
        raise RuleBroken(
            f"{where}: {split.text()} with shard.carrier = 'fsdp2', which takes weight gradients in the backward alone",
            fix="use carrier flat, or whole backwards",
        )
    _require_sizes(found, plan, where)
    return found


def _require_sizes(schedule: Schedule, plan: Plan, where: str) -> None:
    """Memory is counted for the plan's sizes, so the largest micro-batch of each stage in a file has the plan's size."""
    largest = [0] * schedule.placement.num_stages
    for action in schedule.actions:
        if action.kind == "forward":
            stage = schedule.placement.stage(action.rank, action.chunk)
            largest[stage] = max(largest[stage], action.hi - action.lo)
    if tuple(largest) != sizes_of(plan):
        raise RuleBroken(
            f"{where} has micro-batches of up to {largest} samples on its stages, the plan {list(sizes_of(plan))}",
            fix=f"set pipeline.micro_batch_per_stage = {largest}",
        )


def plan_timeline(plan: Plan, spec: ModelSpec, cluster: Cluster, *, record: bool = True) -> PipelineTimeline:
    """The pipeline of one step as the simulator sees it.

    Args:
        plan: with pp above 1.
        spec: its model.
        cluster: where; on uneven nodes the slowest counts.
        record: see `simulate`.

    Raises:
        RuleBroken: the schedule cannot work with the plan's chunks, micro-batches or sizes.
    """
    schedule = plan_schedule(plan)
    return simulate(schedule.actions, plan_durations(plan, spec, cluster), schedule.placement, record=record)


def plan_durations(plan: Plan, spec: ModelSpec, cluster: Cluster, sizes: tuple[int, ...] = ()) -> Durations:
    """What each stage costs for one sample, in the cost's seconds and the ledger's bytes.

    Half of the backward of matrix products is the gradient of weights; all else of backward is on the way to the gradient
    of inputs. Where the host cannot keep up, its time counts.

    Args:
        plan: with pp above 1.
        spec: its model.
        cluster: where.
        sizes: samples of a micro-batch on each stage; empty for the plan's own.
    """
    cluster = slowest(cluster)
    if sizes:
        plan = replace(plan, pipeline=replace(plan.pipeline, micro_batch_per_stage=sizes))
    stages, sizes = stages_of(plan, spec), sizes_of(plan)
    held = [_held(sized(plan, size), spec, cluster, stage, stages) for stage, size in zip(stages, sizes, strict=True)]
    rows = ledger(plan, spec, cluster)
    memory = [_bytes(plan, rows, rank) for rank in range(plan.layout.pp)]
    send, update = _send_seconds(plan, spec, cluster), compute.optimizer(plan, spec, cluster).seconds
    reduced = sum(make(plan, spec, cluster).exposed_seconds for make in (comm.all_reduce, comm.own_reduce, comm.reduce))
    found = []
    for stage, size, parts in zip(stages, sizes, held, strict=True):
        seconds = _seconds(sized(plan, size), spec, cluster, stage, parts)
        here = memory[stage.rank]
        found.append(
            StageDurations(
                forward_seconds=seconds.forward / size,
                input_grad_seconds=seconds.input_grad / size,
                weight_grad_seconds=seconds.weight_grad / size,
                recompute_seconds=seconds.again / size,
                send_seconds=send,
                reduce_seconds=reduced / chunks_of(plan),
                optimizer_seconds=update / chunks_of(plan),
                activation_bytes=here.activation,
                working_bytes=here.working,
                static_bytes=here.static / chunks_of(plan),
            )
        )
    return Durations(stages=tuple(found))


def balanced_layers(plan: Plan, spec: ModelSpec, cluster: Cluster, *, most_actions: int = MOST_ACTIONS) -> tuple[int, ...]:
    """Blocks of each stage, embedding, head and loss counted, such that every rank fits and the simulated step is short.

    The exact split with the fastest slowest stage comes first. Blocks are then moved from stage to stage as long as the
    simulator finds a shorter pipeline: a rank with several stages is paced by their sum, and schedules have slack in
    different places.

    Args:
        plan: with pp above 1.
        spec: its model.
        cluster: where.
        most_actions: actions that may be simulated for moves, some microseconds each.

    Raises:
        RuleBroken: fewer blocks than stages, or the schedule cannot work with the plan's chunks or micro-batches.
        DoesNotFit: no split was found in which every rank fits.
    """
    cluster = slowest(cluster)
    layers = _balanced(plan, spec, cluster)
    best = _simulated(_layered(plan, layers), spec, cluster)
    before: tuple[int, ...] = ()
    actions = 4 * num_passes(plan)
    left = most_actions - actions
    while layers != before and left > 0:
        before = layers
        for moved in _moves(before):
            left -= actions
            if left < 0 or _over(_layered(plan, moved), spec, cluster):
                continue
            seconds = _simulated(_layered(plan, moved), spec, cluster)
            if seconds < best * (1 - 1e-9):
                layers, best = moved, seconds
    return layers


def _layered(plan: Plan, layers: tuple[int, ...]) -> Plan:
    return replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=layers))


def _simulated(plan: Plan, spec: ModelSpec, cluster: Cluster) -> float:
    return plan_timeline(plan, spec, cluster, record=False).span_seconds


def _moves(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One block from a stage to another."""
    for source, target in itertools.permutations(range(len(layers)), 2):
        if layers[source] > 1:
            yield tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(layers))


def _over(plan: Plan, spec: ModelSpec, cluster: Cluster) -> list[int]:
    """Pipeline ranks that do not fit."""
    rows, capacity = ledger(plan, spec, cluster), cluster.device.memory_bytes.value
    return [rank for rank in range(plan.layout.pp) if peak_of(moments_of(rows, stage=rank)).bytes > capacity]


def _balanced(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """The split with the fastest slowest stage in which every rank fits."""
    found = pieces(plan, spec, cluster)
    blocks = [_alone(plan, part, piece) for part, piece in found if part.group == "blocks" for _ in range(part.count)]
    first, last = (_alone(plan, *found[place]) for place in (0, -1))
    most = [float(len(blocks))] * num_stages(plan)
    while True:
        layers = balance_stages(
            tuple(blocks),
            pp=plan.layout.pp,
            chunks=chunks_of(plan),
            embedding_seconds=first,
            head_seconds=last + loss_passes(plan, spec, cluster).seconds,
            block_bytes=(1.0,) * len(blocks),
            stage_limits=tuple(most),
        )
        over = _over(_layered(plan, layers), spec, cluster)
        if not over:
            return layers
        for rank in over:
            own = [stage.index for stage in stages_of(plan, spec) if stage.rank == rank]
            fullest = max(own, key=lambda index: layers[index])
            most[fullest] = layers[fullest] - 1.0


def choose_sizes(plan: Plan, spec: ModelSpec, cluster: Cluster, *, most_tries: int = 300) -> SizeChoice:
    """A micro-batch size for each stage, such that the step is short and every rank fits (see `choose_micro_batches`).

    Raises:
        RuleBroken: the schedule cannot work with any size.
        DoesNotFit: no sizes fit.
    """
    capacity = slowest(cluster).device.memory_bytes.value
    return choose_micro_batches(
        schedule_of(plan),
        plan.layout.pp,
        chunks_of(plan),
        samples_of(plan),
        lambda sizes: plan_durations(plan, spec, cluster, sizes),
        limits=(capacity,) * plan.layout.pp,
        most_tries=most_tries,
    )


def _alone(plan: Plan, part: Part, piece: Piece) -> float:
    """Seconds of one part, made again as often as its like are."""
    share = 1.0 / plan.recompute.every if part.group == "blocks" else 0.0
    return piece.forward + piece.backward + share * again(plan, piece)


def _held(plan: Plan, spec: ModelSpec, cluster: Cluster, stage: Stage, stages: tuple[Stage, ...]) -> tuple[Held, ...]:
    """The parts of one stage, with their times."""
    here = sum(other.num_blocks for other in stages if other.rank == stage.rank)
    counts = {stack.first: count for stack, count in stage.stacks}
    ends = {"embedding": stage.has_embedding, "head": stage.has_head}
    found = []
    for part, piece in pieces(plan, spec, cluster):
        count = counts.get(part.first, 0) if part.group == "blocks" else int(ends[part.group])
        if count:
            found.append(Held(float(count), part, piece, recomputed(plan, part, count, here)))
    return tuple(found)


class _Seconds(NamedTuple):
    """Of one micro-batch on one stage."""

    forward: float
    input_grad: float
    weight_grad: float
    again: float


def _seconds(plan: Plan, spec: ModelSpec, cluster: Cluster, stage: Stage, held: tuple[Held, ...]) -> _Seconds:
    loss = loss_passes(plan, spec, cluster).seconds / 2 if stage.has_head else 0.0
    forward = sum(h.many * h.piece.forward for h in held) + loss
    weights = sum(h.many * h.piece.products_backward for h in held) / 2
    inputs = sum(h.many * h.piece.backward for h in held) - weights + loss
    repeated = sum(h.recomputed * again(plan, h.piece) for h in held)
    total = forward + weights + inputs + repeated
    slower = rank_seconds(plan, spec, cluster, held) / total if total else 1.0
    return _Seconds(forward * slower, inputs * slower, weights * slower, repeated * slower)


def _send_seconds(plan: Plan, spec: ModelSpec, cluster: Cluster) -> float:
    """One sample's activations to the next stage."""
    cut = plan.layout.tp if plan.layout.sequence_parallel else 1
    size = local_tokens(plan) * spec.hidden_size * compute_bytes(plan) / cut
    return rates.collective_seconds(cluster, "send_recv", size, 2).seconds / plan.batch.micro_batch


class _Bytes(NamedTuple):
    """Of one pipeline rank while the pipeline runs."""

    activation: float
    """Of one sample on one chunk."""
    working: float
    """Of one sample, while it is computed."""
    static: float


def _bytes(plan: Plan, rows: tuple[Row, ...], rank: int) -> _Bytes:
    """The ledger's fullest moment with activations on one rank, taken apart."""
    rows = tuple(row for row in rows if row.stage == rank)
    moments = {moment.name: moment.bytes for moment in moments_of(rows, stage=rank)}
    fullest = max(RUNNING, key=lambda name: moments[name])
    kept, working = _at(rows, fullest, "activations"), _at(rows, fullest, "logits", "recompute")
    size = micro_batch_of(plan, rank)
    samples = max(1.0, math.fsum(alive(plan, rank))) * size
    return _Bytes(kept / samples, working / size, moments[fullest] - kept - working)


def _at(rows: tuple[Row, ...], moment: MomentName, *kinds: str) -> float:
    return float(sum(row.bytes for row in rows if row.kind in kinds and moment in row.moments))
