"""A plan as DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any

from fullstride.model.spec import ModelSpec
from fullstride.plan.formats.deepspeed import DTYPE_BYTES, SCHEDULES
from fullstride.plan.plan import Plan


def write(plan: Plan, spec: ModelSpec | None) -> str:
    """The plan as DeepSpeed's JSON; what reading it back does not give is for the caller to list."""
    batch, recipe = plan.batch, plan.recipe
    raw: dict[str, Any] = {
        "train_batch_size": plan.workload.samples_per_step,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": recipe.clip_norm,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": recipe.learning_rate,
                "betas": [recipe.beta1, recipe.beta2],
                "eps": recipe.eps,
                "weight_decay": recipe.weight_decay,
            },
        },
        "zero_optimization": _zero(plan),
        **_dtypes(plan),
    }
    if plan.optimizer.implementation == "foreach":
        raw["optimizer"]["params"]["torch_adam"] = True
    if scheduler := _scheduler(plan):
        raw["scheduler"] = scheduler
    if plan.layout.tp > 1:
        raw["tensor_parallel"] = {"autotp_size": plan.layout.tp}
    if plan.layout.cp > 1:
        raw["sequence_parallel_size"] = plan.layout.cp
    if plan.recompute.mode == "full":
        section: dict[str, Any] = {"partition_activations": False, "cpu_checkpointing": plan.recompute.offload == "cpu"}
        if spec is not None:
            section["number_checkpoints"] = sum(stack.count for stack in spec.stacks)
        raw["activation_checkpointing"] = section
    return json.dumps(raw, indent=2) + "\n"


def _zero(plan: Plan) -> dict[str, Any]:
    stage = plan.shard.stage
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0:
        zero["overlap_comm"] = plan.overlap.gradients
    width = DTYPE_BYTES[plan.precision.reduction]
    if plan.overlap.bucket_bytes >= width:
        zero["reduce_bucket_size"] = plan.overlap.bucket_bytes // width
    for device, share in (("cpu", plan.optimizer.cpu_share), ("nvme", plan.optimizer.nvme_share)):
        # DeepSpeed takes a share below one at stage 3 alone, and only of what lies in host memory
        if share > 0 and "offload_optimizer" not in zero and stage > 0 and (share == 1 or (stage == 3 and device == "cpu")):
            zero["offload_optimizer"] = {"device": device, "pin_memory": True}
            if share < 1:
                zero["offload_optimizer"]["ratio"] = share
    return zero


def _dtypes(plan: Plan) -> dict[str, Any]:
    precision = plan.precision
    if precision.cast == "autocast" and precision.block in ("bf16", "fp16"):
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16" if precision.block == "bf16" else "float16"}}
    raw: dict[str, Any] = {}
    if precision.block in ("bf16", "fp16"):
        raw[precision.block] = {"enabled": True}
        if precision.master == precision.block:
            raw[precision.block][f"{precision.block}_master_weights_and_grads"] = True
        if precision.optimizer_state == "bf16" == precision.block:
            raw["bf16"]["bf16_optimizer_states"] = True
    if precision.gradient != "fp64":
        raw["data_types"] = {"grad_accum_dtype": precision.gradient}
    if precision.reduction != "fp64":
        raw["communication_data_type"] = precision.reduction
    return raw


def _scheduler(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    if recipe.schedule == "constant" and recipe.warmup_steps == 0:
        return {}
    name = next(word for word, schedule in SCHEDULES.items() if schedule == recipe.schedule)
    params: dict[str, Any] = {"warmup_num_steps": recipe.warmup_steps, "warmup_type": "linear"}
    if recipe.schedule == "cosine":
        params |= {"warmup_min_ratio": 0.0, "cos_min_ratio": recipe.min_lr_ratio}
    else:
        params |= {"warmup_min_lr": 0.0, "warmup_max_lr": recipe.learning_rate}
    if recipe.schedule != "constant":
        params["total_num_steps"] = recipe.steps
    return {"type": name, "params": params}
