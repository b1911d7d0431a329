"""The baseline: what a user would write by hand, and what every gain is measured against."""

from __future__ import annotations

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput
from fullstride.model.spec import ModelSpec
from fullstride.plan.defaults import FP32, layout_for, plain_plan, weights_cast
from fullstride.plan.estimate import Estimate
from fullstride.plan.plan import Adapter, Batch, ModelRef, Plan, Recipe, Recompute, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import require
from fullstride.plan.space import micro_batches, work_plan
from fullstride.plan.verdict import does_not_fit


def baseline_plan(
    spec: ModelSpec,
    cluster: Cluster,
    model: ModelRef,
    workload: Workload,
    recipe: Recipe,
    *,
    num_ranks: int | None = None,
    adapter: Adapter | None = None,
) -> Plan:
    """What a user would do by hand.

    Eager; bf16 autocast, fp32 on CPU; DDP if it fits, else FSDP2 around each block (ZeRO-3, weights cast to bf16); full
    recompute only if nothing fits without; the largest power-of-two micro-batch that fits; torchrun's default threads; no
    data workers; the model's own loss. With an `adapter` only that is trained.

    Raises:
        BadInput: the samples of a step cannot be shared out, or the work breaks a rule.
        DoesNotFit: nothing of this fits; says by how much, and what would.
    """
    base, ranks = work_plan(spec, cluster, model, workload, recipe, num_ranks, adapter)
    if workload.samples_per_step % ranks:
        raise BadInput(
            f"samples_per_step = {workload.samples_per_step} over {ranks} ranks: each takes the same number",
            fix=f"give a multiple of {ranks}",
        )
    plain = plain_plan(base, ranks, cluster)
    require(plain, spec, cluster)
    ways = [plain]
    if ranks > 1:
        layout, shard = layout_for(3, ranks)
        precision = FP32 if cluster.device.kind == "cpu" else weights_cast(plain.batch.accumulation, "fsdp2")
        ways.append(replace(plain, layout=layout, shard=shard, precision=precision))
    ways.append(replace(ways[-1], recompute=Recompute(mode="full")))
    tried: list[tuple[Plan, Estimate]] = []
    for way in ways:
        for micro in reversed(micro_batches(workload.samples_per_step // ranks)):
            plan = replace(way, batch=Batch(micro_batch=micro, accumulation=workload.samples_per_step // ranks // micro))
            estimate = price(plan, spec, cluster)
            if estimate.fits:
                return plan
            tried.append((plan, estimate))
    raise does_not_fit(tried, spec, cluster, base, ranks)
