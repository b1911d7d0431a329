"""Terms of communication: what moves, how long it takes, and how much of it stands outside computation."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.compute import again, term
from fullstride.plan.cost.pieces import Piece, pieces
from fullstride.plan.estimate import Confidence, Term
from fullstride.plan.facts import (
    BYTES,
    Part,
    num_parameters,
    num_recomputed,
    num_resharded,
    num_trainable,
    parts,
    weight_bytes,
    whole_weights,
)
from fullstride.plan.plan import Plan

HIDDEN_SHARE = 0.9
"""Share of computation that communication can hide behind on a GPU; assumed."""
CONTENTION = 0.15
"""Hidden communication still slows computation by this share of its time (5 to 15 % on Hopper); assumed."""
COPY_EFFICIENCY = 0.47
"""FSDP2's copies in and out of flat buffers over a plain copy; from 80 ms in one step of an 8B model on two H200."""


@dataclass(frozen=True)
class Volumes:
    """Elements that one rank sends in one step, without the factor (n - 1) / n of a ring."""

    gathered: float
    """All-gathers of weights."""
    reduced: float
    """Reduce-scatters of gradients."""
    all_reduced: float
    """All-reduces, twice their elements: a reduce-scatter and an all-gather."""

    @property
    def total(self) -> float:
        """2P a step for DDP and for ZeRO-1 and 2 with one micro-batch, 3P for ZeRO-3 (arXiv 1910.02054, section 7)."""
        return self.gathered + self.reduced + self.all_reduced


def volumes(plan: Plan, spec: ModelSpec) -> Volumes:
    """What a step moves, in elements.

    With m micro-batches: DDP and ZeRO-1 2P (gathered once, reduced once); ZeRO-2 (m + 1)P (gathered once, reduced for each);
    ZeRO-3 3mP where all is freed after forward.
    """
    count, trained, micro = num_parameters(spec), num_trainable(spec), plan.batch.accumulation
    if plan.shard.carrier == "none":
        return Volumes(gathered=0.0, reduced=0.0, all_reduced=0.0)
    if plan.shard.carrier == "ddp":
        return Volumes(gathered=0.0, reduced=0.0, all_reduced=2.0 * trained)
    gathers, rounds = _rounds(plan)
    again = sum(num_resharded(plan, part) * part.parameters for part in parts(spec))
    across = 2.0 * trained / plan.layout.dp_shard * rounds if plan.layout.dp_replicate > 1 else 0.0
    return Volumes(gathered=float(gathers * count + micro * again), reduced=float(rounds * trained), all_reduced=across)


def _rounds(plan: Plan) -> tuple[int, int]:
    """How often in a step all weights are gathered for forward, and all gradients reduced."""
    micro = plan.batch.accumulation
    return {1: (1, 1), 2: (1, micro)}.get(plan.shard.stage, (micro, micro))


def overlap_share(cluster: Cluster) -> float:
    """How much of a computation can hide communication: none on a CPU, whose cores do both."""
    return 0.0 if cluster.device.kind == "cpu" else HIDDEN_SHARE


def _outside(seconds: float, cover: float, cluster: Cluster) -> float:
    """Time that `cover` seconds of computation do not hide, with what contention costs them."""
    hidden = min(seconds, cover * overlap_share(cluster))
    return seconds - hidden + CONTENTION * hidden


