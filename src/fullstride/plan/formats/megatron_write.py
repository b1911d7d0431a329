"""A plan as a script that calls Megatron-LM."""

from __future__ import annotations

import shlex
from typing import Any

from fullstride.errors import BadInput
from fullstride.model.source import config_of
from fullstride.model.spec import ModelSpec
from fullstride.plan.formats.megatron_model import model_options
from fullstride.plan.plan import Plan

PER_NODE = 8
"""GPUs of a node where the plan's world does not fit into one; the script's reader changes it at the top."""

WHY_LEFT: dict[str, str] = {
    "model": "its sizes could not be written as Megatron's arguments: add them to the script",
    "shard.carrier": "Megatron shards with its own distributed optimizer",
    "shard.reshard": "Megatron-FSDP has one rule for all blocks",
    "layout.order": "Megatron's own order",
    "layout": "Megatron has no such layout",
    "pipeline": "Megatron has no such schedule",
    "recompute": "Megatron recomputes by modules or whole blocks",
    "optimizer": "Megatron has no such setting",
    "precision": "Megatron has no such combination of dtypes",
    "kernels": "Megatron has no such choice",
    "adapter": "Megatron trains all weights",
    "loss": "Megatron computes whole logits",
    "compile": "Megatron's kernels are not compiled by torch",
    "overlap": "Megatron sizes its own buckets",
    "comm": "Megatron has no such setting",
    "data": "Megatron has no such setting",
    "threads": "OMP_NUM_THREADS is set where the job is launched",
    "workload.data": "Megatron reads its own binary files: see tools/preprocess_data.py",
    "workload.tokenizer": "Megatron reads its own binary files",
    "workload.eval_data": "Megatron reads its own binary files",
    "workload.documents": "Megatron has --reset-attention-mask for data that was made for it",
    "workload": "Megatron has no such setting",
    "recipe": "Megatron has no such setting",
}
"""Why an entry of a plan is not in the script, by the entry or its part."""


def write(plan: Plan, spec: ModelSpec | None) -> str:
    """The plan as a launch script; what reading it back does not give is for the caller to list."""
    world = plan.layout.world_size
    per_node = world if world <= PER_NODE else next(size for size in range(PER_NODE, 0, -1) if world % size == 0)
    config = _config(plan.model.source) if spec is not None else None
    groups = {
        "MODEL_ARGS": (model_options(config) if config else None) or {},
        "TRAINING_ARGS": _training(plan),
        "PARALLEL_ARGS": _parallel(plan),
        "DATA_ARGS": {"mock-data": True, "tokenizer-type": "NullTokenizer", "num-workers": plan.data.workers},
    }
    lines = ["#!/bin/bash", "# What fullstride planned, as Megatron-LM's arguments: put the data in, and adapt the nodes.", ""]
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if plan.layout.tp > 1 else {}
    lines += [f"export {name}={shlex.quote(value)}" for name, value in (env | plan.comm.env).items()]
    lines += [f"GPUS_PER_NODE={per_node}", f"NUM_NODES={world // per_node}", ""]
    for name, options in groups.items():
        lines += [f"{name}=(", *(f"    {_option(key, value)}" for key, value in options.items()), ")", ""]
    lines.append("torchrun --nproc-per-node $GPUS_PER_NODE --nnodes $NUM_NODES pretrain_gpt.py \\")
    lines.append("    " + " ".join(f"${{{name}[@]}}" for name in groups))
    return "\n".join(lines) + "\n"


def _config(source: str) -> dict[str, Any] | None:
    """The configuration behind a source; None where the source is a launch script that describes the model."""
    try:
        return config_of(source)
    except BadInput:
        return None


def _option(name: str, value: Any) -> str:
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"


