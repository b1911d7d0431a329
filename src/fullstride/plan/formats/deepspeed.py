"""DeepSpeed's JSON (names and defaults as of DeepSpeed 0.19, `runtime/config.py` and `runtime/zero/config.py`)."""

from __future__ import annotations

import json
import re
from typing import Any

from fullstride.plan.formats.complete import Given, batch_parts, cut, degrees, finish, layout_parts, sequence, spec_given
from fullstride.plan.formats.imported import Imported
from fullstride.plan.formats.table import Draft, Row, Table, aside, carry, fact, flatten, lost, to

_LOGS = "logging and profiling"
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_TORCH_DTYPES = {"torch.bfloat16": "bf16", "bfloat16": "bf16", "torch.float16": "fp16", "float16": "fp16"}
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_STATES_ONLY = "a plan offloads optimizer states only"
_COMPRESSED = "compresses what is communicated, which a plan does not"
_SCALER = "loss scaling of fp16, which a plan does not say"

_ZERO: Table = {
    "stage": to("shard.stage", words={0: 0, 1: 1, 2: 2, 3: 3}),
    "overlap_comm": fact("overlap", bool),
    "reduce_bucket_size": fact("bucket"),
    "contiguous_gradients": lost("gradients are copied into one buffer as they come", True),
    "reduce_scatter": lost("a plan reduces to the rank that owns the part", True),
    "allgather_partitions": lost("a plan gathers weights by blocks or buckets", True),
    "allgather_bucket_size": lost("a plan gathers by blocks, not by a number of elements", 500_000_000, 5e8),
    "use_multi_rank_bucket_allreduce": lost("how buckets are reduced", True),
    "round_robin_gradients": lost("the order in which gradients are shared out", False),
    "sub_group_size": lost("the optimizer's step by groups of elements", 1_000_000_000, 1e9),
    "offload_optimizer.device": fact("offload", str),
    "offload_optimizer.ratio": fact("offload_ratio", float),
    "offload_optimizer.nvme_path": aside("a path"),
    "offload_optimizer.pin_memory": lost("a plan keeps offloaded states in pinned memory", True),
    "offload_optimizer.buffer_count": lost("buffers of the copies to disk", 4),
    "offload_optimizer.pipeline_read": lost("reads from disk ahead", False),
    "offload_optimizer.pipeline_write": lost("writes to disk behind", False),
    "offload_optimizer.fast_init": aside("how the files are first made"),
    "offload_optimizer.super_offload": lost("a schedule of its own for offloaded steps", False),
    "offload_optimizer.cpuadam_cores_perc": lost("CPU cores for the offloaded step", 0.8),
    "offload_param.device": lost(_STATES_ONLY, "none"),
    "offload_param.nvme_path": aside("a path"),
    "offload_param.pin_memory": lost(_STATES_ONLY, False),
    "offload_param.buffer_count": lost(_STATES_ONLY),
    "offload_param.buffer_size": lost(_STATES_ONLY),
    "offload_param.max_in_cpu": lost(_STATES_ONLY),
    "cpu_offload": fact("cpu_offload", bool),
    "cpu_offload_param": lost(_STATES_ONLY, False),
    "cpu_offload_params": lost(_STATES_ONLY, False),
    "cpu_offload_use_pin_memory": lost("a plan keeps offloaded states in pinned memory", True),
    "stage3_prefetch_bucket_size": lost(
        "a plan counts blocks gathered ahead (overlap.prefetch), not elements", 50_000_000, 5e7
    ),
    "stage3_param_persistence_threshold": lost("small weights stay gathered", 100_000, 1e5),
    "stage3_model_persistence_threshold": lost("weights that stay gathered, in all"),
    "stage3_max_live_parameters": lost("a cap on weights gathered at once", 1_000_000_000, 1e9),
    "stage3_max_reuse_distance": lost("weights used again soon stay gathered", 1_000_000_000, 1e9),
    "stage3_module_granularity_threshold": lost("gathers coarser units", 0),
    "stage3_gather_16bit_weights_on_model_save": aside("how checkpoints are written"),
    "stage3_gather_fp16_weights_on_model_save": aside("how checkpoints are written"),
    "gather_16bit_weights_on_model_save": aside("how checkpoints are written"),
    "stage3_use_all_reduce_for_fetch_params": lost("gathers by all-reduce", False),
    "stage3_allgather_sequential": lost("gathers one by one", False),
    "memory_efficient_linear": lost("another linear layer", True),
    "zero_hpz_partition_size": lost("ZeRO++: a second copy of the weights inside a node", 1),
    "zero_quantized_weights": lost("ZeRO++: " + _COMPRESSED, False),
    "zero_quantized_nontrainable_weights": lost("ZeRO++: " + _COMPRESSED, False),
    "zero_quantized_gradients": lost("ZeRO++: " + _COMPRESSED, False),
    "mics_shard_size": fact("shard"),
    "mics_hierarchical_params_gather": lost("gathers in two steps", False),
    "ignore_unused_parameters": aside("a check"),
    "load_from_fp32_weights": aside("how checkpoints are read"),
    "elastic_checkpoint": aside("how checkpoints are written"),
    "pipeline_loading_checkpoint": aside("how checkpoints are read"),
    "legacy_stage1": lost("the first implementation of stage 1", False),
    "override_module_apply": aside("how weights are first made"),
    "log_trace_cache_warnings": aside(_LOGS),
    "enable_sanity_checks": aside("a check"),
    "leaf_module": lost("modules gathered whole"),
    "parameter_alignment": lost("where parts begin", False),
    "compute_grad_norm": lost("the norm of gradients without clipping", True),
    "save_muon_momentum_buffer_in_memory": lost("Muon, and plans carry out AdamW", False),
}
_BLANKET: Table = {
    "zero_optimization.zenflow": lost("ZenFlow, which updates part of the weights late"),
    "compression_training": lost("compression of the model while it trains"),
    "quantize_training": lost("quantisation while it trains"),
    "sparse_attention": lost("another attention"),
    "progressive_layer_drop": lost("drops blocks while it trains"),
    "curriculum_learning": lost("changes the length of samples over time"),
    "data_efficiency": lost("changes samples over time"),
    "elasticity": lost("lets the number of ranks change"),
    "eigenvalue": lost("eigenvalues for quantisation"),
    "autotuning": aside("DeepSpeed's own tuner"),
    "flops_profiler": aside(_LOGS),
    "tensorboard": aside(_LOGS),
    "wandb": aside(_LOGS),
    "csv_monitor": aside(_LOGS),
    "comet": aside(_LOGS),
    "comms_logger": aside(_LOGS),
    "timers": aside(_LOGS),
    "nebula": aside("how checkpoints are written"),
    "datastates_ckpt": aside("how checkpoints are written"),
    "checkpoint": aside("how checkpoints are written"),
    "aio": aside("how files are read and written for offload"),
    "hybrid_engine": lost("inference between steps"),
    "pipeline": lost("DeepSpeed's pipelines are cut in the model's code"),
    "compile": lost("DeepCompile's own passes"),
    "expert_parallel": lost("experts are laid out in the model's code"),
    "weight_quantization": lost("quantised weights"),
    "amp": lost("NVIDIA Apex's mixed precision"),
}
"""Sections that are one thing, whatever stands in them."""