def all_reduce(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """DDP: buckets are reduced while the last micro-batch's backward still runs; the last bucket stands alone."""
    if plan.shard.carrier != "ddp":
        return term("all-reduce of gradients", "comm", 0.0, "no ddp", "modelled")
    ranks, size = plan.layout.dp_replicate, num_trainable(spec) * BYTES[plan.precision.gradient]
    bucket = min(plan.overlap.bucket_bytes, size)
    rate = rates.collective_seconds(cluster, "all_reduce", bucket, ranks)
    seconds = rate.seconds * size / bucket
    backward = sum(
        p.count * piece.backward + num_recomputed(plan, p) * again(plan, p, piece) for p, piece in pieces(plan, spec, cluster)
    )
    exposed = rate.seconds + _outside(seconds - rate.seconds, backward, cluster)
    return term(
        "all-reduce of gradients", "comm", seconds, f"2P in buckets of {bucket} B, {rate.source}", rate.confidence, exposed
    )


def gather(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """FSDP2: weights gathered for forward, one part ahead of its use, and again for backward where they were freed."""
    if plan.shard.carrier != "fsdp2":
        return term("all-gather of weights", "comm", 0.0, "no sharding", "modelled")
    micro = plan.batch.accumulation
    rounds, _ = _rounds(plan)
    seconds = exposed = 0.0
    trust: Confidence = "modelled"
    source = ""
    for index, (part, piece) in enumerate(pieces(plan, spec, cluster)):
        rate = rates.collective_seconds(cluster, "all_gather", part.parameters * weight_bytes(plan, part), plan.layout.dp_shard)
        trust = "assumed" if rate.confidence == "assumed" else trust
        source = rate.source if part.group == "blocks" else source
        back = num_resharded(plan, part)
        seconds += rate.seconds * (part.count * rounds + back * micro)
        cover = 0.0 if index == 0 else piece.forward  # nothing runs before the first
        exposed += part.count * rounds * _outside(rate.seconds, cover, cluster)
        exposed += (
            back * micro * _outside(rate.seconds, _backward_of(plan, part, piece) / 2, cluster)
        )  # the other half hides the reduction
    return term("all-gather of weights", "comm", seconds, source, trust, exposed)


def reduce(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """FSDP2: a part's gradients are reduce-scattered while the part before it runs backward; the first part's stand alone."""
    if plan.shard.carrier != "fsdp2":
        return term("reduce-scatter of gradients", "comm", 0.0, "no sharding", "modelled")
    _, rounds = _rounds(plan)
    wide, layout = BYTES[plan.precision.reduction], plan.layout
    across = max(1, cluster.groups[0].num_devices // layout.dp_shard)  # ranks of a replica group in one node
    seconds = exposed = 0.0
    trust: Confidence = "modelled"
    source = ""
    for index, (part, piece) in enumerate(pieces(plan, spec, cluster)):
        rate = rates.collective_seconds(cluster, "reduce_scatter", part.trainable * wide, layout.dp_shard)
        one = rate.seconds
        if layout.dp_replicate > 1:
            size = part.trainable * wide / layout.dp_shard
            one += rates.collective_seconds(cluster, "all_reduce", size, layout.dp_replicate, per_node=across).seconds
        trust = "assumed" if rate.confidence == "assumed" else trust
        source = rate.source if part.group == "blocks" else source
        share = 0.5 if num_resharded(plan, part) else 1.0
        cover = 0.0 if index == 0 else share * _backward_of(plan, part, piece)
        seconds += one * part.count * rounds
        exposed += part.count * rounds * _outside(one, cover, cluster)
    return term("reduce-scatter of gradients", "comm", seconds, source, trust, exposed)


def _backward_of(plan: Plan, part: Part, piece: Piece) -> float:
    made = again(plan, part, piece) * num_recomputed(plan, part) / part.count
    return piece.backward + made


def copies(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """FSDP2's own copies: shards cast into the gather's input, its output copied out, gradients copied in and widened."""
    if plan.shard.carrier != "fsdp2":
        return term("FSDP2's copies", "comm", 0.0, "no sharding", "modelled")
    moved, each = volumes(plan, spec), whole_weights(plan, spec) / num_parameters(spec)
    wide, master = BYTES[plan.precision.reduction], BYTES[plan.precision.master]
    size = moved.gathered * ((master + each) / plan.layout.dp_shard + 2 * each) + moved.reduced * (each + wide)
    rate = rates.copy_seconds(cluster, size)
    efficiency = 1.0 if cluster.device.kind == "cpu" else COPY_EFFICIENCY
    return term("FSDP2's copies", "comm", rate.seconds / efficiency, f"{efficiency:.0%} of {rate.source}", rate.confidence)
