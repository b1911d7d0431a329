"""Terms of communication: what moves, how long it takes, and how much of it stands outside computation."""

from __future__ import annotations

from dataclasses import dataclass

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.compute import optimizer, stepped_parameters, term
from fullstride.plan.cost.inside import adapter_parameters, data_inside, expert_weights, local_parameters, trained_parameters
from fullstride.plan.cost.lanes import Held, again, busiest
from fullstride.plan.cost.pieces import FUSED
from fullstride.plan.estimate import Confidence, Term
from fullstride.plan.facts import (
    BYTES,
    num_parameters,
    num_resharded,
    num_trainable,
    parts,
    steps_in_one_pass,
    weight_bytes,
    whole_weights,
)
from fullstride.plan.plan import Plan

OWN_ZERO = ("fsdp2", "flat")
"""Carriers of this engine that gather weights and scatter gradients."""
COPY_EFFICIENCY = 0.47
"""FSDP2's copies in and out of flat buffers over a plain copy; from 80 ms in one step of an 8B model on two H200."""
FLAT_COPY_EFFICIENCY = 0.68
"""The one copy of gradients into flat buffers, likewise: 11 ms in one step."""


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
    count, trained, micro = num_parameters(spec), _trained(plan, spec), plan.batch.accumulation
    if plan.shard.carrier == "none":
        return Volumes(gathered=0.0, reduced=0.0, all_reduced=0.0)
    if plan.shard.carrier == "ddp":
        return Volumes(gathered=0.0, reduced=0.0, all_reduced=2.0 * trained)
    gathers, rounds = _rounds(plan)
    again = sum(num_resharded(plan, part) * part.parameters for part in parts(spec) if not _looked_up(plan, part.group))
    across = 2.0 * trained / plan.layout.dp_shard * rounds if plan.layout.dp_replicate > 1 else 0.0
    sent = trained if _keeps_frozen(plan) else count + (trained if plan.adapter.rank else 0)
    return Volumes(gathered=float(gathers * sent + micro * again), reduced=float(rounds * trained), all_reduced=across)


def _trained(plan: Plan, spec: ModelSpec) -> int:
    """Elements of the model that have gradients."""
    if plan.adapter.rank:
        return sum(part.count * adapter_parameters(part, plan) for part in parts(spec))
    return num_trainable(spec)


def _keeps_frozen(plan: Plan) -> bool:
    """Whether frozen weights stay whole on every rank: flat buffers below ZeRO-3 gather again what was stepped alone."""
    return plan.adapter.rank > 0 and plan.shard.carrier == "flat" and plan.shard.stage < 3


def _rounds(plan: Plan) -> tuple[int, int]:
    """How often in a step all weights are gathered for forward, and all gradients reduced."""
    micro = plan.batch.accumulation
    return {1: (1, 1), 2: (1, micro)}.get(plan.shard.stage, (micro, micro))


def _looked_up(plan: Plan, group: str) -> bool:
    """Backward of an embedding needs no weights, which flat buffers make use of and FSDP2 does not."""
    return plan.shard.carrier == "flat" and group == "embedding"


def overlap_share(cluster: Cluster) -> float:
    """How much of a computation can hide communication: none on a CPU, whose cores do both."""
    return 0.0 if cluster.device.kind == "cpu" else cluster.reached.hidden_share


def _outside(seconds: float, cover: float, cluster: Cluster) -> float:
    """Time that `cover` seconds of computation do not hide, with what contention costs them."""
    hidden = min(seconds, cover * overlap_share(cluster))
    return seconds - hidden + cluster.reached.contention * hidden


def _backward_of(plan: Plan, held: Held) -> float:
    return held.piece.backward + again(plan, held.piece) * held.recomputed / held.many