def _training(plan: Plan) -> dict[str, Any]:
    recipe, precision = plan.recipe, plan.precision
    options: dict[str, Any] = {
        "seq-length": plan.workload.sequence_length,
        "micro-batch-size": plan.batch.micro_batch,
        "global-batch-size": plan.workload.samples_per_step,
        "train-iters": recipe.steps,
        "lr": recipe.learning_rate,
        "min-lr": recipe.learning_rate * recipe.min_lr_ratio,
        "lr-decay-style": recipe.schedule,
        "lr-warmup-iters": recipe.warmup_steps,
        "adam-beta1": recipe.beta1,
        "adam-beta2": recipe.beta2,
        "adam-eps": recipe.eps,
        "weight-decay": recipe.weight_decay,
        "clip-grad": recipe.clip_norm,
        "seed": recipe.seed,
        "distributed-timeout-minutes": plan.comm.timeout_seconds / 60,
    }
    if precision.cast != "none" and precision.block in ("bf16", "fp16"):
        options[precision.block] = True
        if precision.block == "bf16" == precision.reduction:
            options["grad-reduce-in-bf16"] = True
        if precision.block == "fp16" and precision.gradient == "fp32":
            options["accumulate-allreduce-grads-in-fp32"] = True
    if precision.fp8 in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        options |= {"fp8-format": "hybrid", "fp8-recipe": precision.fp8}
    if "bf16" in (precision.master, precision.optimizer_state) and precision.cast != "none":
        options |= {"use-precision-aware-optimizer": True, "main-params-dtype": precision.master}
        options |= {"exp-avg-dtype": precision.optimizer_state, "main-grads-dtype": precision.gradient}
    if plan.optimizer.cpu_share > 0:
        options |= {"optimizer-cpu-offload": True, "optimizer-offload-fraction": plan.optimizer.cpu_share}
    if plan.overlap.deferred_head:
        options |= {"defer-embedding-wgrad-compute": True, "wgrad-deferral-limit": plan.overlap.deferred_head}
    if plan.loss.fused in ("script", "native"):
        options["cross-entropy-fusion-impl"] = "te" if plan.loss.fused == "native" else "native"
    return options | _recompute(plan) | _attention(plan)


def _recompute(plan: Plan) -> dict[str, Any]:
    recompute = plan.recompute
    if recompute.mode == "full":
        block = recompute.blocks > 0
        options: dict[str, Any] = {"recompute-granularity": "full", "recompute-method": "block" if block else "uniform"}
        return options | {"recompute-num-layers": recompute.blocks or 1}
    if recompute.mode == "attention":
        return {"recompute-granularity": "selective"}
    if recompute.mode == "norm_activation":
        return {"recompute-granularity": "selective", "recompute-modules": "layernorm"}
    return {}


def _attention(plan: Plan) -> dict[str, Any]:
    kind = plan.kernels.attention
    if kind == "sdpa":
        return {"attention-backend": "flash"}
    return {"attention-backend": "unfused"} | ({"no-masked-softmax-fusion": True} if kind == "unfused" else {})


def _switches(plan: Plan) -> dict[str, bool]:
    return {
        "tp-comm-overlap": plan.overlap.tensor,
        "overlap-moe-expert-parallel-comm": plan.overlap.experts,
        "no-gradient-accumulation-fusion": not plan.kernels.gradient_fusion,
        "enable-cuda-graph": plan.compile.graphs,
        "cross-entropy-loss-fusion": plan.loss.fused in ("script", "native"),
    }


def _parallel(plan: Plan) -> dict[str, Any]:
    layout, pipeline, stage = plan.layout, plan.pipeline, plan.shard.stage
    options: dict[str, Any] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
        "expert-tensor-parallel-size": layout.expert_tp,
    }
    options |= {option: True for option, wanted in _switches(plan).items() if wanted}
    if layout.tp > 1 and layout.sequence_parallel:
        options["sequence-parallel"] = True
    if stage == 1:
        options["use-distributed-optimizer"] = True
    elif stage > 1:
        strategy = "optim_grads" if stage == 2 else "optim_grads_params"
        options |= {"use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy}
    if stage > 0 and layout.dp_replicate > 1:
        options["num-distributed-optimizer-instances"] = layout.dp_replicate
    if layout.data_parallel > 1 and plan.overlap.gradients:
        options["overlap-grad-reduce"] = True
        if stage > 0:
            options["overlap-param-gather"] = True
    if layout.pp > 1 and pipeline.chunks > 1 and not pipeline.layers_per_stage:
        options["num-virtual-stages-per-pipeline-rank"] = pipeline.chunks
    if layout.pp > 1 and pipeline.layers_per_stage:
        stages = ["t" * count for count in pipeline.layers_per_stage]
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
        options["pipeline-model-parallel-layout"] = "|".join(stages)
    return options
