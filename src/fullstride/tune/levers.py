"""The changes that tune can make: one table.

A lever names the loss it attacks and proposes plans; `plan/rules.py` says which of them are allowed, and pricing which of
them could pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.files import Value
from fullstride.model.spec import ModelSpec
from fullstride.plan import met
from fullstride.plan.plan import Batch, Carrier, Overlap, Pipeline, Plan, Precision, Shard
from fullstride.plan.refine import MOST_PASSES, MOST_SIZED
from fullstride.tune.stages import balanced, other_schedules, other_sizes


class Move(Value, frozen=True, kw_only=True):
    """One proposal of a lever."""

    plan: Plan
    words: str
    """`micro-batch 1 -> 4, accumulation 4 -> 1`."""


Changes: TypeAlias = Callable[[Plan, ModelSpec, Cluster], Iterator[Move]]


class Lever(Value, frozen=True, kw_only=True):
    """Something that can be changed, alone."""

    name: str
    attacks: str
    """The loss it goes after, in words."""
    changes: Changes
    needs: str
    """Said where it has nothing to propose."""
    moves_memory: bool = False
    """It frees or takes much memory, so it may come with the micro-batch that this makes room for."""


def replaced(plan: Plan, **parts: Any) -> Plan:
    """The plan with some parts replaced, and what hangs on them brought along.

    The reshard rule goes with ZeRO-3, prefetch likewise, buckets go with DDP, gradients narrower than the masters with a
    single micro-batch. The kind of cast follows the carrier: DDP takes none but autocast.
    """
    new = msgspec.structs.replace(plan, **parts)
    shard, overlap, precision = new.shard, new.overlap, new.precision
    if shard.stage != 3:
        shard = msgspec.structs.replace(shard, reshard={})
        overlap = msgspec.structs.replace(overlap, prefetch=Overlap().prefetch)
    if shard.carrier != "ddp":
        overlap = msgspec.structs.replace(overlap, bucket_bytes=Overlap().bucket_bytes)
    if shard.carrier == "ddp" and precision.cast == "weights":
        precision = _autocast(precision)
    if precision.gradient != precision.master and new.batch.accumulation > 1:
        precision = msgspec.structs.replace(precision, gradient=precision.master)
    return msgspec.structs.replace(new, shard=shard, overlap=overlap, precision=precision)


def micro_batches(plan: Plan) -> list[int]:
    """Sizes into which a rank's samples of a step can be cut evenly."""
    samples = plan.workload.samples_per_step // plan.layout.data_parallel
    return [size for size in range(1, samples + 1) if samples % size == 0]


def with_micro_batch(plan: Plan, size: int) -> Move:
    """The same work per step in micro-batches of `size`, on all stages where there are several."""
    accumulation = plan.workload.samples_per_step // plan.layout.data_parallel // size
    old, by_stage = plan.batch, plan.pipeline.micro_batch_per_stage
    before, after = (" ".join(map(str, by_stage)), f"{size} on all stages") if by_stage else (old.micro_batch, size)
    words = f"micro-batch {before} -> {after}, accumulation {old.accumulation} -> {accumulation}"
    pipeline = msgspec.structs.replace(plan.pipeline, micro_batch_per_stage=())
    return Move(plan=replaced(plan, batch=Batch(micro_batch=size, accumulation=accumulation), pipeline=pipeline), words=words)