TABLE: dict[str, Row] = {
    **{f"zero_optimization.{name}": row for name, row in _ZERO.items()},
    **_BLANKET,
    "train_batch_size": fact("samples"),
    "train_micro_batch_size_per_gpu": fact("micro"),
    "gradient_accumulation_steps": fact("accumulation"),
    "sequence_parallel_size": fact("cp"),
    "tensor_parallel.autotp_size": fact("tp"),
    "tensor_parallel.tp.tp_size": fact("tp"),
    "tensor_parallel.tp_overlap_comm": lost("overlap inside tensor parallelism", False),
    "gradient_clipping": to("recipe.clip_norm", float),
    "fp16.enabled": fact("fp16", bool),
    "fp16.auto_cast": lost("inputs are cast", False),
    **{
        f"fp16.{name}": lost(_SCALER, *same)
        for name, same in {
            "loss_scale": (0,),
            "initial_scale_power": (16,),
            "loss_scale_window": (1000,),
            "hysteresis": (2,),
            "consecutive_hysteresis": (False,),
            "min_loss_scale": (1,),
        }.items()
    },
    "fp16.fp16_master_weights_and_grads": fact("narrow_master", bool),
    "bf16.enabled": fact("bf16", bool),
    "bfloat16.enabled": fact("bf16", bool),
    "bf16.immediate_grad_update": lost("when gradients are added up", False),
    "bf16.check_grad_overflow": lost("looks for overflows", True),
    "bf16.bf16_master_weights_and_grads": fact("narrow_master", bool),
    "bf16.bf16_optimizer_states": fact("narrow_states", bool),
    "data_types.grad_accum_dtype": to("precision.gradient", str, _DTYPES),
    "communication_data_type": to("precision.reduction", str, _DTYPES),
    "seq_parallel_communication_data_type": lost("the dtype of sequence parallelism's exchanges"),
    "torch_autocast.enabled": fact("autocast", bool),
    "torch_autocast.dtype": fact("autocast_dtype", str),
    "torch_autocast.lower_precision_safe_modules": lost("which modules are cast"),
    "optimizer.type": fact("optimizer", str),
    "optimizer.params.lr": to("recipe.learning_rate", float),
    "optimizer.params.betas": fact("betas", list),
    "optimizer.params.eps": to("recipe.eps", float),
    "optimizer.params.weight_decay": to("recipe.weight_decay", float),
    "optimizer.params.adam_w_mode": fact("adam_w_mode", bool),
    "optimizer.params.torch_adam": fact("torch_adam", bool),
    "optimizer.params.fused": lost("which kernel steps", True),
    "optimizer.params.bias_correction": lost("AdamW without its correction of early steps", True),
    "optimizer.params.amsgrad": lost("AMSGrad, and plans carry out AdamW", False),
    **{
        f"optimizer.params.{name}": lost("a setting of another optimizer than AdamW")
        for name in (
            "comm_backend_name",
            "cuda_aware",
            "freeze_step",
            "var_freeze_step",
            "var_update_scaler",
            "local_step_scaler",
            "local_step_clipper",
            "coeff_beta",
            "factor_max",
            "factor_min",
            "factor_threshold",
            "max_coeff",
            "min_coeff",
            "momentum",
        )
    },
    "optimizer.legacy_fusion": aside("an older spelling"),
    "scheduler.type": fact("scheduler", str),
    "scheduler.params.warmup_num_steps": to("recipe.warmup_steps"),
    "scheduler.params.total_num_steps": to("recipe.steps"),
    "scheduler.params.warmup_max_lr": fact("warmup_max_lr", float),
    "scheduler.params.warmup_min_lr": lost("warm-up from another rate than zero", 0, 0.0),
    "scheduler.params.warmup_min_ratio": lost("warm-up from another rate than zero", 0, 0.0),
    "scheduler.params.warmup_type": fact("warmup_type", str),
    "scheduler.params.cos_min_ratio": to("recipe.min_lr_ratio", float),
    "scheduler.params.last_batch_iteration": aside("where a resumed run stands"),
    "activation_checkpointing.partition_activations": fact("partition_activations", bool),
    "activation_checkpointing.cpu_checkpointing": fact("cpu_checkpointing", bool),
    "activation_checkpointing.number_checkpoints": fact("number_checkpoints"),
    "activation_checkpointing.contiguous_memory_optimization": lost("kept inputs in one buffer", False),
    "activation_checkpointing.synchronize_checkpoint_boundary": lost("waits at each block", False),
    "activation_checkpointing.profile": aside(_LOGS),
    "prescale_gradients": lost("gradients are divided before the sum", False),
    "gradient_predivide_factor": lost("gradients are divided before the sum", 1, 1.0),
    "sparse_gradients": lost("sparse gradients of embeddings", False),
    "disable_allgather": lost("how weights are gathered", False),
    "zero_allow_untested_optimizer": aside("a check"),
    "zero_force_ds_cpu_optimizer": aside("a check"),
    "steps_per_print": aside(_LOGS),
    "wall_clock_breakdown": aside(_LOGS),
    "memory_breakdown": aside(_LOGS),
    "dump_state": aside(_LOGS),
    "log_level": aside(_LOGS),
    "disable_python_gc": lost("Python's collector is off", False),
    "dataloader_drop_last": aside("the last samples of the data"),
    "cuda_visible_devices": aside("which devices are seen"),
    "use_data_before_expert_parallel": lost("the order of ranks", False),
}
SECTIONS = frozenset(key.partition(".")[0] for key in TABLE)
"""The names at the top of the file, by which it is recognised."""

