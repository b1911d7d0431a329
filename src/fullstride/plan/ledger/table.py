"""The ledger: all rows of a Plan on every pipeline rank, and what they add up to at each moment of a step."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Moment, MomentName, Row
from fullstride.plan.facts import once
from fullstride.plan.ledger import activations, carriers, deepspeed, flat, megatron, states, tiers
from fullstride.plan.ledger.local import Local, local_of
from fullstride.plan.ledger.logits import logits
from fullstride.plan.ledger.reserved import reserved
from fullstride.plan.ledger.row import ALL, RowMaker
from fullstride.plan.plan import Plan
from fullstride.plan.stages import stages_of

OWN_STATES: tuple[RowMaker, ...] = (states.weights, states.optimizer_states, states.gradients, states.early_gradients)
MEGATRON_STATES: tuple[RowMaker, ...] = (megatron.weights, megatron.optimizer_states, megatron.gradients)
KEPT: tuple[RowMaker, ...] = (
    activations.activations,
    activations.block_inputs,
    activations.recomputed,
    activations.block_gradients,
    activations.border_parts,
    logits,
    activations.pipeline_buffers,
)
AROUND: tuple[RowMaker, ...] = (
    megatron.attention_buffers,
    megatron.mask,
    megatron.left_over,
    megatron.graph_inputs,
    megatron.fp8_copies,
    megatron.stand_ins,
    megatron.workspaces,
    carriers.gathered,
    carriers.gather_buffer,
    carriers.reduce_buffers,
    carriers.autocast_casts,
    tiers.optimizer_tiers,
)
LAST: tuple[RowMaker, ...] = (carriers.context,)
MAKERS: tuple[RowMaker, ...] = (*OWN_STATES, *KEPT, *AROUND, states.optimizer_temporaries, *LAST)
"""Everything that takes memory, one function each."""
MEGATRON: tuple[RowMaker, ...] = (*MEGATRON_STATES, *KEPT, *AROUND, *LAST)
"""The same under Megatron's conventions."""
DEEPSPEED: tuple[RowMaker, ...] = (
    deepspeed.weights,
    deepspeed.loading,
    deepspeed.optimizer_states,
    deepspeed.gradients,
    deepspeed.buckets,
    *KEPT,
    *AROUND,
    *LAST,
)
"""And under DeepSpeed's."""
FLAT: tuple[RowMaker, ...] = (
    flat.weights,
    flat.optimizer_states,
    flat.gradients,
    flat.gathered,
    flat.reductions,
    flat.temporaries,
    *KEPT,
    *AROUND,
    *LAST,
)
"""And on flat buffers."""
BY_CARRIER = {"megatron": MEGATRON, "deepspeed": DEEPSPEED, "flat": FLAT}

ELSEWHERE = ("host", "disk")
"""Kinds that are not device memory."""
OUTSIDE = ("context", "fragmentation", *ELSEWHERE)
"""Kinds that torch's allocator does not report as allocated."""
IN_STEP: tuple[MomentName, ...] = ("forward_end", "loss", "backward", "backward_end")
"""Moments of the first step before the optimizer has made its states."""


def ledger(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[Row, ...]:
    """Every row of the fullest data-parallel rank of each pipeline rank (`Row.stage`).

    The last rows of each are what the allocator holds beyond the peak of the others.
    """
    found: list[Row] = []
    for rank in range(plan.layout.pp):
        found += _rows(local_of(plan, spec, rank), cluster)
    return tuple(found)


def peak_device_bytes(plan: Plan, spec: ModelSpec, cluster: Cluster) -> int:
    """The fullest rank's peak with everything the device must hold, for a search: as from all rows, from fewer ranks."""
    peaks = [peak_of(moments_of(tuple(_rows(local_of(plan, spec, rank), cluster)))) for rank in _candidates(plan, spec)]
    return max(peak.bytes for peak in peaks)


def _candidates(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    """Ranks of which one is the fullest: of those that hold the same blocks the first has most micro-batches alive."""
    pp, pipe = plan.layout.pp, plan.pipeline
    if pp <= 2 or pipe.schedule == "zb-v" or pipe.micro_batch_per_stage:
        return tuple(range(pp))
    return once(spec, ("candidates", pp, pipe.schedule, pipe.chunks, pipe.layers_per_stage), lambda: _first_of_each(plan, spec))


def _first_of_each(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    held: dict[int, list[object]] = {}
    for stage in stages_of(plan, spec):
        blocks = tuple((id(stack), count) for stack, count in stage.stacks)
        held.setdefault(stage.rank, []).append((blocks, stage.has_head))
    first: dict[object, int] = {}
    for rank in range(plan.layout.pp):
        first.setdefault(tuple(held[rank]), rank)
    return tuple(sorted(first.values()))


def _rows(local: Local, cluster: Cluster) -> list[Row]:
    makers = BY_CARRIER.get(local.plan.shard.carrier, MAKERS)
    rows = _first_step([item for make in makers for item in make(local, cluster)])
    peak = peak_of(moments_of(tuple(rows), inside=True))
    rows += reserved(local, rows, peak.bytes, peak.name)
    return [_on_stage(item, local.rank) for item in rows] if local.rank else rows


def _first_step(rows: list[Row]) -> list[Row]:
    """Mark the rows that stand at the fullest moment before late optimizer states exist."""
    early = tuple(item for item in rows if not (item.kind == "optimizer" and "load" not in item.moments))
    sums = {moment.name: moment.bytes for moment in moments_of(early, inside=True)}
    fullest = max(IN_STEP, key=lambda name: sums[name])
    marked = {id(item) for item in early if fullest in item.moments and "first_step" not in item.moments}
    return [_with(item, moments=("first_step", *item.moments)) if id(item) in marked else item for item in rows]


def _with(item: Row, *, moments: tuple[MomentName, ...] | None = None, stage: int | None = None) -> Row:
    return Row(
        name=item.name,
        kind=item.kind,
        bytes=item.bytes,
        source=item.source,
        confidence=item.confidence,
        moments=item.moments if moments is None else moments,
        stage=item.stage if stage is None else stage,
    )


def _on_stage(item: Row, rank: int) -> Row:
    return _with(item, stage=rank)


def moments_of(rows: tuple[Row, ...], *, inside: bool = False, stage: int | None = None) -> tuple[Moment, ...]:
    """The sum of the rows at each moment, on one pipeline rank, or (`stage` None) on the one with the highest peak.

    `inside` counts what torch's allocator reports.
    """
    ranks = {item.stage for item in rows} or {0}
    if stage is not None:
        ranks = {stage}
    sums = {rank: dict.fromkeys(ALL, 0) for rank in ranks}
    left_out = OUTSIDE if inside else ELSEWHERE
    for item in rows:
        if item.kind not in left_out and item.stage in sums:
            for name in item.moments:
                sums[item.stage][name] += item.bytes
    fullest = max(sorted(sums), key=lambda rank: max(sums[rank].values()))
    return tuple(Moment(name=name, bytes=size) for name, size in sums[fullest].items())


def peak_of(moments: tuple[Moment, ...]) -> Moment:
    """The fullest moment."""
    return max(moments, key=lambda moment: moment.bytes)