def _micro_batch(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    for size in micro_batches(plan):
        if size != plan.batch.micro_batch:
            yield with_micro_batch(plan, size)


def _recompute(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    for mode in ("none", "norm_activation", "full"):
        if mode != plan.recompute.mode:
            new = msgspec.structs.replace(plan.recompute, mode=mode, every=1)
            yield Move(plan=replaced(plan, recompute=new), words=f"recompute {plan.recompute.mode} -> {mode}")


def _zero(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    ranks = plan.layout.data_parallel
    if ranks == 1:
        return
    now = _sharding(plan.shard)
    alone, together = (msgspec.structs.replace(plan.layout, dp_replicate=ranks // size, dp_shard=size) for size in (1, ranks))
    choices = [(Shard(carrier="ddp", stage=0), alone)] if plan.layout.pp == 1 else []
    carrier: Carrier = "flat" if plan.shard.carrier == "flat" else "fsdp2"
    choices += [(Shard(carrier=carrier, stage=stage), together) for stage in (1, 2, 3)]
    for shard, layout in choices:
        if _sharding(shard) != now:
            yield Move(plan=replaced(plan, shard=shard, layout=layout), words=f"{now} -> {_sharding(shard)}")


def _sharding(shard: Shard) -> str:
    return "DDP" if shard.carrier == "ddp" else f"ZeRO-{shard.stage}"


def _carrier(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    names: dict[Carrier, str] = {"fsdp2": "FSDP2", "flat": "flat buffers"}
    for carrier, words in names.items():
        if plan.shard.carrier in names and carrier != plan.shard.carrier:
            shard = msgspec.structs.replace(plan.shard, carrier=carrier)
            yield Move(plan=replaced(plan, shard=shard), words=f"ZeRO by {names[plan.shard.carrier]} -> {words}")


def _reshard(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    if plan.shard.stage != 3:
        return
    for group in ("blocks", "head", "embedding"):
        now = plan.shard.reshard.get(group, True)
        shard = msgspec.structs.replace(plan.shard, reshard={**plan.shard.reshard, group: not now})
        verb = "keep the gathered" if now else "free the gathered"
        yield Move(plan=replaced(plan, shard=shard), words=f"{verb} {group} weights after forward")


def _compile(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    if plan.compile.mode == "off":
        new = msgspec.structs.replace(plan.compile, mode="block")
        yield Move(plan=replaced(plan, compile=new), words="compile off -> each block")
    else:
        new = msgspec.structs.replace(plan.compile, mode="off")
        yield Move(plan=replaced(plan, compile=new), words="compile each block -> off")


def _autocast(precision: Precision) -> Precision:
    return Precision(cast="autocast", embedding="fp32", block="bf16", head="bf16", loss=precision.loss)


def _precision(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    loss = plan.precision.loss
    weights = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", loss=loss)
    narrow = msgspec.structs.replace(weights, gradient="bf16", reduction="bf16")
    half = msgspec.structs.replace(weights, reduction="bf16")
    choices = {
        "fp32": Precision(loss=loss),
        "bf16 autocast": _autocast(plan.precision),
        "bf16 weights with fp32 masters": weights,
        "bf16 weights, gradients reduced in bf16": half,
        "bf16 weights and gradients with fp32 masters": narrow,
        "bf16 weights and gradients, reduced in fp32": msgspec.structs.replace(weights, gradient="bf16"),
    }
    now = next((words for words, precision in choices.items() if precision == plan.precision), plan.precision.cast)
    for words, precision in choices.items():
        if precision != plan.precision and words != "fp32":
            yield Move(plan=msgspec.structs.replace(plan, precision=precision), words=f"{now} -> {words}")


def _loss(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    kind = "chunked" if plan.loss.kind == "model" else "model"
    new = msgspec.structs.replace(plan.loss, kind=kind)
    words = "head and loss by chunks of tokens" if kind == "chunked" else "head and loss as the model has them"
    yield Move(plan=replaced(plan, loss=new), words=words)


def _data(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    pin = cluster.device.kind != "cpu"
    for workers in (1, 2):
        if workers > plan.data.workers or (workers == plan.data.workers and pin != plan.data.pin):
            new = msgspec.structs.replace(plan.data, workers=workers, pin=pin)
            words = f"data workers {plan.data.workers} -> {workers}{', pinned memory' if pin else ''}"
            yield Move(plan=replaced(plan, data=new), words=words)


def _threads(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    share = max(1, cluster.host.num_cores // plan.layout.world_size)
    for threads in sorted({max(1, share // 2), share}):
        now = plan.threads.compute or (1 if plan.layout.world_size > 1 else cluster.host.num_cores)
        if threads != now:
            new = msgspec.structs.replace(plan.threads, compute=threads)
            yield Move(plan=replaced(plan, threads=new), words=f"CPU threads of a rank {now} -> {threads}")


def _prefetch(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    if plan.shard.stage != 3:
        return
    for blocks in (2, 3):
        if blocks > plan.overlap.prefetch:
            new = msgspec.structs.replace(plan.overlap, prefetch=blocks)
            words = f"weights gathered {plan.overlap.prefetch} -> {blocks} blocks ahead"
            yield Move(plan=replaced(plan, overlap=new), words=words)


def _buckets(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    if plan.shard.carrier != "ddp":
        return
    for size in (5 * 2**20, 100 * 2**20):
        if size != plan.overlap.bucket_bytes:
            new = msgspec.structs.replace(plan.overlap, bucket_bytes=size)
            words = f"gradient buckets {plan.overlap.bucket_bytes // 2**20} -> {size // 2**20} MiB"
            yield Move(plan=replaced(plan, overlap=new), words=words)


def _tensor_overlap(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    if plan.layout.tp == 1:
        return
    new = msgspec.structs.replace(plan.overlap, tensor=not plan.overlap.tensor)
    where = "beside" if new.tensor else "between"
    yield Move(plan=replaced(plan, overlap=new), words=f"exchange of tensor parallelism {where} products")


def _schedule(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    for pipeline, words in other_schedules(plan, spec, cluster):
        yield _with_pipeline(plan, pipeline, words)


def _balance(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    if found := balanced(plan, spec, cluster):
        yield _with_pipeline(plan, *found)


def _sizes(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Iterator[Move]:
    for pipeline, words in other_sizes(plan, spec, cluster):
        yield _with_pipeline(plan, pipeline, words)


def _with_pipeline(plan: Plan, pipeline: Pipeline, words: str) -> Move:
    """A schedule that FSDP2 cannot serve comes with flat buffers, which can (rule `pipeline.fsdp2`)."""
    moved = replaced(plan, pipeline=pipeline)
    if moved.shard.carrier == "fsdp2" and met.pipeline_fsdp2_met(moved):
        moved = replaced(moved, shard=msgspec.structs.replace(moved.shard, carrier="flat"))
        words += ", ZeRO by flat buffers"
    return Move(plan=moved, words=words)


_STAGES = "needs several pipeline stages"

LEVERS: tuple[Lever, ...] = (
    Lever(
        name="micro-batch",
        attacks="small matrices, launches, and work that is repeated for each micro-batch",
        changes=_micro_batch,
        needs="a rank has one sample a step",
    ),
    Lever(
        name="recompute",
        attacks="work done twice, or memory that a larger micro-batch wants",
        changes=_recompute,
        needs="nothing else to choose",
        moves_memory=True,
    ),
    Lever(
        name="zero",
        attacks="exposed communication, or memory held twice",
        changes=_zero,
        needs="needs several data-parallel ranks",
        moves_memory=True,
    ),
    Lever(
        name="carrier",
        attacks="copies around collectives, and gathering that waits for the whole optimizer step",
        changes=_carrier,
        needs="applies to ZeRO only",
        moves_memory=True,
    ),
    Lever(
        name="reshard",
        attacks="weights gathered twice",
        changes=_reshard,
        needs="applies to ZeRO-3 only",
        moves_memory=True,
    ),
    Lever(
        name="compile",
        attacks="memory traffic of pointwise operators, and launches",
        changes=_compile,
        needs="nothing else to choose",
    ),
    Lever(
        name="precision",
        attacks="slow arithmetic, casts, and wide gradients",
        changes=_precision,
        needs="nothing else to choose",
        moves_memory=True,
    ),
    Lever(
        name="chunked loss",
        attacks="memory and traffic of whole logits",
        changes=_loss,
        needs="nothing else to choose",
        moves_memory=True,
    ),
    Lever(name="data workers", attacks="waits for data", changes=_data, needs="workers are at work already"),
    Lever(name="cpu threads", attacks="idle cores", changes=_threads, needs="a rank has all of its cores already"),
    Lever(name="prefetch", attacks="waits for gathered weights", changes=_prefetch, needs="applies to ZeRO-3 only"),
    Lever(name="buckets", attacks="exposed gradient reduction", changes=_buckets, needs="applies to DDP only"),
    Lever(
        name="tensor overlap",
        attacks="exposed communication of tensor parallelism",
        changes=_tensor_overlap,
        needs="needs several tensor-parallel ranks",
    ),
    Lever(
        name="schedule",
        attacks="the pipeline's bubble, or activations that wait for their backward",
        changes=_schedule,
        needs=_STAGES,
        moves_memory=True,
    ),
    Lever(
        name="balance",
        attacks="stages that wait for the slowest",
        changes=_balance,
        needs=f"{_STAGES} whose blocks do not lie by their cost, and at most {MOST_PASSES} passes of stages a step",
    ),
    Lever(
        name="sizes",
        attacks="the pipeline's bubble, at the stages that fill and drain it",
        changes=_sizes,
        needs=f"{_STAGES} that suit micro-batches of different sizes, and at most {MOST_SIZED} passes of stages a step",
    ),
)
"""All levers."""
