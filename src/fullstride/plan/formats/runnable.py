"""From a plan as another framework would carry it out to the nearest one that fullstride runs, each change said."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from fullstride.plan.formats.detect import flat
from fullstride.plan.formats.imported import NotCarried
from fullstride.plan.formats.table import shown
from fullstride.plan.plan import Layout, Loss, Overlap, Plan, Precision, Shard

_WHY: dict[str, str] = {
    "shard": "carried out by torch: nothing on one rank, DDP, or FSDP2",
    "layout": "carried out by torch: all data ranks share, or all replicate",
    "precision": "the nearest combination of dtypes that torch's carriers have",
    "loss": "the model's own loss is computed",
    "kernels": "torch's own kernels compute",
    "overlap": "torch's carriers decide",
}


def runnable(plan: Plan) -> tuple[Plan, tuple[NotCarried, ...]]:
    """The nearest plan that may run, as far as there is one, and what was changed for it.

    Carriers of other frameworks become torch's own: ZeRO stage 1 to 3 is FSDP2's, replicas are DDP's. What changes the
    learning or needs what is not built (tensor parallelism, offload, fp16, fp8) stays, for the rules to refuse.
    """
    if plan.shard.carrier not in ("megatron", "deepspeed"):
        return plan, ()
    data, stage = plan.layout.data_parallel, plan.shard.stage
    weights_over_ranks = plan.precision.cast == "weights" and data > 1
    stage = max(stage, 1) if weights_over_ranks else stage  # DDP reduces the gradients of masters, and a cast copy has others
    if data == 1:
        shard, replicate = Shard(), 1
    elif stage == 0:
        shard, replicate = Shard(carrier="ddp"), data
    else:
        shard, replicate = Shard(carrier="fsdp2", stage=stage), 1
    layout = replace(plan.layout, dp_replicate=replicate, dp_shard=data // replicate)
    if layout.tp == 1:
        layout = replace(layout, sequence_parallel=Layout().sequence_parallel)
    if layout.ep == 1:
        layout = replace(layout, expert_tp=1)
    changed = replace(
        plan,
        shard=shard,
        layout=layout,
        precision=_precision(plan, shard),
        loss=replace(plan.loss, fused=Loss().fused),
        kernels=replace(plan.kernels, gradient_fusion=False),
        overlap=Overlap(),
    )
    return changed, _changes(plan, changed)


def _precision(plan: Plan, shard: Shard) -> Precision:
    precision = plan.precision
    if precision.cast != "weights" or precision.master != "fp32":
        return precision
    reduction = precision.reduction if shard.carrier == "fsdp2" else precision.master
    kept = precision.block if shard.carrier == "none" else reduction
    narrow = precision.gradient == kept and plan.batch.accumulation == 1
    return replace(precision, reduction=reduction, gradient=precision.gradient if narrow else precision.master)


def _changes(before: Plan, after: Plan) -> tuple[NotCarried, ...]:
    old, new = flat(before), flat(after)
    return tuple(_change(key, old[key], new[key]) for key in old if old[key] != new[key])


def _change(key: str, old: Any, new: Any) -> NotCarried:
    why = _WHY.get(key.partition(".")[0], "the nearest that runs")
    return NotCarried(key=key, value=shown(old), why=f"runs as {shown(new)}: {why}")
