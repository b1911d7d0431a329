"""A plan as torchtitan's TOML."""

from __future__ import annotations

from typing import Any

from fullstride.model.spec import ModelSpec
from fullstride.plan.formats.torchtitan_models import FAMILY_NAMES, flavor_of
from fullstride.plan.plan import Plan

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "bfs": "LoopedBFS",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
}
_IMPLEMENTATIONS = {"fused": "fused", "foreach": "foreach", "loop": "for-loop"}


def write(plan: Plan, spec: ModelSpec | None) -> str:
    """The plan as torchtitan's TOML; what reading it back does not give is for the caller to list."""
    import tomlkit

    raw: dict[str, dict[str, Any]] = {
        "model": _model(plan, spec),
        "optimizer": _optimizer(plan),
        "lr_scheduler": _schedule(plan),
        "training": _training(plan),
        "parallelism": _parallelism(plan, spec),
        "activation_checkpoint": _recompute(plan),
        "compile": {"enable": plan.compile.mode == "block", "components": ["model", "loss"]},
    }
    if plan.precision.fp8 in ("tensorwise", "rowwise"):
        raw["quantize"] = {"linear": {"float8": {"recipe_name": plan.precision.fp8}}}
    raw["comm"] = {"train_timeout_seconds": round(plan.comm.timeout_seconds)}
    raw["debug"] = {"seed": plan.recipe.seed}
    return tomlkit.dumps(raw)


def _model(plan: Plan, spec: ModelSpec | None) -> dict[str, Any]:
    known = flavor_of(plan.model.source)
    name, flavor = known or (FAMILY_NAMES.get(spec.family if spec else "", "llama3"), plan.model.source)
    section: dict[str, Any] = {"name": name, "flavor": flavor}
    if plan.workload.tokenizer != "bytes":
        section["hf_assets_path"] = plan.workload.tokenizer
    if plan.precision.fp8 in ("tensorwise", "rowwise"):
        section["converters"] = ["quantize.linear.float8"]
    elif plan.precision.fp8 == "mxfp8":
        section["converters"] = ["quantize.linear.mx"]
    return section


def _optimizer(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    return {
        "name": "AdamW",
        "lr": recipe.learning_rate,
        "beta1": recipe.beta1,
        "beta2": recipe.beta2,
        "eps": recipe.eps,
        "weight_decay": recipe.weight_decay,
        "implementation": _IMPLEMENTATIONS[plan.optimizer.implementation],
    }


def _schedule(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    section: dict[str, Any] = {"warmup_steps": recipe.warmup_steps, "min_lr_factor": recipe.min_lr_ratio}
    if recipe.schedule == "constant":
        return section | {"decay_ratio": 0.0}
    return section | {"decay_type": recipe.schedule}


def _training(plan: Plan) -> dict[str, Any]:
    batch, precision = plan.batch, plan.precision
    local = batch.micro_batch * (batch.accumulation if plan.layout.pp > 1 else 1)
    section: dict[str, Any] = {
        "local_batch_size": local,
        "global_batch_size": plan.workload.samples_per_step,
        "seq_len": plan.workload.sequence_length,
        "max_norm": plan.recipe.clip_norm,
        "steps": plan.recipe.steps,
        "dtype": "bfloat16" if precision.master == "bf16" else "float32",
        "mixed_precision_param": "bfloat16" if precision.block == "bf16" else "float32",
    }
    if plan.workload.data != "stdlib":
        section["dataset_path"] = plan.workload.data
    if plan.optimizer.cpu_share == 1:
        section["enable_cpu_offload"] = True
    loader: dict[str, Any] = {"num_workers": plan.data.workers, "pin_memory": plan.data.pin}
    if plan.data.workers:
        loader["prefetch_factor"] = plan.data.prefetch
    return section | {"dataloader": loader}


def _parallelism(plan: Plan, spec: ModelSpec | None) -> dict[str, Any]:
    layout, shard = plan.layout, plan.shard
    section: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "context_parallel_degree": layout.cp,
        "expert_parallel_degree": layout.ep,
        "expert_tensor_parallel_degree": layout.expert_tp,
    }
    if plan.overlap.tensor:
        section["enable_async_tensor_parallel"] = True
    if shard.stage == 3:
        section["fsdp_reshard_after_forward"] = "default" if shard.reshard == {"head": False} and layout.pp == 1 else "always"
    elif shard.stage > 0:
        section["fsdp_reshard_after_forward"] = "never"
    if layout.pp > 1:
        section |= _pipeline(plan, spec)
    return section


def _pipeline(plan: Plan, spec: ModelSpec | None) -> dict[str, Any]:
    pipeline = plan.pipeline
    section: dict[str, Any] = {
        "pipeline_parallel_schedule": _SCHEDULES.get(pipeline.schedule, "1F1B"),
        "pipeline_parallel_microbatch_size": plan.batch.micro_batch,
    }
    counts = list(pipeline.layers_per_stage)
    looped = 1 if pipeline.schedule in ("gpipe", "1f1b", "none") else 2
    if not counts and spec is not None and pipeline.chunks != looped:
        # torchtitan puts two stages on a rank unless they are listed
        less, over = divmod(sum(stack.count for stack in spec.stacks), plan.layout.pp * pipeline.chunks)
        counts = [less + (stage < over) for stage in range(plan.layout.pp * pipeline.chunks)]
    if not counts:
        return section | {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
    parts, first = [], 0
    for count in counts:
        parts.append([f"layers.{index}" for index in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return section | {"module_fqns_per_model_part": parts}


def _recompute(plan: Plan) -> dict[str, Any]:
    recompute = plan.recompute
    if recompute.mode == "full" and recompute.every > 1:
        return {"mode": "selective", "selective_ac_option": str(recompute.every)}
    if recompute.mode == "full":
        return {"mode": "full"}
    if recompute.mode in ("norm_activation", "attention"):
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": "none"}
