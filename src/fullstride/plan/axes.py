"""The wide space: every way to lay a model over the mesh's axes, and the choices that each layout leaves open.

A layout fixes the degrees (tensor, pipeline, context, expert, data); its `Options` list what is left: how data ranks share
states, micro-batch, schedule and chunks, recompute, precision, loss, compilation. A `Pick` names one of each. Whatever is
built here obeys `rules.check(..., to_run=False)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan import limits
from fullstride.plan.cost import inside
from fullstride.plan.placement import devices_per_node
from fullstride.plan.plan import (
    Batch,
    Carrier,
    Compile,
    Layout,
    Loss,
    Optimizer,
    Overlap,
    Pipeline,
    Plan,
    Precision,
    Recompute,
    Schedule,
    Shard,
)
from fullstride.plan.rules import check
from fullstride.plan.space import KEEP_ENDS, compile_modes, input_parts, micro_batches, precisions

Pick: TypeAlias = tuple[int, ...]
"""An index into each list of `Options`, in their order."""
Wishes: TypeAlias = Mapping[str, Any]
"""Entries that a user has fixed, by `part.entry`."""

LARGEST_MICRO_BATCH = 16
MOST_EXPERT_RANKS = 64
SHORTEST_SLICE = 4096
"""Context parallelism is tried down to so many tokens a rank: below, its messages outweigh what they save."""
CHUNKS = (2, 4)
OTHERS: dict[Carrier, tuple[Literal[0, 1, 2, 3], ...]] = {"megatron": (1, 0), "deepspeed": (1, 2, 3, 0)}
"""ZeRO stages of other frameworks' carriers, which are tried only where they are asked for."""
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "zb-h1", "zb-v", "interleaved", "bfs")
GROUPS = (1, 8)
"""Hybrid sharding is tried inside a node, and inside eight."""
CHOICES = (
    "carrier, ZeRO stage and sharding group, micro-batch (powers of two), schedule and chunks, recompute, precision (bf16), "
    "loss, compilation, overlap of tensor parallelism"
)
"""What `Options` holds, in words. GPipe is left out (the bubble of 1F1B with more memory), and fp8 (other numerics)."""


class Degrees(NamedTuple):
    """Sizes of the axes; data-parallel ranks are what the others leave."""

    tp: int
    pp: int
    cp: int
    ep: int
    dp: int

    @property
    def data_only(self) -> bool:
        """Nothing but data parallelism: what this version runs."""
        return self.tp == self.pp == self.cp == self.ep == 1


class Options(NamedTuple):
    """What a layout leaves open; the first of each list is where a bounded search starts."""

    shards: list[tuple[int, int, Shard]]
    """(dp_replicate, dp_shard, how)."""
    micros: list[int]
    pipelines: list[Pipeline]
    recomputes: list[Recompute]
    casts: list[int]
    """Which of `space.precisions`."""
    losses: list[Loss]
    compiles: list[Compile]
    optimizers: list[Optimizer]
    overlaps: list[Overlap]

    @property
    def size(self) -> int:
        """Plans in all."""
        total = 1
        for choices in self:
            total *= len(choices)
        return total

    def picks(self) -> Iterator[Pick]:
        """All of them."""
        return product(*(range(len(choices)) for choices in self))


