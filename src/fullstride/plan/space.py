"""The plans that a search considers, and how a plan is told in one line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.plan import (
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
    spec: ModelSpec, cluster: Cluster, model: ModelRef, workload: Workload, recipe: Recipe, num_ranks: int | None = None
) -> tuple[Plan, int]:
    """A plan that holds the work alone, and the number of ranks: all devices unless said otherwise."""
    ranks = cluster.num_devices if num_ranks is None else num_ranks
    made = MadeFor(cluster=cluster.digest, device=cluster.device.kind, versions=dict(cluster.versions))
    named = ModelRef(source=model.source, digest=model.digest or spec.digest)
    return Plan(model=named, workload=workload, recipe=recipe, made_for=made), ranks


def micro_batches(samples_per_rank: int) -> list[int]:
    """Powers of two that divide a rank's samples, smallest first."""
    found, size = [], 1
    while size <= samples_per_rank:
        if samples_per_rank % size == 0:
            found.append(size)
        size *= 2
    return found


def layouts(num_ranks: int, cluster: Cluster) -> list[tuple[Layout, Shard]]:
    """DDP, ZeRO 1 to 3 over all ranks, ZeRO-3 with the ends kept, and sharding inside nodes where there are several."""
    if num_ranks == 1:
        return [layout_for(0, 1)]
    found = [layout_for(stage, num_ranks) for stage in (0, 1, 2, 3)]
    full = layout_for(3, num_ranks)
    found.append((full[0], replace(full[1], reshard=dict(KEEP_ENDS))))
    inside = cluster.groups[0].num_devices
    if 1 < inside < num_ranks and num_ranks % inside == 0:
        hybrid = Layout(dp_replicate=num_ranks // inside, dp_shard=inside)
        found += [(hybrid, Shard(carrier="fsdp2", stage=stage)) for stage in (1, 2, 3)]
    return found


def precisions(cluster: Cluster, accumulation: int, carrier: str) -> list[Precision]:
    """bf16 on GPUs, by autocast or by cast weights; fp32 on CPU, and autocast where bf16 products were measured there."""
    if cluster.device.kind != "cpu":
        return [AUTOCAST] if carrier == "ddp" else [weights_cast(accumulation, carrier), AUTOCAST]
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


def summary(plan: Plan) -> str:
    """A plan in one line: `zero 3, micro-batch 2 x 1, recompute none, compile, bf16 weights, chunked loss`."""
    layout, shard = plan.layout, plan.shard
    carrier = {"none": "one rank", "ddp": "ddp", "fsdp2": f"zero {shard.stage}"}[shard.carrier]
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        carrier += f" in groups of {layout.dp_shard}"
    if shard.reshard:
        carrier += " keeping " + "+".join(name for name, freed in shard.reshard.items() if not freed)
    every = f" every {plan.recompute.every}" if plan.recompute.every > 1 else ""
    precision = {"none": plan.precision.block, "autocast": "bf16 autocast", "weights": "bf16 weights"}[plan.precision.cast]
    return ", ".join((
        carrier,
        f"micro-batch {plan.batch.micro_batch} x {plan.batch.accumulation}",
        f"recompute {plan.recompute.mode.replace('_', '+')}{every}",
        "compile" if plan.compile.mode == "block" else "eager",
        precision,
        "chunked loss" if plan.loss.kind == "chunked" else "model's loss",
    ))  # fmt: skip
