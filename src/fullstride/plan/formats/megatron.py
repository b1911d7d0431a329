"""Megatron-LM's arguments as a plan: carrier `megatron`, its distributed optimizer, its dtypes and its pipelines."""

from __future__ import annotations

import re
from typing import Any

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
from fullstride.plan.formats.megatron_model import describe
from fullstride.plan.formats.megatron_source import Arguments, from_script, from_yaml, row_of
from fullstride.plan.formats.megatron_write import WHY_LEFT, write
from fullstride.plan.formats.table import Draft, carry

__all__ = ["WHY_LEFT", "is_yaml", "read", "write"]

_FP8 = {"delayed": "delayed", "tensorwise": "tensorwise", "mxfp8": "mxfp8", "blockwise": "blockwise"}
_DTYPES = ("fp32", "bf16", "fp16")
_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_LOSS_KERNELS = {"native": "script", "te": "native"}
"""Megatron's `native` is a scripted fusion, Transformer Engine's a kernel that works in place."""
WITHOUT_LIMIT = 2**20
"""Micro-batches put off where `--wgrad-deferral-limit` is absent or 0: all of a step."""
_KEY_OF_DECAY = "--lr-decay-style"


def is_yaml(text: str) -> bool:
    """Whether Megatron's arguments stand in YAML here, as against a script."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    tables = sum(bool(re.match(r"\s*[\w.\-\"']+:(\s|$)", line)) for line in lines)
    return not text.startswith("#!") and tables > len(lines) / 2


def read(text: str, where: str, given: Given) -> Imported:
    """Read Megatron's arguments from a shell script or YAML.

    Raises:
        BadInput: no arguments there, a value of the wrong kind, or sizes that contradict each other.
    """
    arguments = from_yaml(text, where) if is_yaml(text) else from_script(text, where)
    draft = Draft(where=where)
    _carry(arguments, draft)
    describe(draft, tp=draft.get("tp", 1))
    spec = spec_given(given, draft)
    _sharding(draft)
    _precision(draft)
    _recompute(draft)
    _attention(draft)
    _optimizer(draft)
    found = degrees(draft, given)
    parts = _sized(draft, given, found, spec.stacks if spec else None) if found else None
    if parts is not None:
        _recipe(draft, parts["workload.samples_per_step"])
        parts = {name: value for name, value in parts.items() if name not in draft.entries}
    return finish("megatron", draft, given, parts, spec)


def _carry(arguments: Arguments, draft: Draft) -> None:
    known = {name: row for name in arguments.options if (row := row_of(name)) is not None}
    table = {arguments.spelled[name]: row for name, row in known.items()}
    carry(table, {arguments.spelled[name]: arguments.options[name] for name in known}, draft)
    for name, value in arguments.options.items():
        if name not in known:
            draft.leave(arguments.spelled[name], value, "fullstride knows no such setting")
    if "ranks" in arguments.launch:
        draft.facts["ranks"] = arguments.launch.pop("ranks")
    for name, value in arguments.launch.items():
        if name not in ("nproc-per-node", "nnodes"):
            draft.leave(f"--{name}", value, "where and how processes are started", matters=False)
    for name, value in arguments.around.items():
        draft.leave(name, value, "beside Megatron's arguments", matters=False)
    if arguments.env:
        draft.entries["comm.env"] = arguments.env


def _sharding(draft: Draft) -> None:
    facts = draft.facts
    draft.entries["shard.carrier"] = "megatron"
    stage = 1 if draft.get("distributed_optimizer", False) else 0
    if draft.get("megatron_fsdp", False):
        strategy = draft.get("strategy", "no_shard")
        if strategy not in _STAGES:
            raise draft.bad(f"--data-parallel-sharding-strategy is {strategy}: one of {', '.join(_STAGES)}", "use optim")
        stage = _STAGES[strategy]
    if draft.get("torch_fsdp2", False):
        draft.entries["shard.carrier"], stage = "fsdp2", 3
    draft.entries["shard.stage"] = stage
    facts.setdefault("tp", 1)
    if facts["tp"] > 1:
        draft.entries["layout.sequence_parallel"] = draft.get("sequence_parallel", False)
    elif facts.get("ddp_impl", "local") not in ("local", "torch"):
        draft.leave("--DDP-impl", facts["ddp_impl"], "a data-parallel wrapper by another name")
    if facts.get("replicate") == 1:
        facts.pop("replicate")


def _precision(draft: Draft) -> None:
    """Main gradients are fp32 with bf16 (`accumulate_allreduce_grads_in_fp32`), and fp16 with fp16 unless asked for."""
    fp16, bf16 = draft.get("fp16", False), draft.get("bf16", False)
    if fp16 and bf16:
        raise draft.bad("--fp16 and --bf16: one dtype computes", "leave one of them out")
    if fp16 or bf16:
        low = "fp16" if fp16 else "bf16"
        asked = draft.get("accumulate_fp32", False)
        wide = not draft.get("reduce_bf16", False) if bf16 else asked
        gradient = "fp32" if wide else low
        draft.entries |= {f"precision.{role}": low for role in ("embedding", "block", "head")}
        draft.entries |= {"precision.cast": "weights", "precision.gradient": gradient, "precision.reduction": gradient}
    for name, entry in (("main_grads", "gradient"), ("main_params", "master"), ("exp_avg", "optimizer_state")):
        value = draft.facts.get(name)
        if value in _DTYPES:
            draft.entries[f"precision.{entry}"] = value
        elif value is not None:
            draft.leave(f"--{name.replace('_', '-')}-dtype", value, "a plan's states are fp32, bf16 or fp16")
    if draft.facts.get("fp8"):
        recipe = draft.get("fp8_recipe", "delayed")
        if recipe in _FP8:
            draft.entries["precision.fp8"] = _FP8[recipe]
        else:
            draft.leave("--fp8-recipe", recipe, "a plan has no such scaling; carried as bf16")


def _recompute(draft: Draft) -> None:
    facts = draft.facts
    granularity = facts.get("recompute")
    if facts.get("recompute_selective"):
        granularity = "selective"
    if facts.get("recompute_full") or (granularity is None and facts.get("recompute_method")):
        granularity = "full"
    if granularity == "selective":
        _selective(draft)
    elif granularity == "full":
        draft.entries["recompute.mode"] = "full"
        number = facts.get("recompute_layers", 1)
        if facts.get("recompute_method", "uniform") == "block":
            draft.entries["recompute.blocks"] = number
        elif number > 1:
            draft.leave("--recompute-num-layers", number, "keeps one input in so many blocks; a plan keeps each block's")
    elif granularity is not None:
        raise draft.bad(f"--recompute-granularity is {granularity}: full or selective", "use selective")


def _selective(draft: Draft) -> None:
    modules = str(draft.get("recompute_modules", "core_attn")).strip("[]").replace(",", " ").replace("'", "").split()
    if "core_attn" in modules:
        draft.entries["recompute.mode"] = "attention"
        modules.remove("core_attn")
    elif "layernorm" in modules:
        draft.entries["recompute.mode"] = "norm_activation"
        modules = [module for module in modules if module not in ("layernorm", "moe_act")]
    if modules:
        draft.leave("--recompute-modules", " ".join(modules), "a plan does not recompute these by themselves")


def _attention(draft: Draft) -> None:
    backend, implementation = draft.get("attention", "auto"), draft.get("implementation", "transformer_engine")
    flash = draft.get("flash", False) or backend in ("flash", "fused")
    if not flash and (backend in ("unfused", "local") or implementation == "local"):
        draft.entries["kernels.attention"] = "unfused" if draft.get("unfused", False) else "fused_softmax"


def _optimizer(draft: Draft) -> None:
    name = draft.get("optimizer", "adam")
    if name != "adam":
        draft.leave("--optimizer", name, "plans carry out AdamW")
    if draft.get("offload", False):
        draft.entries["optimizer.cpu_share"] = draft.get("offload_fraction", 1.0)
    timeout = draft.facts.get("timeout_minutes")
    if timeout:
        draft.entries["comm.timeout_seconds"] = 60 * timeout
    draft.entries["data.workers"] = draft.get("workers", 2)
    draft.entries["kernels.gradient_fusion"] = not draft.get("no_gradient_fusion", False)
    if draft.get("loss_fusion", False):
        draft.entries["loss.fused"] = _LOSS_KERNELS.get(draft.get("loss_kernel", "native"), "script")
    graphs = draft.get("graphs", False) or draft.get("graph_kind", "none") != "none"
    draft.entries["compile.graphs"] = graphs
    draft.entries |= {f"overlap.{name}": draft.get(f"overlap_{name}", False) for name in ("tensor", "experts")}
    if draft.get("defers", False):
        draft.entries["overlap.deferred_head"] = draft.get("deferral_limit", 0) or WITHOUT_LIMIT
    draft.entries["layout.expert_tp"] = draft.get("expert_tp", draft.get("tp", 1) if draft.get("experts", 0) else 1)


def _recipe(draft: Draft, samples: int) -> None:
    """Megatron counts in iterations or samples; a plan in steps."""
    facts, entries = draft.facts, draft.entries
    for name, entry, default in (
        ("beta1", "beta1", 0.9),
        ("beta2", "beta2", 0.999),
        ("eps", "eps", 1e-8),
        ("weight_decay", "weight_decay", 0.01),
        ("clip", "clip_norm", 1.0),
        ("seed", "seed", 1234),
    ):
        entries[f"recipe.{entry}"] = facts.get(name, default)
    steps = facts.get("steps") or (facts["train_samples"] // samples if facts.get("train_samples") else 0)
    if steps:
        entries["recipe.steps"] = steps
    decay = facts.get("decay_steps") or (facts["decay_samples"] // samples if facts.get("decay_samples") else steps)
    if steps and decay and decay != steps:
        draft.leave("--lr-decay-iters", decay, "a plan's schedule ends with its steps")
    style = draft.get("decay_style", "linear")
    if style in ("constant", "linear", "cosine"):
        entries["recipe.schedule"] = style
    else:
        draft.leave(_KEY_OF_DECAY, style, "a plan's rate is constant, or falls linearly or as a cosine")
    if rate := facts.get("lr"):
        entries["recipe.learning_rate"] = rate
        entries["recipe.min_lr_ratio"] = facts.get("min_lr", 0.0) / rate
    if facts.get("warmup_samples"):
        entries["recipe.warmup_steps"] = facts["warmup_samples"] // samples
    else:
        entries["recipe.warmup_steps"] = facts.get("warmup_steps", round(facts.get("warmup_fraction", 0.0) * (decay or 0)))


def _sized(draft: Draft, given: Given, found: Degrees, stacks: Any) -> dict[str, Any]:
    parts = layout_parts(found)
    step = cut(draft, given, found.data, "accumulation")
    parts |= _pipeline(draft, found, step, sum(stack.count for stack in stacks) if stacks else draft.get("layers", 0))
    overlaps = draft.get("overlap_grad", False)
    parts["overlap.gradients"] = overlaps or found.data == 1
    if found.data > 1 and draft.entries["shard.stage"] > 0 and draft.get("overlap_param", False) != overlaps:
        value = "absent" if overlaps else "true"
        draft.leave(
            "--overlap-param-gather", value, "a plan overlaps the reducing of gradients and the gathering of weights alike"
        )
    return parts | batch_parts(step, sequence(draft, given, None))


def _pipeline(draft: Draft, found: Degrees, step: Cut, blocks: int) -> dict[str, Any]:
    if found.pp == 1:
        return {}
    facts = draft.facts
    chunks = facts.get("chunks") or 1
    layers = _laid_out(draft, str(facts["pipeline_layout"])) if facts.get("pipeline_layout") else []
    if layers:
        chunks, over = divmod(len(layers), found.pp)
        if over or not chunks:
            raise draft.bad(
                f"--pipeline-model-parallel-layout has {len(layers)} stages for {found.pp} ranks: "
                "stages are a multiple of the ranks",
                "change one of them",
            )
    elif per_chunk := facts.get("layers_per_chunk"):
        chunks, over = divmod(blocks, found.pp * per_chunk) if blocks else (2, 0)
        if over or not chunks:
            raise draft.bad(
                f"{blocks} layers on {found.pp} pipeline ranks with {per_chunk} layers a virtual stage: "
                "layers are a multiple of ranks x layers a stage",
                "change --num-layers-per-virtual-pipeline-stage",
            )
    elif blocks:
        layers = _uneven(draft, found.pp * chunks, blocks)
    if chunks > 1 and step.accumulation % found.pp:
        draft.leave("--global-batch-size", step.samples, f"interleaving wants micro-batches in multiples of {found.pp}")
    parts: dict[str, Any] = {"pipeline.schedule": "interleaved" if chunks > 1 else "1f1b", "pipeline.chunks": chunks}
    return parts | ({"pipeline.layers_per_stage": layers} if layers else {})


def _uneven(draft: Draft, stages: int, blocks: int) -> list[int]:
    """Blocks of each stage where the first or last has a number of its own, or counts embedding or loss as a block."""
    facts = draft.facts
    first, last = facts.get("first_layers"), facts.get("last_layers")
    if facts.get("count_embedding") or facts.get("count_loss"):
        embedding, loss = int(facts.get("count_embedding", False)), int(facts.get("count_loss", False))
        each, over = divmod(blocks + embedding + loss, stages)
        if over:
            raise draft.bad(
                f"{blocks} layers with embedding and loss on {stages} stages leave {over} over", "change --num-layers"
            )
        return [each - embedding * (at == 0) - loss * (at == stages - 1) for at in range(stages)]
    if first is None and last is None:
        return []
    ends = (first is not None) + (last is not None)
    middle, inner = blocks - (first or 0) - (last or 0), stages - ends
    if inner < 0 or (inner and middle % inner) or middle < 0 or (not inner and middle):
        raise draft.bad(
            f"{blocks} layers with {first or 'no'} on the first and {last or 'no'} on the last of {stages} stages: "
            "the rest is shared out evenly",
            "change --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        )
    each = middle // inner if inner else 0
    return [*([first] if first is not None else []), *([each] * inner), *([last] if last is not None else [])]


def _laid_out(draft: Draft, text: str) -> list[int]:
    """Blocks of each stage in Megatron's notation: `Et*3|(tt|)*29,m|L` (E embedding, t block, m further head, L loss)."""
    plain = text.strip("'\"").replace(" ", "").replace(",", "")
    while match := re.search(r"\(([^()]*)\)\*(\d+)|([EtmL|])\*(\d+)|\(([^()]*)\)", plain):
        inner = match[1] if match[1] is not None else match[3] if match[3] is not None else match[5]
        plain = plain[: match.start()] + inner * int(match[2] or match[4] or 1) + plain[match.end() :]
    if set(plain) - set("EtmL|"):
        draft.leave("--pipeline-model-parallel-layout", text, "not a layout that fullstride reads")
        return []
    return [stage.count("t") for stage in plain.removesuffix("|").split("|")]
