"""torchtitan's TOML (names and defaults of torchtitan 0.2, `config/job_config.py`)."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from typing import Any

from fullstride.errors import BadInput
from fullstride.model.spec import ModelSpec
from fullstride.plan.formats.complete import (
    Cut,
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
from fullstride.plan.formats.torchtitan_models import MODELS, plain_flavor
from fullstride.plan.formats.torchtitan_write import write

__all__ = ["SECTIONS", "TABLE", "WHY_LEFT", "parse", "read", "write"]

_LOGS = "logging and profiling"
_SAVES = "how checkpoints are written and read"
_FAULTS = "TorchFT's replicas that come and go"
_CHECKS = "held-out data and how often it is looked at"

TABLE: dict[str, Row] = {
    "job": aside("names and folders of the job"),
    "profiling": aside(_LOGS),
    "metrics": aside(_LOGS),
    "checkpoint": aside(_SAVES),
    "validation": aside(_CHECKS),
    "memory_estimation": aside("torchtitan's own estimator"),
    "fault_tolerance.enable": lost(_FAULTS, False),
    **{
        f"fault_tolerance.{name}": aside(_FAULTS)
        for name in (
            "process_group",
            "process_group_timeout_ms",
            "replica_id",
            "group_size",
            "min_replica_size",
            "semi_sync_method",
            "sync_steps",
            "should_quantize",
            "fragment_sync_delay",
            "fragment_update_alpha",
            "module_fqns_per_model_fragment",
            "num_fragments",
        )
    },
    "experimental.custom_import": lost("code of the user's own", ""),
    "experimental.custom_args_module": lost("code of the user's own", ""),
    "model.name": fact("name", str),
    "model.flavor": fact("flavor", str),
    "model.hf_assets_path": to("workload.tokenizer", str),
    "model.tokenizer_path": to("workload.tokenizer", str),
    "model.converters": fact("converters", list),
    "model.print_after_conversion": aside(_LOGS),
    "hf_transformers.model": fact("hub", str),
    "optimizer.name": to("optimizer.kind", str, {"AdamW": "adamw"}, "plans carry out AdamW"),
    "optimizer.lr": to("recipe.learning_rate", float),
    "optimizer.beta1": to("recipe.beta1", float),
    "optimizer.beta2": to("recipe.beta2", float),
    "optimizer.eps": to("recipe.eps", float),
    "optimizer.weight_decay": to("recipe.weight_decay", float),
    "optimizer.implementation": to(
        "optimizer.implementation", str, {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}
    ),
    "optimizer.early_step_in_backward": lost("the optimizer steps inside backward", False),
    "lr_scheduler.warmup_steps": to("recipe.warmup_steps"),
    "lr_scheduler.total_steps": lost("a plan's schedule ends with its steps"),
    "lr_scheduler.decay_ratio": fact("decay_ratio", float),
    "lr_scheduler.decay_type": to(
        "recipe.schedule", str, {"linear": "linear", "cosine": "cosine"}, "a plan's rate falls linearly or as a cosine"
    ),
    "lr_scheduler.min_lr_factor": to("recipe.min_lr_ratio", float),
    "training.dataset": aside("a data set by torchtitan's name; a plan names files"),
    "training.dataset_path": to("workload.data", str),
    "training.local_batch_size": fact("local"),
    "training.global_batch_size": fact("global"),
    "training.seq_len": fact("sequence"),
    "training.max_norm": to("recipe.clip_norm", float),
    "training.steps": to("recipe.steps"),
    "training.enable_cpu_offload": fact("offload", bool),
    "training.dtype": fact("dtype", str),
    "training.mixed_precision_param": fact("param", str),
    "training.mixed_precision_reduce": fact("reduce", str),
    "training.gc_freq": aside("when Python collects garbage"),
    "training.gc_debug": aside("when Python collects garbage"),
    "training.dataloader.num_workers": to("data.workers"),
    "training.dataloader.pin_memory": to("data.pin", bool),
    "training.dataloader.prefetch_factor": to("data.prefetch"),
    "training.dataloader.persistent_workers": aside("workers between epochs"),
    "parallelism.data_parallel_replicate_degree": fact("replicate"),
    "parallelism.data_parallel_shard_degree": fact("shard"),
    "parallelism.fsdp_reshard_after_forward": fact("reshard", str),
    "parallelism.tensor_parallel_degree": fact("tp"),
    "parallelism.disable_loss_parallel": lost("the loss on whole logits under tensor parallelism", False),
    "parallelism.enable_async_tensor_parallel": to("overlap.tensor", bool),
    "parallelism.pipeline_parallel_degree": fact("pp"),
    "parallelism.pipeline_parallel_schedule": fact("schedule", str),
    "parallelism.pipeline_parallel_schedule_csv": lost("a schedule in a file of its own", ""),
    "parallelism.pipeline_parallel_microbatch_size": fact("microbatch"),
    "parallelism.pipeline_parallel_layers_per_stage": fact("layers_per_stage"),
    "parallelism.pipeline_parallel_first_stage_less_layers": fact("first_less"),
    "parallelism.pipeline_parallel_last_stage_less_layers": fact("last_less"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": lost("experts' exchanges beside the pipeline", True),
    "parallelism.module_fqns_per_model_part": fact("parts", list),
    "parallelism.context_parallel_degree": fact("cp"),
    "parallelism.context_parallel_load_balancer": lost("how a causal sequence is shared out", "headtail"),
    "parallelism.context_parallel_rotate_method": lost("how keys and values go round", "allgather"),
    "parallelism.expert_parallel_degree": fact("ep"),
    "parallelism.expert_tensor_parallel_degree": to("layout.expert_tp"),
    "parallelism.expert_parallel_comm_backend": lost("another library for the experts' exchange", "standard"),
    "activation_checkpoint.mode": fact("recompute", str),
    "activation_checkpoint.selective_ac_option": fact("selective", str),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": lost("products always made again"),
    "activation_checkpoint.early_stop": lost("recompute stops when all is there", False),
    "activation_checkpoint.memory_budget": lost("the compiler chooses what is kept", 0.5),
    "activation_checkpoint.visualize_memory_budget_pareto": aside(_LOGS),
    "activation_checkpoint.preserve_rng_state": lost("random numbers are drawn anew", True),
    "activation_checkpoint.determinism_check": aside("a check"),
    "activation_checkpoint.debug": aside(_LOGS),
    "compile.enable": fact("compile", bool),
    "compile.components": fact("components", list),
    "compile.backend": lost("another compiler", "inductor"),
    "quantize.linear.float8.recipe_name": fact("fp8", str),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": fact("fp8_gather", bool),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": fact("fp8_scale", bool),
    "quantize.linear.float8.filter_fqns": fact("fp8_filter", list),
    "quantize.linear.float8.emulate": lost("fp8 emulated", False),
    "quantize.linear.mx.recipe_name": fact("mx", str),
    "quantize.linear.mx.filter_fqns": fact("mx_filter", list),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": lost("which kernel casts", "triton"),
    "quantize.grouped_mm.float8.fqns": fact("grouped_fp8", list),
    "quantize.grouped_mm.mx.fqns": fact("grouped_mx", list),
    "quantize.grouped_mm.mx.recipe_name": lost("fp8 inside experts", "mxfp8"),
    "comm.init_timeout_seconds": lost("the time-out of the first step alone"),
    "comm.train_timeout_seconds": to("comm.timeout_seconds", float),
    "comm.trace_buf_size": aside(_LOGS),
    "comm.save_traces_folder": aside(_LOGS),
    "comm.save_traces_file_prefix": aside(_LOGS),
    "comm.mode": lost("communication that is only pretended", "default"),
    "debug.seed": to("recipe.seed"),
    "debug.deterministic": lost("deterministic kernels", False),
    "debug.deterministic_warn_only": aside(_LOGS),
    "debug.moe_force_load_balance": lost("experts are given equal numbers of tokens", False),
}
SECTIONS = frozenset(key.partition(".")[0] for key in TABLE)
_SCHEDULES = {
    "1f1b": ("1f1b", 1, ""),
    "gpipe": ("gpipe", 1, ""),
    "interleaved1f1b": ("interleaved", 2, ""),
    "loopedbfs": ("bfs", 2, ""),
    "interleavedzerobubble": ("interleaved", 2, "carried as interleaved, whose backward is not split"),
    "zbvzerobubble": ("zb-v", 2, ""),
    "dualpipev": ("zb-v", 2, "carried as zb-v, which does not overlap forward with backward"),
}
"""Plan's schedule, stages on a rank where the file does not say, and what is lost."""
_FP8 = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise"}