def all_reduce(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """DDP: buckets are reduced while the last micro-batch's backward still runs; the last bucket stands alone."""
    if plan.shard.carrier != "ddp":
        return term("all-reduce of gradients", "comm", 0.0, "no ddp", "modelled")
    ranks, size = plan.layout.dp_replicate * plan.layout.cp, _trained(plan, spec) * BYTES[plan.precision.gradient]
    held = busiest(plan, spec, cluster)
    if plan.layout.pp * plan.layout.tp * plan.layout.ep > 1:
        size = round(sum(h.many * trained_parameters(h.part, plan) for h in held)) * BYTES[plan.precision.gradient]
    bucket = min(plan.overlap.bucket_bytes, size)
    near = max(1, cluster.groups[0].num_devices // plan.layout.tp)
    rate = rates.collective_seconds(cluster, "all_reduce", bucket, ranks, per_node=min(near, ranks))
    seconds = rate.seconds * size / bucket
    backward = sum(h.many * _backward_of(plan, h) for h in held)
    exposed = rate.seconds + _outside(seconds - rate.seconds, backward, cluster)
    return term(
        "all-reduce of gradients", "comm", seconds, f"2P in buckets of {bucket} B, {rate.source}", rate.confidence, exposed
    )


def own_reduce(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Megatron's and DeepSpeed's reduction of gradients, once a step (DeepSpeed's ZeRO-2: for each micro-batch).

    ZeRO-0 all-reduces; a distributed optimizer reduce-scatters, and gathers the stepped weights. Beside the last backward and
    the next forward where these overlap, else after them.
    """
    layout, name = plan.layout, "reduction of gradients"
    ranks = layout.data_parallel * layout.cp
    if plan.shard.carrier not in FUSED or ranks == 1:
        return term(name, "comm", 0.0, "none", "modelled")
    held = busiest(plan, spec, cluster)
    dense = sum(h.many * (local_parameters(h.part, plan) - expert_weights(h.part) / layout.ep) for h in held)
    sparse = sum(h.many * expert_weights(h.part) for h in held) / layout.ep
    if plan.adapter.rank:
        shared = layout.dp_shard * layout.cp if plan.shard.stage else 1
        dense, sparse = stepped_parameters(plan, spec, cluster) * shared, 0.0
    near = max(1, min(ranks, cluster.groups[0].num_devices // layout.tp))
    expert_ranks = max(1, ranks * layout.tp // layout.ep)
    rounds = plan.batch.accumulation if plan.shard.carrier == "deepspeed" and plan.shard.stage >= 2 else 1
    wide, narrow = BYTES[plan.precision.reduction], BYTES[plan.precision.block]

    def over(op: str, width: float) -> rates.Rate:
        main = rates.collective_seconds(cluster, op, dense * width, ranks, per_node=near)  # type: ignore[arg-type]
        near_experts = max(1, min(expert_ranks, cluster.groups[0].num_devices // layout.ep))
        more = rates.collective_seconds(cluster, op, sparse * width, expert_ranks, per_node=near_experts)  # type: ignore[arg-type]
        return rates.Rate(main.seconds + more.seconds, main.confidence, main.source)

    if plan.shard.stage == 0:
        first, second = over("all_reduce", wide), rates.Rate(0.0, "modelled", "")
    else:
        first, second = over("reduce_scatter", wide), over("all_gather", narrow)
    seconds = first.seconds * rounds + second.seconds
    exposed = seconds
    if plan.overlap.gradients and plan.shard.carrier == "megatron":
        forward = sum(h.many * h.piece.forward for h in held)
        backward = sum(h.many * _backward_of(plan, h) for h in held)
        exposed = _outside(first.seconds, backward, cluster) + _outside(second.seconds, forward, cluster)
    return term(name, "comm", seconds, f"ZeRO {plan.shard.stage} over {ranks} ranks, {first.source}", first.confidence, exposed)


def gather(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Weights gathered for forward, one part ahead of its use, and again for backward where they were freed.

    Flat buffers below ZeRO-3 gather a part behind its own optimizer step, beside the later ones' and the next forward.
    """
    if plan.shard.carrier not in OWN_ZERO:
        return term("all-gather of weights", "comm", 0.0, "no sharding", "modelled")
    micro = plan.batch.accumulation
    rounds, _ = _rounds(plan)
    seconds = exposed = 0.0
    trust: Confidence = "modelled"
    source, ranks = "", plan.layout.dp_shard * plan.layout.cp
    near = data_inside(plan, cluster)
    for h in busiest(plan, spec, cluster):
        sent = 0.0 if _keeps_frozen(plan) else local_parameters(h.part, plan)
        sent += trained_parameters(h.part, plan) if plan.adapter.rank else 0.0
        size = sent * weight_bytes(plan, h.part)
        if not size:
            continue
        rate = rates.collective_seconds(cluster, "all_gather", size, ranks, per_node=near)
        trust = "assumed" if rate.confidence == "assumed" else trust
        source = rate.source if h.part.group == "blocks" else source
        back = 0.0 if _looked_up(plan, h.part.group) else num_resharded(plan, h.part) * h.many / h.part.count
        seconds += rate.seconds * (h.many * rounds + back * micro)
        cover = 0.0 if h.part.group == "embedding" else h.piece.forward  # nothing runs before the first
        exposed += h.many * rounds * _outside(rate.seconds, cover, cluster)
        exposed += back * micro * _outside(rate.seconds, _backward_of(plan, h) / 2, cluster)  # the other half hides reduction
    if plan.shard.carrier == "flat" and plan.shard.stage < 3:
        forward = sum(h.many * h.piece.forward for h in busiest(plan, spec, cluster))
        exposed = _outside(seconds, optimizer(plan, spec, cluster).seconds + forward, cluster)
    return term("all-gather of weights", "comm", seconds, source, trust, exposed)


def reduce(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """A part's gradients are reduce-scattered while the part before it runs backward; the first part's stand alone."""
    if plan.shard.carrier not in OWN_ZERO:
        return term("reduce-scatter of gradients", "comm", 0.0, "no sharding", "modelled")
    _, rounds = _rounds(plan)
    wide, layout = BYTES[plan.precision.reduction], plan.layout
    shared = layout.dp_shard * layout.cp
    across = max(1, cluster.groups[0].num_devices // (shared * layout.tp))  # ranks of a replica group in one node
    seconds = exposed = 0.0
    trust: Confidence = "modelled"
    source, near = "", data_inside(plan, cluster)
    for h in busiest(plan, spec, cluster):
        trained = trained_parameters(h.part, plan)
        if not trained:
            continue
        rate = rates.collective_seconds(cluster, "reduce_scatter", trained * wide, shared, per_node=near)
        one = rate.seconds
        if layout.dp_replicate > 1:
            size = trained * wide / shared
            one += rates.collective_seconds(cluster, "all_reduce", size, layout.dp_replicate, per_node=across).seconds
        trust = "assumed" if rate.confidence == "assumed" else trust
        source = rate.source if h.part.group == "blocks" else source
        share = 0.5 if num_resharded(plan, h.part) else 1.0
        cover = 0.0 if h.part.group == "embedding" else share * _backward_of(plan, h)
        seconds += one * h.many * rounds
        exposed += h.many * rounds * _outside(one, cover, cluster)
    return term("reduce-scatter of gradients", "comm", seconds, source, trust, exposed)


def copies(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """FSDP2's own copies: shards cast into the gather's input, its output copied out, gradients copied in and widened."""
    if plan.shard.carrier == "flat":
        return _flat_copies(plan, spec, cluster)
    if plan.shard.carrier != "fsdp2":
        return term("FSDP2's copies", "comm", 0.0, "no sharding", "modelled")
    moved, each = volumes(plan, spec), whole_weights(plan, spec) / num_parameters(spec)
    wide, master = BYTES[plan.precision.reduction], BYTES[plan.precision.master]
    size = moved.gathered * ((master + each) / plan.layout.dp_shard + 2 * each) + moved.reduced * (each + wide)
    if plan.layout.tp * plan.layout.pp * plan.layout.ep > 1:
        size *= sum(h.many * local_parameters(h.part, plan) for h in busiest(plan, spec, cluster)) / num_parameters(spec)
    rate = rates.copy_seconds(cluster, size)
    efficiency = 1.0 if cluster.device.kind == "cpu" else COPY_EFFICIENCY
    return term("FSDP2's copies", "comm", rate.seconds / efficiency, f"{efficiency:.0%} of {rate.source}", rate.confidence)


def _flat_copies(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Flat buffers: gradients copied once (micro-batches added up), shards cast where the optimizer did not write them so."""
    moved, each = volumes(plan, spec), whole_weights(plan, spec) / num_parameters(spec)
    wide, master, kept = BYTES[plan.precision.reduction], BYTES[plan.precision.master], BYTES[plan.precision.gradient]
    ranks, micro, trained = plan.layout.dp_shard, plan.batch.accumulation, _trained(plan, spec)
    size = moved.reduced * (each + wide)
    if micro > 1 and plan.shard.stage == 1:  # whole sums, one pass to make them and one more where they are narrowed
        size = trained * (micro * (each + kept) + (micro - 1) * kept + (kept + wide if kept != wide else 0))
    elif micro > 1 or kept != wide:
        size += moved.reduced / ranks * (wide + 2 * kept)
    written = plan.shard.stage < 3 and steps_in_one_pass(plan, cluster)
    if plan.precision.cast == "weights" and not written:  # frozen ones beside adapters are held as they are gathered
        cast = _rounds(plan)[0] * trained if plan.adapter.rank else moved.gathered
        size += cast / ranks * (master + each)
    if plan.layout.tp * plan.layout.pp * plan.layout.ep > 1:
        size *= sum(h.many * local_parameters(h.part, plan) for h in busiest(plan, spec, cluster)) / num_parameters(spec)
    rate = rates.copy_seconds(cluster, size)
    efficiency = 1.0 if cluster.device.kind == "cpu" else FLAT_COPY_EFFICIENCY
    return term(
        "copies of flat buffers", "comm", rate.seconds / efficiency, f"{efficiency:.0%} of {rate.source}", rate.confidence
    )


def tensor(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Tensor parallelism's sums of activations, about four a block and micro-batch whatever its degree."""
    return _within("sums over tensor ranks", "tensor", plan, spec, cluster)


def context(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Context parallelism's ring of keys and values."""
    return _within("ring of keys and values", "context", plan, spec, cluster)


def experts(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Expert parallelism's exchange of tokens."""
    return _within("exchange between experts", "experts", plan, spec, cluster)


def _within(name: str, axis: str, plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    seconds = exposed = 0.0
    for h in busiest(plan, spec, cluster):
        moved = getattr(h.piece, axis)
        seconds += h.many * (moved.forward + moved.backward)
        exposed += h.many * (moved.forward_exposed + moved.backward_exposed)
    micro = plan.batch.accumulation
    return term(name, "comm", seconds * micro, "collectives inside each block", "modelled", exposed * micro)
