"""Accelerate's YAML (names of Accelerate 1.x, `commands/config/config_args.py` and `utils/dataclasses.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fullstride.files import read_bytes
from fullstride.model.spec import ModelSpec
from fullstride.plan.formats import deepspeed
from fullstride.plan.formats.complete import (
    Degrees,
    Given,
    batch_parts,
    cut,
    degrees,
    finish,
    layout_parts,
    sequence,
    spec_given,
)
from fullstride.plan.formats.imported import Imported
from fullstride.plan.formats.table import Draft, Row, aside, carry, fact, flatten, lost, to
from fullstride.plan.formats.yaml_text import dump_yaml, load_yaml
from fullstride.plan.plan import Plan

_LAUNCH = "where and how processes are started"
_SAVES = "how checkpoints are written and read"
_TPU = "settings of TPUs"

_FSDP: dict[str, Row] = {
    "fsdp_version": fact("fsdp_version"),
    "fsdp_sharding_strategy": fact("strategy", str),
    "fsdp_reshard_after_forward": fact("reshard", str),
    "fsdp_offload_params": fact("fsdp_offload", bool),
    "fsdp_activation_checkpointing": fact("recompute", bool),
    "fsdp_backward_prefetch": fact("backward_prefetch", str),
    "fsdp_backward_prefetch_policy": fact("backward_prefetch", str),
    "fsdp_forward_prefetch": lost("gathers the next block ahead in forward by another rule", False),
    "fsdp_auto_wrap_policy": fact("wrap", str),
    "fsdp_transformer_layer_cls_to_wrap": aside("names the blocks, which fullstride finds"),
    "fsdp_min_num_params": lost("units by size; a plan's units are blocks", 0),
    "fsdp_ignored_modules": lost("modules that are not sharded", None),
    "fsdp_use_orig_params": aside("how FSDP1 keeps parameters"),
    "fsdp_state_dict_type": aside(_SAVES),
    "fsdp_cpu_ram_efficient_loading": aside(_SAVES),
    "fsdp_sync_module_states": aside(_SAVES),
    "fsdp_cpu_offload": fact("fsdp_offload", bool),
}
_DEEPSPEED: dict[str, Row] = {
    "deepspeed_config_file": fact("ds_file", str),
    "zero_stage": to("shard.stage", words={0: 0, 1: 1, 2: 2, 3: 3}),
    "gradient_accumulation_steps": fact("accumulation"),
    "gradient_clipping": to("recipe.clip_norm", float),
    "offload_optimizer_device": fact("offload_device", str),
    "offload_param_device": lost("a plan offloads optimizer states only", "none", None),
    "offload_optimizer_nvme_path": aside("a path"),
    "offload_param_nvme_path": aside("a path"),
    "zero3_init_flag": aside("how weights are first made"),
    "zero3_save_16bit_model": aside(_SAVES),
    "deepspeed_multinode_launcher": aside(_LAUNCH),
    "deepspeed_hostfile": aside(_LAUNCH),
    "deepspeed_exclusion_filter": aside(_LAUNCH),
    "deepspeed_inclusion_filter": aside(_LAUNCH),
    "deepspeed_moe_layer_cls_names": aside("names the experts, which fullstride finds"),
}
_PARALLEL: dict[str, Row] = {
    "dp_replicate_size": fact("replicate"),
    "dp_shard_size": fact("shard"),
    "tp_size": fact("tp"),
    "cp_size": fact("cp"),
    "sp_size": fact("sp"),
    "cp_backend": lost("how the sequence is cut", "torch"),
    "sp_backend": aside("how the sequence is cut"),
    "cp_comm_strategy": lost("how keys and values go round", "allgather"),
    "sp_seq_length": fact("sequence"),
    "sp_seq_length_is_variable": lost("samples of different lengths", False),
    "sp_attn_implementation": lost("which attention computes", "sdpa"),
}
_MEGATRON: dict[str, Row] = {
    "megatron_lm_tp_degree": fact("tp"),
    "megatron_lm_pp_degree": fact("pp"),
    "megatron_lm_num_micro_batches": fact("accumulation"),
    "megatron_lm_sequence_parallelism": to("layout.sequence_parallel", bool),
    "megatron_lm_recompute_activations": fact("attention_recompute", bool),
    "megatron_lm_recompute_activation": fact("attention_recompute", bool),
    "megatron_lm_use_distributed_optimizer": fact("distributed_optimizer", bool),
    "megatron_lm_gradient_clipping": to("recipe.clip_norm", float),
}
TABLE: dict[str, Row] = {
    **{f"fsdp_config.{name}": row for name, row in _FSDP.items()},
    **{f"deepspeed_config.{name}": row for name, row in _DEEPSPEED.items()},
    **{f"parallelism_config.parallelism_config_{name}": row for name, row in _PARALLEL.items()},
    **{f"megatron_lm_config.{name}": row for name, row in _MEGATRON.items()},
    "distributed_type": fact("distributed", str),
    "mixed_precision": fact("mixed", str),
    "fp16": fact("fp16", bool),
    "num_processes": fact("ranks"),
    "num_machines": fact("machines"),
    "use_cpu": lost("a plan is made for the devices that are there", False),
    "fp8_config.backend": fact("fp8_backend", str),
    "fp8_config": lost("details of fp8"),
    "dynamo_config.dynamo_backend": fact("dynamo", str),
    "dynamo_backend": fact("dynamo", str),
    "dynamo_config.dynamo_use_regional_compilation": fact("regional", bool),
    "dynamo_config.dynamo_mode": lost("a mode of torch.compile", "default"),
    "dynamo_config.dynamo_use_dynamic": lost("shapes that change", False),
    "dynamo_config.dynamo_use_fullgraph": lost("one graph of all", False),
    "enable_cpu_affinity": lost("ranks are bound to cores", False),
    "gradient_accumulation_steps": fact("accumulation"),
    "downcast_bf16": lost(_TPU, "no", False),
    **{
        name: aside(_LAUNCH)
        for name in (
            "compute_environment",
            "machine_rank",
            "gpu_ids",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_backend",
            "same_network",
            "mpirun_config",
            "command_file",
            "commands",
            "debug",
            "ipex_config",
        )
    },
    **{name: aside(_TPU) for name in ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env")},
}
SECTIONS = frozenset(key.partition(".")[0] for key in TABLE)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""By their numbers, from 1."""
_DDP = (
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_XPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_HPU",
    "MULTI_NEURON",
)
_TYPES = ("NO", *_DDP, "FSDP", "DEEPSPEED", "MEGATRON_LM", "TP")
_MIXED = {"no": "", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
_FP8 = {"TE": "delayed", "AO": "tensorwise"}


def parse(text: str, where: str) -> dict[str, Any]:
    """The file's tables.

    Raises:
        BadInput: not YAML, not a table, or without the key that Accelerate itself demands.
    """
    raw = load_yaml(text, where)
    draft = Draft(where=where)
    if not isinstance(raw, dict):
        raise draft.bad(f"holds a {type(raw).__name__}, not a table of settings", "give an Accelerate YAML")
    if "distributed_type" not in raw:
        raise draft.bad("has no distributed_type, which Accelerate demands", "add distributed_type: FSDP (or another)")
    return raw


def read(text: str, where: str, given: Given) -> Imported:
    """Read Accelerate's YAML, and the DeepSpeed JSON that it may name.

    Raises:
        BadInput: not YAML, a value of the wrong kind, or sizes that contradict each other.
    """
    raw, draft = parse(text, where), Draft(where=where, filled_in=True)
    carry(TABLE, flatten({str(key): value for key, value in raw.items()}, TABLE), draft)
    kind = draft.get("distributed", "NO")
    kind = "NO" if kind == "false" else kind  # YAML takes an unquoted NO for false
    if kind not in _TYPES:
        raise draft.bad(f"distributed_type is {kind!r}: one of {', '.join(_TYPES)}", "choose one of them")
    if draft.get("ranks", 1) < 1:
        draft.facts.pop("ranks")  # -1: the launcher says
    if kind == "NO":
        draft.facts.setdefault("ranks", 1)
    elif kind == "DEEPSPEED":
        _deepspeed(draft)
    _precision(draft, kind)
    _compile(draft)
    _sharding(draft, kind, given)
    spec = spec_given(given, draft)
    found = degrees(draft, given)
    parts = None
    if found is not None:
        parts = layout_parts(found) | _carrier(kind, found, draft)
        parts |= batch_parts(cut(draft, given, found.data, "micro"), sequence(draft, given, spec))
    return finish("accelerate", draft, given, parts, spec)


def _deepspeed(draft: Draft) -> None:
    """DeepSpeed's part: a file of its own, or the few settings that stand here."""
    raw: dict[str, Any] = {}
    if name := draft.facts.get("ds_file"):
        path = next((p for p in (Path(draft.where).parent / name, Path(name)) if p.is_file()), None)
        if path is None:
            draft.leave("deepspeed_config.deepspeed_config_file", name, "is not there, and says most of it")
        else:
            raw = deepspeed.parse(read_bytes(path).decode(errors="replace"), str(path))
    if device := draft.facts.get("offload_device"):
        raw.setdefault("zero_optimization", {})["offload_optimizer"] = {"device": device}
    mixed = _mixed(draft)
    if mixed and "bf16" not in raw and "fp16" not in raw:
        raw[mixed] = {"enabled": True}
    for key, entry in (("zero_optimization", "shard.stage"), ("gradient_clipping", "recipe.clip_norm")):
        if entry in draft.entries and key == "gradient_clipping":
            raw.setdefault(key, draft.entries[entry])
        elif entry in draft.entries:
            raw.setdefault(key, {}).setdefault("stage", draft.entries[entry])
    draft.facts.pop("fp16", None)
    deepspeed.draft_tables(raw, draft)


def _mixed(draft: Draft) -> str:
    word = str(draft.get("mixed", "fp16" if draft.get("fp16", False) else "no")).lower()
    if word not in _MIXED:
        raise draft.bad(f"mixed_precision is {word!r}: one of {', '.join(_MIXED)}", "use bf16")
    if word == "fp8":
        backend = draft.get("fp8_backend", "TE")
        if backend in _FP8:
            draft.entries["precision.fp8"] = _FP8[backend]
        else:
            draft.leave("fp8_config.backend", backend, "a plan has no such scaling; carried as bf16")
    return _MIXED[word]


def _precision(draft: Draft, kind: str) -> None:
    """FSDP casts weights and reduces in the low dtype; else autocast casts at each operator."""
    if kind == "DEEPSPEED":
        return
    low = _mixed(draft)
    if not low:
        return
    if kind == "FSDP" and draft.get("strategy", "FULL_SHARD") not in ("NO_SHARD", "3"):
        roles = {f"precision.{role}": low for role in ("embedding", "block", "head", "reduction")}
        draft.entries |= {"precision.cast": "weights"} | roles
    else:
        draft.entries |= {"precision.cast": "autocast", "precision.block": low, "precision.head": low}


def _compile(draft: Draft) -> None:
    backend = str(draft.get("dynamo", "NO")).upper()
    if backend == "NO":
        return
    draft.entries["compile.mode"] = "block"
    if backend != "INDUCTOR":
        draft.leave("dynamo_config.dynamo_backend", backend, "another compiler than inductor")
    if not draft.get("regional", False):
        draft.leave(
            "dynamo_config.dynamo_use_regional_compilation", False, "compiles the whole model; a plan compiles by block"
        )


def _sharding(draft: Draft, kind: str, given: Given) -> None:
    facts = draft.facts
    if facts.get("sp", 1) > 1:
        facts["cp"] = facts["sp"]
    if draft.get("recompute", False):
        draft.entries["recompute.mode"] = "full"
    if draft.get("attention_recompute", False):
        draft.entries["recompute.mode"] = "attention"
    if draft.get("fsdp_offload", False):
        draft.entries["optimizer.cpu_share"] = 1.0
        draft.leave("fsdp_config.fsdp_offload_params", True, "states are offloaded; weights, which stay here, too")
    if draft.get("wrap", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        draft.leave("fsdp_config.fsdp_auto_wrap_policy", facts["wrap"], "units are not blocks; a plan's are")
    prefetch = str(draft.get("backward_prefetch", "BACKWARD_PRE"))
    if kind == "FSDP" and prefetch == "NO_PREFETCH":
        draft.entries["overlap.prefetch"] = 0
    elif prefetch not in ("BACKWARD_PRE", "1"):
        draft.leave("fsdp_config.fsdp_backward_prefetch", prefetch, "gathers after, not before, the block that computes")
    if kind == "FSDP":
        _fsdp(draft, given)
    elif kind == "MEGATRON_LM":
        draft.entries["shard.stage"] = 1 if draft.get("distributed_optimizer", False) else 0
    elif kind != "DEEPSPEED":
        draft.entries["shard.stage"] = 0


def _fsdp(draft: Draft, given: Given) -> None:
    facts = draft.facts
    strategy = str(draft.get("strategy", ""))
    strategy = _STRATEGIES[int(strategy) - 1] if strategy in "12345" and strategy else strategy
    reshard = str(draft.get("reshard", "")).upper()
    if reshard in _STRATEGIES:
        strategy, reshard = strategy or reshard, ""
    if strategy and strategy not in _STRATEGIES:
        raise draft.bad(f"fsdp_sharding_strategy is {strategy!r}: one of {', '.join(_STRATEGIES)}", "use FULL_SHARD")
    if reshard not in ("", "TRUE", "FALSE"):
        raise draft.bad(f"fsdp_reshard_after_forward is {facts['reshard']!r}: true or false", "use true")
    keeps = reshard == "FALSE" or strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    draft.entries["shard.stage"] = 0 if strategy == "NO_SHARD" else 2 if keeps else 3
    if strategy.startswith("HYBRID") and not facts.get("shard"):
        ranks, machines = given.num_ranks or facts.get("ranks"), facts.get("machines", 1)
        if ranks and ranks % machines:
            raise draft.bad(f"{ranks} processes on {machines} machines: each has the same number", "change one of them")
        if ranks:
            facts["shard"], facts["replicate"] = ranks // machines, machines


def _carrier(kind: str, found: Degrees, draft: Draft) -> dict[str, Any]:
    if kind == "MEGATRON_LM":
        return {"shard.carrier": "megatron"}
    if kind == "DEEPSPEED":
        return {"shard.carrier": "deepspeed"}
    if found.shard * found.cp > 1 and draft.entries.get("shard.stage", 0):
        return {"shard.carrier": "fsdp2"}
    return {"shard.carrier": "ddp" if found.data > 1 else "none", "shard.stage": 0}


WHY_LEFT: dict[str, str] = {
    **{part: why for part, why in deepspeed.WHY_LEFT.items() if part.startswith(("workload", "comm", "data", "threads"))},
    "workload.samples_per_step": "the training script makes batches",
    "batch": "the training script makes batches",
    "recipe": "the training script makes the optimizer",
    "optimizer": "the training script makes the optimizer",
    "shard.carrier": "Accelerate has its own carriers",
    "shard.reshard": "Accelerate has one rule for all blocks",
    "shard.stage": "FSDP shards weights always; it keeps them gathered or not",
    "layout.order": "Accelerate's own order",
    "layout.sequence_parallel": "the model's own tensor-parallel plan decides",
    "layout": "Accelerate has no such layout",
    "pipeline": "Accelerate trains without pipelines",
    "recompute": "Accelerate recomputes whole blocks or nothing",
    "precision": "Accelerate has no such combination of dtypes",
    "kernels": "the model's code decides",
    "adapter": "the training script adds adapters",
    "loss": "the model's code decides",
    "compile": "Accelerate has no such setting",
    "overlap": "FSDP and DDP decide",
}
"""Why an entry of a plan is not in the file, by the entry or its part."""


def write(plan: Plan, spec: ModelSpec | None) -> str:
    """The plan as Accelerate's YAML; what reading it back does not give is for the caller to list."""
    layout, shard = plan.layout, plan.shard
    raw: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
    if shard.carrier == "deepspeed":
        raw |= {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed_section(plan)}
    elif shard.stage > 0:
        raw |= {"distributed_type": "FSDP", "fsdp_config": _fsdp_section(plan)}
    elif layout.world_size > 1:
        raw["distributed_type"] = "MULTI_GPU"
    axes = (layout.tp, layout.cp, layout.dp_replicate if shard.stage > 0 else 1)
    if shard.carrier != "deepspeed" and max(axes) > 1:
        raw["parallelism_config"] = {
            f"parallelism_config_{name}_size": degree
            for name, degree in (
                ("dp_replicate", layout.dp_replicate),
                ("dp_shard", layout.dp_shard),
                ("tp", layout.tp),
                ("cp", layout.cp),
            )
        }
    low = plan.precision.block if plan.precision.cast != "none" else "no"
    raw["mixed_precision"] = low if low in ("bf16", "fp16") else "no"
    if plan.precision.fp8 in _FP8.values() and low == "bf16" and shard.carrier != "deepspeed":
        backend = next(word for word, recipe in _FP8.items() if recipe == plan.precision.fp8)
        raw |= {"mixed_precision": "fp8", "fp8_config": {"backend": backend}}
    if plan.compile.mode == "block":
        raw["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    return dump_yaml(raw | {"num_machines": 1, "num_processes": layout.world_size // layout.pp})


def _deepspeed_section(plan: Plan) -> dict[str, Any]:
    section: dict[str, Any] = {
        "zero_stage": plan.shard.stage,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "gradient_clipping": plan.recipe.clip_norm,
    }
    for device, share in (("cpu", plan.optimizer.cpu_share), ("nvme", plan.optimizer.nvme_share)):
        if share == 1:
            section["offload_optimizer_device"] = device
    return section


def _fsdp_section(plan: Plan) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": plan.shard.stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.recompute.mode == "full",
        "fsdp_offload_params": plan.optimizer.cpu_share == 1,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