_ADAMW = {"adamw": True, "adam": None, "fusedadam": None}
"""Whether a name means decoupled decay; None: `adam_w_mode` says, true when absent."""
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def parse(text: str, where: str) -> dict[str, Any]:
    """The file's tables; comments and trailing commas are allowed, as DeepSpeed's reader (hjson) does.

    Raises:
        BadInput: it is not JSON, or not a table.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        try:
            raw = json.loads(_plain(text))
        except (ValueError, RecursionError):
            fix = "check that the file is complete"
            raise Draft(where=where).bad(f"is not JSON ({error})", fix) from None
    if not isinstance(raw, dict):
        raise Draft(where=where).bad(f"holds a {type(raw).__name__}, not a table of settings", "give a DeepSpeed JSON")
    return raw


_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|(?:#|//)[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def _plain(text: str) -> str:
    for pattern in (_STRING_OR_COMMENT, _TRAILING):
        text = pattern.sub(lambda match: match.group(1) or "", text)
    return text


def read(text: str, where: str, given: Given) -> Imported:
    """Read DeepSpeed's JSON.

    Raises:
        BadInput: not JSON, a value of the wrong kind, or batch sizes that contradict each other.
    """
    draft = Draft(where=where, filled_in=True)
    return read_tables(parse(text, where), draft, given)


def read_tables(raw: dict[str, Any], draft: Draft, given: Given) -> Imported:
    """Read DeepSpeed's settings into `draft`, which may know the ranks already (as Accelerate's file does)."""
    draft_tables(raw, draft)
    spec = spec_given(given, draft)
    found = degrees(draft, given)
    parts = None
    if found is not None:
        length = sequence(draft, given, spec)
        parts = layout_parts(found) | batch_parts(cut(draft, given, found.data, "micro"), length)
    return finish("deepspeed", draft, given, parts, spec)


def draft_tables(raw: dict[str, Any], draft: Draft) -> None:
    """Put DeepSpeed's settings into a draft."""
    carry(TABLE, flatten(raw, TABLE), draft)
    draft.entries["shard.carrier"] = "deepspeed"
    draft.entries.setdefault("shard.stage", 0)
    _precision(draft)
    _offload(draft)
    _overlap(draft)
    _recompute(draft)
    _optimizer(draft)
    _schedule(draft)


