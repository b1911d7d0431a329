"""What may go with what in a Plan, and why: the one table that the planner, the engine and the tests read.

A rule is a statement, a function that returns the offending value in words (or nothing), and a fix. Rules are pure; those
that need the model or the cluster say nothing when they are not given. `inert` lists settings that are allowed but have
no effect.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.errors import RuleBroken
from fullstride.files import Value
from fullstride.model.spec import ModelSpec
from fullstride.plan import adapted, limits, met
from fullstride.plan.met import ENV_PREFIXES, Met, below, outside, when
from fullstride.plan.plan import Data, Loss, Overlap, Plan

Scope: TypeAlias = Literal["all", "run"]
RUN_ONLY = (
    "layout.unbuilt",
    "run.unbuilt",
    "pipeline.ddp",
    "pipeline.fsdp2",
    "pipeline.empty",
    "adapter.layout",
    "precision.fp16",
    "precision.cast",
    "precision.weights",
    "precision.autocast",
    "precision.ddp",
    "precision.master",
    "precision.loss",
    "precision.gradient",
    "precision.reduction",
)
"""Rules about what this version runs; plans that break them can still be priced."""


class Rule(Value, frozen=True, kw_only=True):
    """One line of the table."""

    code: str
    statement: str
    fix: str
    met: Met
    scope: Scope = "all"
    """`all`: no framework could do it; `run`: this version's engine does not run it yet, though it can be priced."""


class Violation(Value, frozen=True, kw_only=True):
    """A rule that a plan breaks."""

    code: str
    message: str
    """The value met and the rule."""
    fix: str


def _rule(code: str, statement: str, fix: str, met: Met) -> Rule:
    return Rule(code=code, statement=statement, fix=fix, met=met, scope="run" if code in RUN_ONLY else "all")