def parse(text: str, where: str) -> dict[str, Any]:
    """The file's tables.

    Raises:
        BadInput: it is not TOML.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: is not TOML ({error})", fix="correct that line") from None


def read(text: str, where: str, given: Given) -> Imported:
    """Read torchtitan's TOML.

    Raises:
        BadInput: not TOML, a value of the wrong kind, or sizes that contradict each other.
    """
    draft = Draft(where=where)
    carry(TABLE, flatten(parse(text, where), TABLE), draft)
    _defaults(draft)
    _model(draft)
    spec = spec_given(given, draft)
    _recipe(draft)
    _recompute(draft)
    _compile(draft)
    _quantize(draft)
    found = degrees(draft, given)
    parts = _sized(draft, given, found, spec) if found else None
    return finish("torchtitan", draft, given, parts, spec)


def _defaults(draft: Draft) -> None:
    """What torchtitan does where the file says nothing."""
    facts = draft.facts
    if facts.get("shard", -1) == -1:
        facts["shard"] = None
    facts.setdefault("replicate", 1)
    if facts.get("global", -1) == -1:
        facts.pop("global", None)
    defaults: dict[str, Any] = {
        "recipe.learning_rate": 8e-4,
        "recipe.steps": 10000,
        "recipe.warmup_steps": 200,
        "recipe.min_lr_ratio": 0.0,
    }
    defaults["recipe.schedule"] = "linear"
    draft.entries.update(defaults | draft.entries)
    facts.setdefault("sequence", 2048)


def _model(draft: Draft) -> None:
    if hub := draft.facts.get("hub"):
        draft.leave("hf_transformers.model", hub, "a model on a hub; give its directory or a preset with --model")
        return
    name, flavor = draft.get("name", "llama3"), draft.get("flavor", "debugmodel")
    plain, attention = plain_flavor(flavor)
    model = MODELS.get((name, plain))
    if attention:
        draft.leave("model.flavor", flavor, f"{attention} attention; a plan says sdpa")
    if isinstance(model, str):
        draft.model_name = model
    elif model is not None:
        draft.model_name, draft.config = f"{name}-{plain}", dict(model)
    else:
        draft.leave(
            "model.name", f"{name} {flavor}", "a model that fullstride does not know by this name; give it with --model"
        )


def _recipe(draft: Draft) -> None:
    ratio = draft.facts.get("decay_ratio")
    if ratio is None:
        return
    warm = draft.entries["recipe.warmup_steps"] / max(1, draft.entries["recipe.steps"])
    if ratio == 0:
        draft.entries["recipe.schedule"] = "constant"
    elif ratio + warm < 1:
        draft.leave("lr_scheduler.decay_ratio", ratio, "the rate stays level before it falls; a plan's falls after warm-up")


def _recompute(draft: Draft) -> None:
    mode, option = draft.get("recompute", "selective"), draft.get("selective", "2")
    key = "activation_checkpoint.mode"
    if mode == "full":
        draft.entries["recompute.mode"] = "full"
    elif mode == "selective" and option == "op":
        # torchtitan saves every second matrix product (`_apply_op_sac`, activation_checkpoint.py)
        draft.entries |= {"recompute.mode": "norm_activation", "recompute.products": 0.5}
    elif mode == "selective" and option.isdigit() and int(option) > 0:
        draft.entries |= {"recompute.mode": "full", "recompute.every": int(option)}
    elif mode == "selective":
        raise draft.bad(f"activation_checkpoint.selective_ac_option is {option!r}: 'op' or a number above 0", "use 'op'")
    elif mode == "memory_budget":
        draft.leave(key, mode, "the compiler chooses what is kept; carried as none")
    elif mode != "none":
        raise draft.bad(f"{key} is {mode!r}: none, selective, full or memory_budget", "use selective")


def _compile(draft: Draft) -> None:
    if not draft.get("compile", False):
        return
    components = draft.get("components", ["model", "loss"])
    if "model" in components:
        draft.entries["compile.mode"] = "block"
    if components == ["loss"]:
        draft.leave("compile.components", components, "a plan compiles blocks, and the loss only with them")


def _quantize(draft: Draft) -> None:
    converters = [word.removeprefix("quantize.linear.") for word in draft.get("converters", list[str]())]
    for word in converters:
        if word == "float8":
            recipe = draft.get("fp8", "tensorwise")
            if recipe not in _FP8:
                raise draft.bad(f"quantize.linear.float8.recipe_name is {recipe!r}: one of {', '.join(_FP8)}", "use tensorwise")
            draft.entries["precision.fp8"] = _FP8[recipe]
            if recipe == "rowwise_with_gw_hp":
                draft.leave(
                    "quantize.linear.float8.recipe_name", recipe, "carried as rowwise, with weight gradients in fp8 too"
                )
            _left_over(draft, "quantize.linear.float8.enable_fsdp_float8_all_gather", "fp8_gather", "weights gathered in fp8")
            _left_over(
                draft, "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", "fp8_scale", "scales made ahead"
            )
            _left_over(draft, "quantize.linear.float8.filter_fqns", "fp8_filter", "linears that stay in bf16")
        elif word == "mx":
            draft.entries["precision.fp8"] = "mxfp8"
            _left_over(draft, "quantize.linear.mx.filter_fqns", "mx_filter", "linears that stay in bf16")
        else:
            draft.leave("model.converters", word, "fullstride knows no such converter")
    for name, key in (("grouped_fp8", "quantize.grouped_mm.float8.fqns"), ("grouped_mx", "quantize.grouped_mm.mx.fqns")):
        _left_over(draft, key, name, "products of experts in fp8")


def _left_over(draft: Draft, key: str, name: str, why: str) -> None:
    if value := draft.facts.get(name):
        draft.leave(key, value, why)


def _sized(draft: Draft, given: Given, found: Degrees, spec: ModelSpec | None) -> dict[str, Any]:
    """Everything that depends on the degrees."""
    parts = layout_parts(found) | _sharding(draft, found) | _pipeline(draft, found, spec)
    parts |= _dtypes(draft, sharded=found.shard * found.cp > 1)
    return parts | batch_parts(_cut(draft, given, found), sequence(draft, given, spec))


def _cut(draft: Draft, given: Given, found: Degrees) -> Cut:
    """A local batch is one micro-batch, or with a pipeline several of `pipeline_parallel_microbatch_size`."""
    local = draft.get("local", 8)
    if local < 1:
        raise draft.bad(f"training.local_batch_size is {local}: a rank has at least one sample", "use 1 or more")
    samples = draft.get("global", local * found.data)
    draft.facts |= {"micro": local, "samples": samples}
    whole = cut(draft, given, found.data, "accumulation")
    if found.pp == 1:
        return whole
    micro = draft.get("microbatch", 1)
    if micro < 1 or local % micro:
        raise draft.bad(
            f"training.local_batch_size {local} with pipeline_parallel_microbatch_size {micro}: the first is a multiple of it",
            "change one of them",
        )
    return Cut(micro=micro, accumulation=whole.accumulation * (whole.micro // micro), samples=whole.samples)


def _sharding(draft: Draft, found: Degrees) -> dict[str, Any]:
    policy = draft.get("reshard", "default")
    if policy not in ("default", "always", "never"):
        raise draft.bad(f"parallelism.fsdp_reshard_after_forward is {policy!r}: default, always or never", "use default")
    if draft.get("offload", False):
        draft.entries["optimizer.cpu_share"] = 1.0
        draft.leave("training.enable_cpu_offload", True, "states are offloaded; weights and gradients, which stay here, too")
    if found.shard * found.cp == 1:
        return {"shard.carrier": "ddp" if found.replicate > 1 else "none", "shard.stage": 0}
    kept = policy == "never" or (policy == "default" and found.pp > 1)
    parts: dict[str, Any] = {"shard.carrier": "fsdp2", "shard.stage": 2 if kept else 3}
    if policy == "default" and not kept:
        parts["shard.reshard"] = {"head": False}
    return parts


def _dtypes(draft: Draft, *, sharded: bool) -> dict[str, Any]:
    words = {"float32": "fp32", "bfloat16": "bf16"}
    for name, key in (("dtype", "dtype"), ("param", "mixed_precision_param"), ("reduce", "mixed_precision_reduce")):
        if draft.get(name, "float32") not in words:
            raise draft.bad(f"training.{key} is {draft.facts[name]!r}: float32 or bfloat16", "use float32")
    weights, compute = words[draft.get("dtype", "float32")], words[draft.get("param", "bfloat16")]
    roles = ("embedding", "block", "head")
    if weights == "bf16":
        kept = ("gradient", "master", "optimizer_state")
        return {"precision.cast": "none"} | {f"precision.{role}": "bf16" for role in (*roles, *kept)}
    if compute == "fp32":
        return {}
    if not sharded:
        return {"precision.cast": "autocast", "precision.block": "bf16", "precision.head": "bf16"}
    parts: dict[str, Any] = {"precision.cast": "weights"} | {f"precision.{role}": "bf16" for role in roles}
    if draft.get("reduce", "float32") == "bfloat16":
        parts["precision.reduction"] = "bf16"
    return parts


def _pipeline(draft: Draft, found: Degrees, spec: ModelSpec | None) -> dict[str, Any]:
    if found.pp == 1:
        return {}
    name = draft.get("schedule", "1F1B")
    if name.lower() not in _SCHEDULES:
        draft.leave("parallelism.pipeline_parallel_schedule", name, "a plan has no such schedule; carried as 1f1b")
    schedule, chunks, why = _SCHEDULES.get(name.lower(), ("1f1b", 1, ""))
    if why:
        draft.leave("parallelism.pipeline_parallel_schedule", name, why)
    layers = _layers(draft, found.pp, chunks, spec)
    if layers and len(layers) % found.pp:
        raise draft.bad(f"{len(layers)} stages on {found.pp} pipeline ranks: stages are a multiple of the ranks", "change one")
    parts: dict[str, Any] = {"pipeline.schedule": schedule, "pipeline.chunks": len(layers) // found.pp if layers else chunks}
    return parts | ({"pipeline.layers_per_stage": layers} if layers and not _even(draft) else {})


def _even(draft: Draft) -> bool:
    said = (draft.facts.get("first_less", 1), draft.facts.get("last_less", 1))
    return said == (0, 0) and not draft.facts.get("parts") and not draft.facts.get("layers_per_stage")


def _layers(draft: Draft, pp: int, chunks: int, spec: ModelSpec | None) -> list[int]:
    """Blocks of each stage, as `generate_llm_fqn_per_model_part` cuts them; empty where the model is not known."""
    if parts := draft.facts.get("parts"):
        return [sum(str(name).startswith("layers.") for name in part) for part in parts]
    if spec is None:
        draft.assumed.append("blocks spread evenly over the stages, the model is not known")
        return []
    blocks = sum(stack.count for stack in spec.stacks)
    first, last = draft.get("first_less", 1), draft.get("last_less", 1)
    per_stage = draft.facts.get("layers_per_stage")
    stages = -(-(blocks + first + last) // per_stage) if per_stage else pp * chunks
    less, over = divmod(blocks + first + last, stages)
    edges = [stage * less + min(stage, over) for stage in range(stages + 1)]
    counts = [high - low for low, high in pairwise(edges)]
    counts[0] -= first
    counts[-1] -= last
    if min(counts) < 0:
        raise draft.bad(f"{blocks} blocks on {stages} stages leave one without any", "use fewer stages")
    return counts


WHY_LEFT: dict[str, str] = {
    "model": "torchtitan has no model of that name: set [model]",
    "shard.carrier": "torchtitan shards with FSDP2, and replicates with DDP where nothing is sharded",
    "shard.stage": "torchtitan shards weights always; it keeps them gathered or not",
    "shard.reshard": "torchtitan has one rule for all blocks",
    "layout.order": "torchtitan's own order",
    "layout.sequence_parallel": "torchtitan cuts along the sequence always",
    "layout.ep": "torchtitan lays experts over the sharded ranks",
    "layout": "torchtitan has no such layout",
    "pipeline": "torchtitan has no such schedule",
    "recompute": "torchtitan's choices are none, selective and full",
    "optimizer": "torchtitan offloads everything or nothing",
    "precision": "torchtitan has no such combination of dtypes",
    "kernels": "the model's flavor decides",
    "adapter": "torchtitan trains all weights",
    "loss": "torchtitan computes whole logits",
    "overlap": "FSDP2 and DDP decide",
    "comm.env": "environment variables are set where the job is launched",
    "data": "torchtitan has no such setting",
    "threads": "OMP_NUM_THREADS is set where the job is launched",
    "recipe": "torchtitan has no such setting",
    "workload.data": "torchtitan names data sets",
    "workload.tokenizer": "torchtitan wants a directory",
    "workload.eval_data": "torchtitan names data sets",
    "workload.documents": "the model's flavor decides",
}
"""Why an entry of a plan is not in the file, by the entry or its part."""
