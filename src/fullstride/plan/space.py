"""The plans that a search considers, and how a plan is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, product

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.plan import (
    Adapter,
    Batch,
    Compile,
    Data,
    Layout,
    Loss,
    MadeFor,
    ModelRef,
    Plan,
    Precision,
    Recipe,
    Recompute,
    Shard,
    Threads,
    Workload,
)
from fullstride.plan.rules import check

KEEP_ENDS = {"embedding": False, "head": False}
"""Blocks are freed after forward, embedding and head stay: they are used last and first."""


def work_plan(
    spec: ModelSpec,
    cluster: Cluster,
    model: ModelRef,
    workload: Workload,
    recipe: Recipe,
    num_ranks: int | None = None,
    adapter: Adapter | None = None,
) -> tuple[Plan, int]:
    """A plan that holds the work alone (adapters are part of it), and the number of ranks: all devices by default."""
    ranks = cluster.num_devices if num_ranks is None else num_ranks
    machine = replace(cluster, coefficients=None) if cluster.coefficients else cluster  # a calibration is no machine
    made = MadeFor(cluster=machine.digest, device=cluster.device.kind, versions=dict(cluster.versions))
    named = replace(model, digest=model.digest or spec.digest)
    return Plan(model=named, workload=workload, recipe=recipe, made_for=made, adapter=adapter or Adapter()), ranks


def micro_batches(samples_per_rank: int) -> list[int]:
    """Powers of two that divide a rank's samples, smallest first."""
    found, size = [], 1
    while size <= samples_per_rank:
        if samples_per_rank % size == 0:
            found.append(size)
        size *= 2
    return found