RULES: tuple[Rule, ...] = (
    _rule(
        "size.sequence",
        "a sample has at least 2 tokens, one to read and one to predict",
        "raise workload.sequence_length",
        below(2, "workload.sequence_length"),
    ),
    _rule(
        "size.samples",
        "a step has at least one sample",
        "raise workload.samples_per_step",
        below(1, "workload.samples_per_step"),
    ),
    _rule("size.steps", "a run has at least one step", "raise recipe.steps", below(1, "recipe.steps")),
    _rule(
        "size.layout",
        "a degree is at least 1",
        "use 1 for an axis that is not used",
        below(1, *(f"layout.{axis}" for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"))),
    ),
    _rule(
        "size.batch",
        "micro-batches hold at least one sample",
        "use at least 1",
        below(1, "batch.micro_batch", "batch.accumulation"),
    ),
    _rule("size.chunk", "a chunk has at least one token", "use at least 1", below(1, "loss.chunk_tokens")),
    _rule("size.every", "one block in `every` is recomputed", "use at least 1", below(1, "recompute.every")),
    _rule("size.chunks", "a rank has at least one stage", "use 1", below(1, "pipeline.chunks")),
    _rule("size.prefetch", "blocks gathered ahead are counted from 0", "use 0 or more", below(0, "overlap.prefetch")),
    _rule("size.bucket", "a bucket holds at least one byte", "use the default, 26214400", below(1, "overlap.bucket_bytes")),
    _rule("size.workers", "workers are counted from 0", "use 0 for none", below(0, "data.workers")),
    _rule("size.threads", "threads are counted from 0", "use 0 for torchrun's default", below(0, "threads.compute")),
    _rule("size.ctas", "a collective runs on a number of CTAs from 1 to 64", "use 0, and NCCL decides", when(met.ctas_met)),
    _rule("size.timeout", "a wait is longer than nothing and at most a week", "use 600", when(met.timeout_met)),
    _rule("size.finite", "numbers are finite", "give a number", when(met.finite_met)),
    _rule(
        "size.learning_rate", "the learning rate is positive", "use a value such as 3e-4", below(1e-300, "recipe.learning_rate")
    ),
    _rule("size.betas", "AdamW's betas lie in [0, 1)", "use 0.9 and 0.95", outside(0.0, 1.0, "recipe.beta1", "recipe.beta2")),
    _rule("size.eps", "eps is positive", "use 1e-8", below(1e-300, "recipe.eps")),
    _rule(
        "size.recipe",
        "it is counted from 0",
        "use 0 or more",
        below(0, "recipe.weight_decay", "recipe.clip_norm", "recipe.warmup_steps"),
    ),
    _rule(
        "size.min_lr",
        "it is a share of the learning rate",
        "use a value from 0 to 1",
        outside(0.0, 1.0 + 1e-12, "recipe.min_lr_ratio"),
    ),
    _rule(
        "size.counts",
        "blocks, adapter ranks and alphas are counted from 0",
        "use 0 for all blocks, for no adapter, and for alpha = rank",
        below(0, "recompute.blocks", "adapter.rank", "adapter.alpha"),
    ),
    _rule(
        "size.shares",
        "they are shares of the optimizer's states, together at most 1",
        "use values from 0 to 1",
        when(limits.shares_met),
    ),
    _rule(
        "layout.order",
        "the order names pp, dp_replicate, dp_shard, cp and tp once each",
        "leave layout.order out",
        when(met.axes_met),
    ),
    _rule("layout.unbuilt", "this axis is not built yet", "use 1", when(met.unbuilt_axis_met)),
    _rule(
        "run.unbuilt",
        "fullstride prices this and does not run it yet",
        "leave that entry out",
        when(met.unbuilt_part_met),
    ),
    _rule(
        "layout.heads",
        "tensor parallelism gives each rank whole attention heads (keys' and values' may be repeated, evenly)",
        "use a tp that divides the heads",
        limits.heads_met,
    ),
    _rule(
        "layout.width",
        "tensor parallelism cuts the widths of products evenly",
        "use a tp that divides them",
        limits.width_met,
    ),
    _rule(
        "layout.vocabulary",
        "each tensor-parallel rank holds a row of the vocabulary (padded to a multiple of tp)",
        "lower layout.tp",
        limits.vocabulary_met,
    ),
    _rule(
        "layout.context",
        "each context-parallel rank takes two equal slices of a sample, one early and one late, so that causal work is equal",
        "use a sequence length that is a multiple of 2 x cp",
        when(limits.context_met),
    ),
    _rule(
        "layout.sequence",
        "sequence parallelism gives each rank the same number of tokens",
        "use a sequence length that is a multiple of tp x cp, or layout.sequence_parallel = false",
        when(limits.sequence_cut_met),
    ),
    _rule(
        "layout.experts",
        "expert parallelism gives each rank the same number of experts",
        "use an ep that divides the experts",
        limits.experts_met,
    ),
    _rule(
        "layout.expert_ranks",
        "expert parallelism lies over the data axes (dp_replicate x dp_shard x cp), so it divides them",
        "use an ep that divides the data-parallel ranks",
        when(limits.expert_ranks_met),
    ),
    _rule(
        "layout.devices",
        "a rank needs a device of its own (on a CPU host, a share of a core)",
        "lower the degrees, or give more devices",
        met.devices_met,
    ),
    _rule(
        "batch.samples",
        "micro-batch x accumulation x data-parallel degree equals the samples of a step",
        "change batch.accumulation, or workload.samples_per_step",
        when(met.samples_met),
    ),
    _rule(
        "shard.none",
        "carrier none goes with one data-parallel rank, and several ranks need ddp, fsdp2 or flat",
        "use carrier none with 1 data-parallel rank (replicas, shards and context counted), ddp, fsdp2 or flat with more",
        when(met.carrier_none_met),
    ),
    _rule("shard.none_stage", "one rank has nobody to share with", "use shard.stage = 0", when(met.stage_of_none_met)),
    _rule(
        "shard.ddp",
        "ddp replicates everything: stage 0, dp_shard 1, all ranks in dp_replicate",
        "move the ranks to layout.dp_replicate and use stage 0, or use fsdp2",
        when(met.ddp_met),
    ),
    _rule(
        "shard.fsdp2",
        "fsdp2 shards: stage 1, 2 or 3 over dp_shard > 1 ranks",
        "set shard.stage and layout.dp_shard, or use ddp",
        when(met.fsdp2_met),
    ),
    _rule(
        "shard.flat",
        "flat buffers are sharded: stage 1, 2 or 3 over dp_shard > 1 ranks (one rank steps as fast without them)",
        "set shard.stage and layout.dp_shard, or use none (one rank) or ddp",
        when(met.flat_met),
    ),
    _rule(
        "shard.reshard_stage",
        "only ZeRO-3 frees weights after forward",
        "use stage 3, or leave shard.reshard out",
        when(met.reshard_stage_met),
    ),
    _rule(
        "shard.reshard_names",
        "reshard rules name embedding, blocks, head, or a block's path such as model.layers.0",
        "correct the name",
        met.reshard_names_met,
    ),
    _rule(
        "pipeline.none",
        "a pipeline has a schedule, and one stage has none",
        "set layout.pp and pipeline.schedule together",
        when(limits.pipeline_none_met),
    ),
    _rule(
        "pipeline.chunks",
        "gpipe, 1f1b and zb-h1 have one stage a rank, zb-v two, interleaved two or more",
        "use that number of chunks",
        when(limits.chunks_met),
    ),
    _rule(
        "pipeline.stages",
        "a stage holds at least one block",
        "lower layout.pp or pipeline.chunks",
        limits.stages_met,
    ),
    _rule(
        "pipeline.even",
        "stages hold equal numbers of blocks unless pipeline.layers_per_stage says otherwise",
        "use a number of stages that divides the layers, or set pipeline.layers_per_stage",
        limits.even_met,
    ),
    _rule(
        "pipeline.layers",
        "pipeline.layers_per_stage has an entry for each stage (pp x chunks), and they add up to the blocks",
        "correct the list",
        limits.layers_met,
    ),
    _rule(
        "pipeline.rounds",
        "interleaving takes micro-batches in turns of pp, so their number (batch.accumulation) is a multiple of it",
        "change batch.micro_batch or the samples of a step, or use 1f1b",
        when(limits.rounds_met),
    ),
    _rule(
        "pipeline.sizes",
        "pipeline.micro_batch_per_stage has an entry for each stage, and of two neighbours one is a multiple of the other",
        "correct the list",
        when(limits.stage_batches_met),
    ),
    _rule(
        "pipeline.ddp",
        "ddp sums gradients in the backward of the last forward, and in a pipeline other backwards come between",
        "use carrier flat, or fsdp2 with stage 1",
        when(met.pipeline_ddp_met),
    ),
    _rule(
        "pipeline.fsdp2",
        "fsdp2 has one last backward for a rank's whole model, and takes weight gradients there alone",
        "use carrier flat, or gpipe or 1f1b",
        when(met.pipeline_fsdp2_met),
    ),
    _rule(
        "pipeline.empty",
        "the executor runs stages with one block at least",
        "give each stage a block",
        when(met.pipeline_empty_met),
    ),
    _rule("precision.fp16", "fp16 needs a loss scaler, which is not built yet", "use bf16", when(met.fp16_met)),
    _rule(
        "precision.none",
        "without a cast, embedding, block and head compute in the dtype of the master weights",
        "make them equal, or set precision.cast",
        when(met.cast_none_met),
    ),
    _rule(
        "precision.cast",
        "a cast goes from fp32 masters to bf16 blocks",
        "use block bf16 and master fp32, or cast none",
        when(met.cast_some_met),
    ),
    _rule(
        "precision.weights",
        "embedding and head compute in the blocks' dtype or the masters', a tied weight in one",
        "make embedding and head equal to block",
        met.cast_roles_met,
    ),
    _rule(
        "precision.autocast",
        "autocast decides for matrix products: head and block are equal, the embedding is theirs or the master's",
        "make head equal to block",
        when(met.autocast_roles_met),
    ),
    _rule(
        "precision.ddp",
        "ddp reduces the gradients of the master weights, and a cast copy has others",
        "use fsdp2 or flat with zero stage 1, or cast autocast",
        when(met.weights_ddp_met),
    ),
    _rule(
        "precision.master",
        "masters and optimizer states share one dtype, fp32 or fp64: the fused AdamW takes no mixture",
        "use fp32 for both",
        when(met.master_met),
    ),
    _rule(
        "precision.loss",
        "the softmax is taken in the dtype of the masters",
        "use fp32 (fp64 beside fp64 masters)",
        when(met.loss_dtype_met),
    ),
    _rule(
        "precision.gradient",
        "gradients are kept in the masters' dtype; with one micro-batch and cast weights also in the compute dtype (one rank) "
        "or the reduction dtype (fsdp2, flat)",
        "use precision.gradient = fp32 (the masters' dtype)",
        when(met.gradient_met),
    ),
    _rule(
        "precision.reduction",
        "gradients are reduced in the masters' dtype, or under fsdp2 and flat with cast weights in the compute dtype",
        "use precision.reduction = fp32 (the masters' dtype)",
        when(met.reduction_met),
    ),
    _rule("precision.fp8", "this device has no fp8 products", "use precision.fp8 = off, or a newer device", limits.fp8_met),
    _rule("workload.sequence", "a sample is no longer than the model's positions", "shorten the samples", met.sequence_met),
    _rule(
        "workload.separate",
        "separate documents need a model that takes position_ids, as Hugging Face's do",
        "use documents = across",
        met.separate_met,
    ),
    _rule(
        "model.names",
        "a part of a model of your own is named once, by its path; those of known families are known",
        "correct the name, or leave it out",
        met.names_met,
    ),
    _rule("model.digest", "the plan was made for another model", "plan again, or leave model.digest empty", met.digest_met),
    _rule(
        "loss.chunked",
        "this model changes its logits after the head, so head and loss cannot be joined",
        "use loss.kind = model",
        met.altered_logits_met,
    ),
    _rule(
        "adapter.targets",
        "an adapter stands beside a linear product of a block",
        "name products that the blocks have, or leave adapter.targets out",
        adapted.targets_met,
    ),
    _rule(
        "adapter.layout",
        "adapters run beside whole products, in a model that is not cut into stages",
        "use layout.tp = 1 and layout.pp = 1 (fsdp2 or flat with stage 3 shards the frozen weights), or adapter.rank = 0",
        when(adapted.layout_met),
    ),
    _rule(
        "compile.compiler",
        "torch.compile on CPU needs a C++ compiler",
        "install g++, or use compile.mode = off",
        met.compiler_met,
    ),
    _rule("data.pin", "pinned memory is for copies to a GPU", "use data.pin = false", met.pin_met),
    _rule("data.prefetch", "workers prepare at least one step ahead", "use data.prefetch = 1 or more", when(met.workers_met)),
    _rule(
        "comm.env",
        f"these variables configure the communication library: they begin with {', '.join(ENV_PREFIXES)}",
        "correct the name",
        when(met.env_met),
    ),
)
"""All rules, in the order in which they are checked."""

SIZE_RULES = tuple(rule for rule in RULES if rule.code.startswith("size."))
_OTHER_RULES = tuple(rule for rule in RULES if rule not in SIZE_RULES)
_PRICE_RULES = tuple(rule for rule in _OTHER_RULES if rule.scope == "all")


def _broken(
    rules: tuple[Rule, ...], plan: Plan, spec: ModelSpec | None = None, cluster: Cluster | None = None
) -> tuple[Violation, ...]:
    found = ((rule, rule.met(plan, spec, cluster)) for rule in rules)
    return tuple(Violation(code=r.code, message=f"{met}: {r.statement}", fix=r.fix) for r, met in found if met)


def size_violations(plan: Plan) -> tuple[Violation, ...]:
    """Sizes that cannot be, whatever goes with them."""
    return _broken(SIZE_RULES, plan)


def check(
    plan: Plan, spec: ModelSpec | None = None, cluster: Cluster | None = None, *, to_run: bool = True
) -> tuple[Violation, ...]:
    """Every rule that `plan` breaks; empty when it may run. Impossible sizes are reported alone.

    Without `to_run` only what no framework could do is refused, not what this version does not run yet.
    """
    return size_violations(plan) or _broken(_OTHER_RULES if to_run else _PRICE_RULES, plan, spec, cluster)


def not_run(plan: Plan, spec: ModelSpec | None = None, cluster: Cluster | None = None) -> tuple[Violation, ...]:
    """What keeps this version from running a plan that otherwise could be; empty when it runs it."""
    return _broken(tuple(rule for rule in _OTHER_RULES if rule.scope == "run"), plan, spec, cluster)


def require(plan: Plan, spec: ModelSpec | None = None, cluster: Cluster | None = None, *, to_run: bool = True) -> None:
    """Let an allowed plan pass.

    Raises:
        RuleBroken: names every value and rule, and the first fix of each.
    """
    if broken := check(plan, spec, cluster, to_run=to_run):
        raise RuleBroken("; ".join(v.message for v in broken), fix="; ".join(dict.fromkeys(v.fix for v in broken)))


def inert(plan: Plan) -> tuple[str, ...]:
    """Settings that are allowed but do nothing in this plan, in words."""
    found = []
    if plan.loss.kind == "model" and plan.loss.chunk_tokens != Loss().chunk_tokens:
        found.append(f"loss.chunk_tokens = {plan.loss.chunk_tokens} has no effect with loss.kind = 'model'")
    if plan.shard.stage != 3 and plan.overlap.prefetch != Overlap().prefetch:
        found.append(f"overlap.prefetch = {plan.overlap.prefetch} has no effect below ZeRO-3")
    if plan.layout.tp == 1 and plan.overlap.tensor:
        found.append("overlap.tensor = true has no effect without tensor parallelism")
    if plan.shard.carrier != "ddp" and plan.overlap.bucket_bytes != Overlap().bucket_bytes:
        found.append(f"overlap.bucket_bytes = {plan.overlap.bucket_bytes} has no effect without ddp")
    if plan.data.workers == 0 and plan.data.prefetch != Data().prefetch:
        found.append(f"data.prefetch = {plan.data.prefetch} has no effect without workers")
    if plan.recompute.mode == "none" and plan.recompute.every != 1:
        found.append(f"recompute.every = {plan.recompute.every} has no effect with recompute.mode = 'none'")
    if plan.layout.world_size == 1 and plan.comm.env:
        found.append(f"comm.env ({', '.join(plan.comm.env)}) has no effect with one rank")
    if plan.layout.data_parallel == 1 and plan.comm.ctas:
        found.append(f"comm.ctas = {plan.comm.ctas} has no effect without data-parallel ranks")
    return tuple(found)


def rules_table() -> tuple[tuple[str, str, str], ...]:
    """Code, statement and fix of every rule, for the documentation."""
    return tuple((rule.code, rule.statement, rule.fix) for rule in RULES)