def _precision(draft: Draft) -> None:
    """Dtypes by role, as `DeepSpeedEngine.get_data_types` decides them."""
    fp16, bf16 = draft.get("fp16", False), draft.get("bf16", False)
    if fp16 and bf16:
        raise draft.bad("fp16 and bf16 are both enabled: one dtype computes", "disable one of them")
    roles = ("embedding", "block", "head")
    if fp16 or bf16:
        dtype = "fp16" if fp16 else "bf16"
        narrow = draft.get("narrow_master", False)
        gradient = "fp32" if bf16 and draft.entries["shard.stage"] == 0 and not narrow else dtype
        states = dtype if draft.get("narrow_states", False) or (narrow and fp16) else "fp32"
        said: dict[str, Any] = {f"precision.{role}": dtype for role in roles}
        said |= {"precision.cast": "none" if narrow else "weights", "precision.master": dtype if narrow else "fp32"}
        said |= {"precision.gradient": gradient, "precision.reduction": dtype, "precision.optimizer_state": states}
        draft.entries.update(said | draft.entries)
    elif draft.get("autocast", False):
        word = draft.get("autocast_dtype", "bfloat16")
        if word not in _TORCH_DTYPES:
            raise draft.bad(f"torch_autocast.dtype is {word!r}, known are {', '.join(_TORCH_DTYPES)}", "use torch.bfloat16")
        draft.entries |= {"precision.cast": "autocast", "precision.block": _TORCH_DTYPES[word]}
        draft.entries["precision.head"] = _TORCH_DTYPES[word]


def _offload(draft: Draft) -> None:
    device, ratio = draft.get("offload", "none"), draft.get("offload_ratio", 1.0)
    if draft.get("cpu_offload", False):
        device = "cpu"
    if device not in ("none", "cpu", "nvme"):
        raise draft.bad(f"zero_optimization.offload_optimizer.device is {device!r}: one of none, cpu, nvme", "use cpu")
    if device != "none":
        draft.entries["optimizer.cpu_share" if device == "cpu" else "optimizer.nvme_share"] = ratio


def _overlap(draft: Draft) -> None:
    stage = draft.entries["shard.stage"]
    overlap = draft.get("overlap", stage == 3)
    if stage > 0:
        draft.entries["overlap.gradients"] = overlap
    if "fact:bucket" in draft.autos:
        return
    elements = draft.get("bucket", 500_000_000)
    width = DTYPE_BYTES[draft.entries.get("precision.reduction", "fp32")]
    draft.entries["overlap.bucket_bytes"] = elements * width