def layouts(num_ranks: int, cluster: Cluster) -> list[tuple[Layout, Shard]]:
    """DDP, ZeRO 1 to 3 over all ranks by FSDP2 and on flat buffers, ZeRO-3 with the ends kept, and sharding inside nodes
    where there are several.
    """
    if num_ranks == 1:
        return [layout_for(0, 1)]
    found = [layout_for(stage, num_ranks) for stage in (0, 1, 2, 3)]
    found += [(layout, replace(shard, carrier="flat")) for layout, shard in found if shard.stage]
    full = layout_for(3, num_ranks)
    found.append((full[0], replace(full[1], reshard=dict(KEEP_ENDS))))
    inside = cluster.groups[0].num_devices
    if 1 < inside < num_ranks and num_ranks % inside == 0:
        hybrid = Layout(dp_replicate=num_ranks // inside, dp_shard=inside)
        found += [(hybrid, Shard(carrier=carrier, stage=stage)) for carrier in ("fsdp2", "flat") for stage in (1, 2, 3)]
    return found


def precisions(cluster: Cluster, accumulation: int, carrier: str) -> list[Precision]:
    """bf16 on GPUs, by autocast or by cast weights; fp32 on CPU, and autocast where bf16 products were measured there."""
    if cluster.device.kind != "cpu":
        return (
            [AUTOCAST] if carrier == "ddp" else [weights_cast(accumulation, carrier), AUTOCAST][: 1 if carrier == "flat" else 2]
        )
    measured = any(point.dtype == "bf16" for point in cluster.matmuls)
    return [FP32, AUTOCAST] if measured else [FP32]


def compile_modes(cluster: Cluster) -> list[Compile]:
    """Eager, and compiled blocks unless this is a CPU host not known to have a compiler."""
    if cluster.device.kind == "cpu" and not cluster.host.has_compiler:
        return [Compile()]
    return [Compile(), Compile(mode="block")]


def input_parts(cluster: Cluster, num_ranks: int) -> tuple[Data, Threads]:
    """Data workers and threads: they act on their own, so that the best of each is taken without trying combinations."""
    if cluster.device.kind != "cpu":
        return Data(workers=1, pin=True), Threads()
    cores = cluster.host.num_cores
    share = max(1, cores // num_ranks)
    return Data(workers=1 if cores > num_ranks else 0), Threads(compute=share if share > 1 else 0)


def space(base: Plan, num_ranks: int, spec: ModelSpec, cluster: Cluster) -> Iterator[Plan]:
    """Every plan for this work that the rules allow, out of carrier and ZeRO stage, reshard rule, micro-batch, recompute,
    compilation, precision and loss.
    """
    samples = base.workload.samples_per_step
    if samples % num_ranks:
        return
    data, threads = input_parts(cluster, num_ranks)
    recomputes = [Recompute(), Recompute(mode="norm_activation"), Recompute(mode="full")]
    losses = [Loss(), Loss(kind="chunked")]
    for (layout, shard), micro in product(layouts(num_ranks, cluster), micro_batches(samples // num_ranks)):
        batch = Batch(micro_batch=micro, accumulation=samples // num_ranks // micro)
        choices = product(precisions(cluster, batch.accumulation, shard.carrier), recomputes, compile_modes(cluster), losses)
        for precision, recompute, compiled, loss in choices:
            plan = replace(base, layout=layout, shard=shard, batch=batch, precision=precision, recompute=recompute,
                           compile=compiled, loss=loss, data=data, threads=threads)  # fmt: skip
            if not check(plan, spec, cluster):
                yield plan


CARRIERS = {"none": "one rank", "ddp": "ddp", "megatron": "Megatron's", "deepspeed": "DeepSpeed's"}


def summary(plan: Plan) -> str:
    """A plan in one line: `tp 8, pp 4 1f1b, zero 3, micro-batch 2 x 1, recompute none, compile, bf16 weights, chunked loss`."""
    recompute, precision = plan.recompute, plan.precision
    every = f" every {recompute.every}" if recompute.every > 1 else ""
    every += f" on {recompute.blocks} a stage" if recompute.blocks else ""
    every += f", inputs on {recompute.offload}" if recompute.offload != "none" else ""
    cast = {"none": precision.block, "autocast": f"{precision.block} autocast", "weights": f"{precision.block} weights"}
    return ", ".join((
        *_degrees(plan),
        *_stages(plan),
        _sharing(plan),
        f"micro-batch {plan.batch.micro_batch} x {plan.batch.accumulation}",
        f"recompute {recompute.mode.replace('_', '+')}{every}",
        *_offloaded(plan),
        *([f"adapters of rank {plan.adapter.rank}"] if plan.adapter.rank else []),
        "compile" if plan.compile.mode == "block" else "eager",
        cast[precision.cast] + (f", fp8 {precision.fp8}" if precision.fp8 != "off" else ""),
        "chunked loss" if plan.loss.kind == "chunked" else "model's loss",
    ))  # fmt: skip


def short(plan: Plan) -> str:
    """A plan's layout alone: `tp 8, pp 4 1f1b, zero 3`."""
    return ", ".join((*_degrees(plan), _sharing(plan)))


def _degrees(plan: Plan) -> list[str]:
    """The axes beside data parallelism that are used."""
    layout, pipe = plan.layout, plan.pipeline
    schedule = f" {pipe.schedule}" + (f" x {pipe.chunks}" if pipe.chunks > 1 else "")
    found = [f"{axis} {size}" for axis in ("tp", "cp", "ep") if (size := getattr(layout, axis)) > 1]
    if layout.tp > 1 and plan.overlap.tensor:
        found[0] += " overlapped"
    return found + ([f"pp {layout.pp}{schedule}"] if layout.pp > 1 else [])


def _stages(plan: Plan) -> list[str]:
    """What stages do not have alike: `blocks 7 + 14 x 8 + 7`, `micro-batches 3 x 2 + 1`."""
    pipe = plan.pipeline
    lists = (("blocks", pipe.layers_per_stage), ("micro-batches", pipe.micro_batch_per_stage))
    return [f"{name} {_runs(values)}" for name, values in lists if len(set(values)) > 1]


def _runs(values: tuple[int, ...]) -> str:
    found = [(value, len(list(same))) for value, same in groupby(values)]
    return " + ".join(f"{many} x {value}" if many > 1 else f"{value}" for value, many in found)


def _sharing(plan: Plan) -> str:
    """How data-parallel ranks share states."""
    layout, shard = plan.layout, plan.shard
    if shard.carrier == "none" and layout.world_size > 1:
        return "no data parallelism"
    words = {"fsdp2": f"zero {shard.stage}", "flat": f"flat zero {shard.stage}"}.get(shard.carrier) or CARRIERS[shard.carrier]
    words += f" zero {shard.stage}" if shard.carrier in ("megatron", "deepspeed") and shard.stage else ""
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        words += f" in groups of {layout.dp_shard}"
    if shard.reshard:
        words += " keeping " + "+".join(name for name, freed in shard.reshard.items() if not freed)
    return words


def _offloaded(plan: Plan) -> list[str]:
    """States that do not lie on the device."""
    shares = (("cpu", plan.optimizer.cpu_share), ("nvme", plan.optimizer.nvme_share))
    return [f"{share:.0%} of states on {where}" for where, share in shares if share]
