"""A plan with some entries changed and the rest put right: what a neighbour of the best plan is, and what a user has in mind.

What follows from a changed entry is changed with it: the data-parallel degree takes the ranks that are left, the
micro-batches are counted again, a pipeline gets a schedule. What a user fixed stays as it is, so that the rules can judge it.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan import limits
from fullstride.plan.axes import Wishes, layers_for
from fullstride.plan.cost import inside
from fullstride.plan.defaults import AUTOCAST, weights_cast
from fullstride.plan.estimate import Candidate, Estimate
from fullstride.plan.placement import devices_per_node
from fullstride.plan.plan import Batch, Carrier, Layout, Pipeline, Plan, Shard
from fullstride.plan.price import price
from fullstride.plan.rules import check
from fullstride.plan.verdict import candidate

AXES = ("tp", "pp", "cp", "ep")
_DERIVED = ("layout", "shard", "batch", "pipeline")


def vary(plan: Plan, wishes: Wishes, spec: ModelSpec, *, lay_out: bool = True) -> Plan:
    """`plan` with the entries of `wishes`, on as many ranks as before where they can be shared out.

    `lay_out` writes down how blocks lie where they do not come out even; without it the rules say that they do not.
    """
    layout, shard = _layout(plan, wishes)
    batch = _batch(plan, layout, wishes)
    pipeline = _pipeline(plan, layout, batch, wishes, spec, lay_out)
    precision = plan.precision
    if precision.cast == "weights" and precision == weights_cast(plan.batch.accumulation, plan.shard.carrier):
        precision = AUTOCAST if shard.carrier == "ddp" else weights_cast(batch.accumulation, shard.carrier)
    elif precision == AUTOCAST and plan.shard.carrier == "ddp" and shard.carrier != "ddp":
        precision = weights_cast(batch.accumulation, shard.carrier)
    overlap = plan.overlap if layout.tp > 1 else replace(plan.overlap, tensor=False)
    changed = replace(plan, layout=layout, shard=shard, batch=batch, pipeline=pipeline, precision=precision, overlap=overlap)
    for key, value in wishes.items():
        part, _, entry = key.partition(".")
        if part not in _DERIVED:
            changed = replace(changed, **{part: replace(getattr(changed, part), **{entry: value})})
    return changed


def _zero_by(plan: Plan) -> Carrier:
    """Who shares states: who did before."""
    return "flat" if plan.shard.carrier == "flat" else "fsdp2"


def _layout(plan: Plan, wishes: Wishes) -> tuple[Layout, Shard]:
    old = plan.layout
    fixed: dict[str, Any] = {key[7:]: value for key, value in wishes.items() if key.startswith("layout.")}
    tp, pp, cp = (fixed.get(axis, getattr(old, axis)) for axis in ("tp", "pp", "cp"))
    if tp * pp * cp < 1 or old.world_size % (tp * pp * cp):  # what nobody asked for gives way
        tp, pp, cp = (fixed.get(axis, 1) for axis in ("tp", "pp", "cp"))
    dp = max(1, old.world_size // max(1, tp * pp * cp))
    stage = wishes.get("shard.stage", plan.shard.stage)
    if stage == 0 and plan.shard.stage == 0 and plan.shard.carrier == "none" and dp * cp > 1 and "shard.stage" not in wishes:
        stage = 1  # ranks that were not there before share the states
    if fixed.get("dp_shard", 1) > 1 and "shard.stage" not in wishes:
        stage = max(1, stage)
    carrier = wishes.get("shard.carrier", "none" if dp * cp == 1 else "ddp" if stage == 0 else _zero_by(plan))
    group = dp if stage else 1
    if stage and 1 < old.dp_shard < dp and old.dp_replicate > 1 and dp % old.dp_shard == 0:
        group = old.dp_shard
    group = fixed.get("dp_shard", dp // fixed["dp_replicate"] if fixed.get("dp_replicate") else group)
    replicas = fixed.get("dp_replicate", max(1, dp // max(1, group)))
    shards = Shard(
        carrier=carrier,
        stage=stage if carrier != "none" or "shard.stage" in wishes else 0,
        reshard=wishes.get("shard.reshard", plan.shard.reshard if stage == 3 else {}),
    )
    ep = fixed.get("ep", old.ep if (dp * cp) % old.ep == 0 else 1)
    rest = {key: value for key, value in fixed.items() if key in ("order", "sequence_parallel", "expert_tp")}
    layout = replace(old, dp_replicate=replicas, dp_shard=group, tp=tp, pp=pp, cp=cp, ep=ep, **rest)
    return layout, shards


def _batch(plan: Plan, layout: Layout, wishes: Wishes) -> Batch:
    share = plan.workload.samples_per_step // layout.data_parallel
    micro = wishes.get("batch.micro_batch")
    if micro is None:
        micro = max((n for n in limits.divisors(max(1, share)) if n <= plan.batch.micro_batch), default=1)
        if (accumulation := wishes.get("batch.accumulation")) and share % accumulation == 0:
            micro = max(1, share // accumulation)
    return Batch(micro_batch=micro, accumulation=wishes.get("batch.accumulation", max(1, share // max(1, micro))))


def _pipeline(plan: Plan, layout: Layout, batch: Batch, wishes: Wishes, spec: ModelSpec, lay_out: bool) -> Pipeline:
    fixed: dict[str, Any] = {key[9:]: value for key, value in wishes.items() if key.startswith("pipeline.")}
    if layout.pp == 1 and not fixed:
        return Pipeline()
    old = plan.pipeline
    schedule = fixed.get("schedule", old.schedule if old.schedule != "none" else "1f1b")
    if "schedule" not in fixed:
        low, high = limits.CHUNKS[schedule]
        wanted = fixed.get("chunks", max(old.chunks, low))
        turns = schedule != "interleaved" or batch.accumulation % max(1, layout.pp) == 0
        if not (low <= wanted <= high and turns and wanted * layout.pp <= spec.num_blocks):
            schedule = "interleaved" if fixed.get("chunks", 1) > 1 else "1f1b"
    low, high = limits.CHUNKS[schedule]
    chunks = fixed.get("chunks", min(max(old.chunks, low), high))
    stages = layout.pp * chunks
    uneven = lay_out and 1 <= stages <= spec.num_blocks and spec.num_blocks % max(1, stages)
    layers = fixed.get("layers_per_stage", layers_for(spec.num_blocks, stages) if uneven else ())
    sizes = fixed.get("micro_batch_per_stage", ())
    return Pipeline(schedule=schedule, chunks=chunks, layers_per_stage=layers, micro_batch_per_stage=sizes)


def changes_of(plan: Plan, spec: ModelSpec, cluster: Cluster) -> list[tuple[str, dict[str, Any]]]:
    """The single steps away from a plan: words, and the entries that they change."""
    layout, found = plan.layout, []
    world = layout.world_size
    for axis in AXES:
        old = getattr(layout, axis)
        most = devices_per_node(cluster) if axis == "tp" else limits.num_experts(spec) if axis == "ep" else world
        values = [n for n in (old // 2, old * 2) if 1 <= n <= most and n != old]
        found += [(f"{axis} {n} for {old}", {f"layout.{axis}": n}) for n in values]
    if plan.shard.carrier != "none":
        stages = [n for n in range(4) if n != plan.shard.stage]
        found += [(f"zero {n}" if n else "ddp", {"shard.stage": n}) for n in stages]
    if plan.shard.carrier in ("fsdp2", "flat"):
        other = "fsdp2" if plan.shard.carrier == "flat" else "flat"
        found.append(("FSDP2" if other == "fsdp2" else "flat buffers", {"shard.carrier": other}))
    micro = plan.batch.micro_batch
    found += [(f"micro-batch {n} for {micro}", {"batch.micro_batch": n}) for n in (micro // 2, micro * 2) if n]
    if inside.overlaps(cluster, layout.tp):
        words = "tensor parallelism after its products" if plan.overlap.tensor else "tensor parallelism beside its products"
        found.append((words, {"overlap.tensor": not plan.overlap.tensor}))
    modes = [mode for mode in ("none", "norm_activation", "full") if mode != plan.recompute.mode]
    found += [(f"recompute {mode.replace('_', '+')}", {"recompute.mode": mode}) for mode in modes]
    if layout.pp > 1:
        kinds = [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("gpipe", 1)]
        found += [
            (kind, {"pipeline.schedule": kind, "pipeline.chunks": n}) for kind, n in kinds if kind != plan.pipeline.schedule
        ]
    compiled = plan.compile.mode == "block"
    found.append(("eager", {"compile.mode": "off"}) if compiled else ("compile", {"compile.mode": "block"}))
    chunked = plan.loss.kind == "chunked"
    found.append(("model's loss", {"loss.kind": "model"}) if chunked else ("chunked loss", {"loss.kind": "chunked"}))
    return found


def neighbours(plan: Plan, estimate: Estimate, spec: ModelSpec, cluster: Cluster, *, to_run: bool) -> tuple[Candidate, ...]:
    """Every plan one step away that the rules allow, priced, with the one term that lost it; the closest first."""
    found = []
    for words, wishes in changes_of(plan, spec, cluster):
        other = vary(plan, wishes, spec)
        if other.plan_hash == estimate.plan_hash or check(other, spec, cluster, to_run=to_run):
            continue
        found.append(candidate(other, price(other, spec, cluster), estimate, change=words))
    order = sorted(found, key=lambda item: (item.lost_by.startswith("does not fit"), item.step_seconds))
    return tuple(order)