def _recompute(draft: Draft) -> None:
    partition, cpu = draft.get("partition_activations", False), draft.get("cpu_checkpointing", False)
    if not (partition or cpu or draft.get("number_checkpoints", 0)):
        return
    draft.entries["recompute.mode"] = "full"
    draft.assumed.append("whole blocks are recomputed: the file sets checkpointing up, the model's code turns it on")
    if cpu:
        draft.entries["recompute.offload"] = "cpu"
    if partition:
        draft.leave(
            "activation_checkpointing.partition_activations", True, "kept inputs are cut over the tensor-parallel ranks"
        )


def _optimizer(draft: Draft) -> None:
    draft.default("recipe.clip_norm", 0.0)
    name = draft.facts.get("optimizer")
    if name is None:
        draft.assumed.append("AdamW with fullstride's own recipe: the optimizer stands in the user's code")
        return
    decoupled = _ADAMW.get(name.lower(), False)
    if decoupled is None:
        decoupled = draft.get("adam_w_mode", True)
    if not decoupled:
        draft.leave("optimizer.type", name, "plans carry out AdamW")
    if draft.get("torch_adam", False):
        draft.entries["optimizer.implementation"] = "foreach"
    betas = draft.get("betas", [0.9, 0.999])
    if len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
        raise draft.bad(f"optimizer.params.betas is {betas}: two numbers", "use [0.9, 0.95]")
    if "fact:betas" not in draft.autos:
        draft.entries |= {"recipe.beta1": float(betas[0]), "recipe.beta2": float(betas[1])}
    for entry, default in (("learning_rate", 1e-3), ("eps", 1e-8), ("weight_decay", 0.0)):
        draft.default(f"recipe.{entry}", default)


def _schedule(draft: Draft) -> None:
    name = draft.facts.get("scheduler")
    if name is None:
        draft.entries |= {"recipe.schedule": "constant", "recipe.warmup_steps": 0}
        return
    if name not in SCHEDULES:
        draft.leave("scheduler.type", name, "a plan's rate is constant, or falls linearly or as a cosine")
        return
    draft.entries["recipe.schedule"] = SCHEDULES[name]
    if name != "WarmupLR":
        draft.default("recipe.min_lr_ratio", 0.0001 if name == "WarmupCosineLR" else 0.0)
    draft.default("recipe.warmup_steps", 1000)
    if draft.get("warmup_type", "log") != "linear":
        draft.leave("scheduler.params.warmup_type", draft.get("warmup_type", "log"), "a plan's warm-up is linear")
    rate = draft.facts.get("warmup_max_lr")
    if rate is not None:
        draft.entries["recipe.learning_rate"] = rate


WHY_LEFT: dict[str, str] = {
    "shard.carrier": "DeepSpeed's own ZeRO carries it out",
    "shard.reshard": "DeepSpeed frees by thresholds, not by module",
    "layout.dp_replicate": "DeepSpeed shards over all data ranks, or replicates over all",
    "layout.dp_shard": "DeepSpeed shards over all data ranks, or replicates over all",
    "layout.pp": "pipelines are cut in the model's code",
    "layout.ep": "experts are laid out in the model's code",
    "layout.order": "DeepSpeed's own order",
    "layout.sequence_parallel": "the model's code decides",
    "pipeline": "pipelines are cut in the model's code",
    "recompute": "the model's code decides what is recomputed",
    "optimizer": "DeepSpeed chooses the kernel",
    "precision": "DeepSpeed has no such combination of dtypes",
    "kernels": "the model's code decides",
    "adapter": "the model's code decides",
    "loss": "the model's code decides",
    "compile": "called in the training script (engine.compile)",
    "overlap": "DeepSpeed counts elements, not blocks or bytes",
    "comm": "environment variables are set where the job is launched",
    "data": "the training script loads the data",
    "threads": "OMP_NUM_THREADS is set where the job is launched",
    "recipe.seed": "the training script seeds",
    "recipe.steps": "the training script ends the run",
    "recipe": "DeepSpeed's schedules have no such setting",
    "workload.data": "the training script loads the data",
    "workload.tokenizer": "the training script loads the data",
    "workload.eval_data": "the training script loads the data",
    "workload.documents": "the training script loads the data",
    "workload.sequence_length": "the training script cuts samples",
}
"""Why an entry of a plan is not in the file, by the entry or its part."""