def all_degrees(base: Plan, num_ranks: int, spec: ModelSpec, cluster: Cluster, wishes: Wishes) -> list[Degrees]:
    """Every layout that the rules allow and that can share out the samples, less model parallelism first."""
    samples, inside = base.workload.samples_per_step, devices_per_node(cluster)
    found = []
    for tp in _degree("tp", [n for n in limits.divisors(num_ranks) if n <= 2 * inside], wishes):
        rest = num_ranks // tp
        for pp in _degree("pp", [n for n in limits.divisors(rest) if n <= spec.num_blocks], wishes):
            for cp in _degree("cp", _contexts(rest // pp, base.workload.sequence_length), wishes):
                dp, left = divmod(num_ranks, tp * pp * cp)
                if left or samples % dp:
                    continue
                found += [Degrees(tp, pp, cp, ep, dp) for ep in _degree("ep", _expert_degrees(spec, dp * cp), wishes)]
    allowed = [each for each in found if _allowed(base, each, spec)]
    return sorted(allowed, key=lambda d: (d.tp * d.pp * d.cp, d.ep, d.pp, d.cp))


def _degree(axis: str, values: list[int], wishes: Wishes) -> list[int]:
    wanted = wishes.get(f"layout.{axis}")
    return values if wanted is None else [wanted]


def _contexts(ranks: int, length: int) -> list[int]:
    return [n for n in limits.divisors(ranks) if n == 1 or length >= n * SHORTEST_SLICE]


def _expert_degrees(spec: ModelSpec, data_ranks: int) -> list[int]:
    count = limits.num_experts(spec)
    if not count:
        return [1]
    powers = [2**n for n in range(MOST_EXPERT_RANKS.bit_length()) if 2**n <= MOST_EXPERT_RANKS]
    return [n for n in powers if count % n == 0 and data_ranks % n == 0]


def _allowed(base: Plan, degrees: Degrees, spec: ModelSpec) -> bool:
    """The rules about degrees alone."""
    layout = Layout(tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, ep=degrees.ep, dp_replicate=degrees.dp)
    plan = replace(base, layout=layout)
    on_model = (limits.heads_met, limits.width_met, limits.vocabulary_met, limits.experts_met)
    on_plan = (limits.context_met, limits.sequence_cut_met, limits.expert_ranks_met)
    return not any(met(plan, spec, None) for met in on_model) and not any(met(plan) for met in on_plan)


def options_for(
    base: Plan, degrees: Degrees, spec: ModelSpec, cluster: Cluster, wishes: Wishes, *, offload: bool = False
) -> Options:
    """What a layout leaves open; entries in `wishes` are fixed, also to values that the space itself does not hold."""
    found = Options(
        shards=_shards(degrees, cluster),
        micros=[n for n in micro_batches(base.workload.samples_per_step // degrees.dp) if n <= LARGEST_MICRO_BATCH],
        pipelines=_pipelines(degrees, spec),
        recomputes=[Recompute(), Recompute(mode="norm_activation"), Recompute(mode="full", every=2), Recompute(mode="full")],
        casts=list(range(len(precisions(cluster, 1, "fsdp2")))),
        losses=[Loss(kind="chunked"), Loss()],
        compiles=list(reversed(compile_modes(cluster))),
        optimizers=[Optimizer(cpu_share=share) for share in (0.5, 1.0)] if offload else [Optimizer()],
        overlaps=[Overlap(), Overlap(tensor=True)] if inside.overlaps(cluster, degrees.tp) else [Overlap()],
    )
    if offload:
        found = found._replace(recomputes=[*found.recomputes, Recompute(mode="full", offload="cpu")])
    return _wished(found, base.workload.samples_per_step // degrees.dp, degrees, spec, wishes)


OWN_ZERO: tuple[Carrier, ...] = ("fsdp2", "flat")


def _shards(degrees: Degrees, cluster: Cluster) -> list[tuple[int, int, Shard]]:
    dp = degrees.dp
    if dp * degrees.cp == 1:
        return [(1, 1, Shard())]
    keep = Shard(carrier="fsdp2", stage=3, reshard=dict(KEEP_ENDS))
    found = [(1, dp, Shard(carrier="fsdp2", stage=stage)) for stage in (1, 2, 3)] + [(1, dp, keep)]
    if dp > 1:
        found += [(1, dp, Shard(carrier="flat", stage=stage)) for stage in (1, 2, 3)]
    inside = max(1, devices_per_node(cluster) // (degrees.tp * degrees.cp))
    for group in (inside * n for n in GROUPS):
        if 1 < group < dp and dp % group == 0:
            found += [(dp // group, group, Shard(carrier=name, stage=stage)) for name in OWN_ZERO for stage in (1, 3)]
    return [*found, (dp, 1, Shard(carrier="ddp"))]


def _others_shards(carrier: Carrier, degrees: Degrees) -> list[tuple[int, int, Shard]]:
    """How another framework shares states over all its data ranks."""
    return [
        (1, degrees.dp, Shard(carrier=carrier, stage=stage)) if stage else (degrees.dp, 1, Shard(carrier=carrier))
        for stage in OTHERS[carrier]
    ]


def _pipelines(degrees: Degrees, spec: ModelSpec, schedules: Iterable[Schedule] = SCHEDULES, chunks: int = 0) -> list[Pipeline]:
    pp = degrees.pp
    if pp == 1:
        return [Pipeline()]
    found = []
    for schedule in schedules:
        low, high = limits.CHUNKS[schedule]
        counts = [chunks] if chunks else sorted({low, *CHUNKS} if high > 2 else {low})
        found += [pipeline_of(schedule, n, pp, spec) for n in counts if low <= n <= high and n * pp <= spec.num_blocks]
    return found


def pipeline_of(schedule: Any, chunks: int, pp: int, spec: ModelSpec) -> Pipeline:
    """A schedule with its blocks laid out, a list of them where they do not come out even."""
    stages = pp * chunks
    even = spec.num_blocks % stages == 0
    return Pipeline(schedule=schedule, chunks=chunks, layers_per_stage=() if even else layers_for(spec.num_blocks, stages))


def layers_for(num_blocks: int, stages: int) -> tuple[int, ...]:
    """As even as it goes; the stages with one block less are the outer ones, which hold embedding and head too."""
    most = -(-num_blocks // stages)
    layers = [most] * stages
    order = sorted(range(stages), key=lambda index: (min(index, stages - 1 - index), -index))
    for index in order[: stages * most - num_blocks]:
        layers[index] -= 1
    return tuple(layers)


def _wished(options: Options, share: int, degrees: Degrees, spec: ModelSpec, wishes: Wishes) -> Options:
    """The lists cut down to what was wished for; a value that they do not hold takes their place."""
    micro, schedule, chunks = (wishes.get(key) for key in ("batch.micro_batch", "pipeline.schedule", "pipeline.chunks"))
    accumulation = wishes.get("batch.accumulation")
    if micro is None and accumulation and share % accumulation == 0:
        micro = share // accumulation
    changes: dict[str, Any] = {} if micro is None else {"micros": [micro]}
    if (carrier := wishes.get("shard.carrier")) in OTHERS:
        changes["shards"] = _others_shards(carrier, degrees)
    if schedule or chunks:
        changes["pipelines"] = _pipelines(degrees, spec, [schedule] if schedule else SCHEDULES, chunks or 0)
    layers = wishes.get("pipeline.layers_per_stage")
    if layers:
        held = changes.get("pipelines", options.pipelines)
        changes["pipelines"] = [replace(p, layers_per_stage=layers) for p in held if degrees.pp * p.chunks == len(layers)]
    for name, part in (
        ("recomputes", "recompute"),
        ("losses", "loss"),
        ("compiles", "compile"),
        ("optimizers", "optimizer"),
        ("overlaps", "overlap"),
    ):
        fixed = {key.partition(".")[2]: value for key, value in wishes.items() if key.startswith(f"{part}.")}
        if fixed:
            every = [replace(item, **fixed) for item in getattr(options, name)]
            changes[name] = [item for n, item in enumerate(every) if item not in every[:n]]
    return options._replace(**changes)


def build(
    base: Plan, degrees: Degrees, options: Options, pick: Pick, spec: ModelSpec, cluster: Cluster, wishes: Wishes
) -> Plan | None:
    """The plan that a pick stands for; None where its choices do not go together, or not with what was wished for."""
    replicate, shard_ranks, shard = options.shards[pick[0]]
    micro, pipeline, recompute, cast = (
        options.micros[pick[1]],
        options.pipelines[pick[2]],
        options.recomputes[pick[3]],
        options.casts[pick[4]],
    )
    share = base.workload.samples_per_step // degrees.dp
    if share % micro or (pipeline.schedule == "interleaved" and share // micro % degrees.pp):
        return None
    batch = Batch(micro_batch=micro, accumulation=share // micro)
    choices: list[Precision] = precisions(cluster, batch.accumulation, shard.carrier)
    if cast >= len(choices):
        return None
    data, threads = input_parts(cluster, degrees.tp * degrees.pp * degrees.cp * degrees.dp)
    layout = Layout(dp_replicate=replicate, dp_shard=shard_ranks, tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, ep=degrees.ep)
    plan = replace(base, layout=layout, shard=shard, batch=batch, pipeline=pipeline, recompute=recompute,
                   precision=choices[cast], loss=options.losses[pick[5]], compile=options.compiles[pick[6]],
                   optimizer=options.optimizers[pick[7]], overlap=options.overlaps[pick[8]],
                   data=data, threads=threads)  # fmt: skip
    return plan if not wishes else _granted(plan, wishes)


_CHOSEN = (
    *(f"layout.{axis}" for axis in ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate")),
    *(f"shard.{entry}" for entry in ("carrier", "stage", "reshard")),
    *(f"batch.{entry}" for entry in ("micro_batch", "accumulation")),
    *(f"pipeline.{entry}" for entry in ("schedule", "chunks", "layers_per_stage")),
    "precision.cast",
)
"""Entries that a pick decides: a wish there leaves out picks, it does not change them."""


def _granted(plan: Plan, wishes: Wishes) -> Plan | None:
    """The plan with wishes that no list holds put in; None where a pick went another way."""
    for key, value in wishes.items():
        part, _, entry = key.partition(".")
        holder = getattr(plan, part)
        if getattr(holder, entry) == value:
            continue
        if key in _CHOSEN:
            return None
        plan = replace(plan, **{part: replace(holder, **{entry: value})})
    return plan


def legal(plan: Plan, spec: ModelSpec, cluster: Cluster) -> bool:
    """Whether any framework could do it."""
    return not check(plan, spec, cluster, to_run=False)
