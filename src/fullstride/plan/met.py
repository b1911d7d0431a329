"""Which value of a Plan breaks which rule, in words: one pure function for each rule of `rules.py`.

Each returns `key = value` where its rule is broken and an empty text where it holds. Functions that need the model or the
cluster return an empty text when those are not given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.limits import data_ranks, over
from fullstride.plan.plan import ModelRef, Plan, Precision

Met: TypeAlias = Callable[[Plan, ModelSpec | None, Cluster | None], str]
"""The value that breaks the rule, as `key = value`; empty if nothing does."""

MODULE_GROUPS = ("embedding", "blocks", "head")
LONGEST_WAIT_SECONDS = 7 * 86400.0
ALTERED_LOGITS = ("gemma2", "gemma2_text")
"""Families that change logits after the head (soft capping), so that head and loss cannot be joined."""
ENV_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "CUDA_", "CUBLAS_", "PYTORCH_", "UCX_")


def below(least: float, *paths: str) -> Met:
    """The first of `paths` (`part.field`) whose value is under `least`."""
    pairs = [tuple(path.split(".")) for path in paths]

    def met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
        for part, name in pairs:
            value = getattr(getattr(plan, part), name)
            if value < least:
                return f"{part}.{name} = {value}"
        return ""

    return met


def outside(low: float, high: float, *paths: str) -> Met:
    """Met outside [low, high)."""
    pairs = [tuple(path.split(".")) for path in paths]

    def met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
        for part, name in pairs:
            value = getattr(getattr(plan, part), name)
            if not low <= value < high:
                return f"{part}.{name} = {value}"
        return ""

    return met


def when(words: Callable[[Plan], str]) -> Met:
    """A rule that needs the plan alone."""
    return lambda plan, spec, cluster: words(plan)


# Words for the value met; each returns "" where the rule holds.


def axes_met(plan: Plan) -> str:
    """The order of axes, unless each needed one stands there once."""
    layout = plan.layout
    needed = {"pp", "dp_replicate", "dp_shard", "cp", "tp"}
    given = [axis for axis in layout.order if axis != "ep"]
    return "" if sorted(given) == sorted(needed) and layout.order.count("ep") <= 1 else f"layout.order = {list(layout.order)}"


def unbuilt_axis_met(plan: Plan) -> str:
    """The first axis that is used but not built."""
    for axis in ("cp", "ep"):
        if (size := getattr(plan.layout, axis)) > 1:
            return f"layout.{axis} = {size}"
    return ""


def unbuilt_part_met(plan: Plan) -> str:
    """The first entry that can be priced but not run."""
    recompute, optimizer = plan.recompute, plan.optimizer
    entries: tuple[tuple[str, object, bool], ...] = (
        ("shard.carrier", plan.shard.carrier, plan.shard.carrier in ("megatron", "deepspeed")),
        ("recompute.mode", recompute.mode, recompute.mode == "attention"),
        ("recompute.blocks", recompute.blocks, recompute.blocks != 0),
        ("recompute.offload", recompute.offload, recompute.offload != "none"),
        ("optimizer.cpu_share", optimizer.cpu_share, optimizer.cpu_share != 0),
        ("optimizer.nvme_share", optimizer.nvme_share, optimizer.nvme_share != 0),
        ("precision.fp8", plan.precision.fp8, plan.precision.fp8 != "off"),
        ("kernels.attention", plan.kernels.attention, plan.kernels.attention != "sdpa"),
        ("kernels.gradient_fusion", plan.kernels.gradient_fusion, plan.kernels.gradient_fusion),
        ("loss.fused", plan.loss.fused, plan.loss.fused != "no"),
        ("layout.expert_tp", plan.layout.expert_tp, plan.layout.expert_tp != 1),
        ("compile.graphs", plan.compile.graphs, plan.compile.graphs),
        ("overlap.gradients", plan.overlap.gradients, not plan.overlap.gradients),
        ("overlap.experts", plan.overlap.experts, plan.overlap.experts),
        ("overlap.deferred_head", plan.overlap.deferred_head, plan.overlap.deferred_head != 0),
    )
    return next((f"{name} = {value!r}" for name, value, used in entries if used), "")


def samples_met(plan: Plan) -> str:
    """The product of the batch's factors, where it is not the samples of a step, and what would come out even."""
    batch, ranks, wanted = plan.batch, plan.layout.data_parallel, plan.workload.samples_per_step
    product = batch.micro_batch * batch.accumulation * ranks
    if product == wanted:
        return ""
    told = (
        f"micro_batch {batch.micro_batch} x accumulation {batch.accumulation} x data parallel {ranks} = {product}, "
        f"samples_per_step = {wanted}"
    )
    if wanted % ranks:
        return f"{told}, and {over(wanted, ranks)} is not whole"
    if wanted // ranks % batch.micro_batch:
        return f"{told}, {over(wanted, ranks)} a rank, and {over(wanted // ranks, batch.micro_batch)} is not whole"
    return f"{told}, {over(wanted, ranks)} a rank, accumulation would be {wanted // ranks // batch.micro_batch}"


def finite_met(plan: Plan) -> str:
    """The first entry that is no finite number."""
    for part in plan.__struct_fields__:
        holder = getattr(plan, part)
        for name in getattr(holder, "__struct_fields__", ()):
            value = getattr(holder, name)
            if isinstance(value, float) and not math.isfinite(value):
                return f"{part}.{name} = {value}"
    return ""


def timeout_met(plan: Plan) -> str:
    """A wait of no length that a clock can measure."""
    seconds = plan.comm.timeout_seconds
    return "" if 0 < seconds <= LONGEST_WAIT_SECONDS else f"comm.timeout_seconds = {seconds}"


def carrier_none_met(plan: Plan) -> str:
    """The carrier, where it does not go with the number of data-parallel ranks."""
    ranks, carrier = data_ranks(plan), plan.shard.carrier
    if carrier in ("megatron", "deepspeed"):  # they carry any number
        return ""
    return f"shard.carrier = {carrier!r} with {ranks} ranks" if (carrier == "none") != (ranks == 1) else ""


def ddp_met(plan: Plan) -> str:
    """What ddp cannot shard."""
    if plan.shard.carrier != "ddp" or (plan.shard.stage == 0 and plan.layout.dp_shard == 1):
        return ""
    return f"ddp with shard.stage = {plan.shard.stage} and layout.dp_shard = {plan.layout.dp_shard}"


def fsdp2_met(plan: Plan) -> str:
    """What leaves fsdp2 nothing to shard."""
    if plan.shard.carrier != "fsdp2" or (plan.shard.stage >= 1 and plan.layout.dp_shard * plan.layout.cp > 1):
        return ""
    return f"fsdp2 with shard.stage = {plan.shard.stage} and layout.dp_shard = {plan.layout.dp_shard}"


def flat_met(plan: Plan) -> str:
    """What leaves flat buffers nothing to shard."""
    fine = plan.shard.carrier != "flat" or (plan.shard.stage >= 1 and plan.layout.dp_shard > 1)
    return "" if fine else f"flat with shard.stage = {plan.shard.stage} and layout.dp_shard = {plan.layout.dp_shard}"


def stage_of_none_met(plan: Plan) -> str:
    """A ZeRO stage on one rank."""
    return f"carrier none with shard.stage = {plan.shard.stage}" if plan.shard.carrier == "none" and plan.shard.stage else ""


def reshard_stage_met(plan: Plan) -> str:
    """Reshard rules below stage 3."""
    return (
        f"shard.reshard = {plan.shard.reshard} at stage {plan.shard.stage}"
        if plan.shard.reshard and plan.shard.stage != 3
        else ""
    )


def reshard_names_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """A reshard rule for something that is no part of the model."""
    for name in plan.shard.reshard:
        if name in MODULE_GROUPS or name in _one_by_one(plan):
            continue
        path, _, index = name.rpartition(".")
        if not path or not index.isdigit():
            return f"shard.reshard names {name!r}"
        blocks = [stack for stack in spec.stacks if stack.path == path] if spec else []
        if spec and not any(stack.first <= int(index) < stack.first + stack.count for stack in blocks):
            return f"shard.reshard names {name!r}, and {spec.name} has no such block"
    return ""


def _one_by_one(plan: Plan) -> tuple[str, ...]:
    """The paths of blocks that are named one by one."""
    return plan.model.blocks if isinstance(plan.model.blocks, tuple) else ()


def names_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """A name that is no path, a part inside another one (or twice the same), or names for a model that needs none."""
    if not plan.model.named:
        return ""
    if spec and spec.family != "module":
        entry, value = next(iter(plan.model.named.items()))
        said = list(value) if isinstance(value, tuple) else value
        return f"model.{entry} = {said!r} in {spec.name}, of the family {spec.family}"
    return _clash(plan.model)


@cache  # a search asks for each of its plans
def _clash(model: ModelRef) -> str:
    pairs = [
        (f"model.{entry}", path)
        for entry, value in model.named.items()
        for path in ((value,) if isinstance(value, str) else value)
    ]
    for place, (entry, path) in enumerate(pairs):
        if not all(path.split(".")):
            return f"{entry} names {path!r}"
        for other, its in pairs[:place]:
            if f"{path}.".startswith(f"{its}.") or f"{its}.".startswith(f"{path}."):
                return f"{entry} names {path!r}" + (" twice" if its == path and other == entry else f", {other} {its!r}")
    return ""


def pipeline_ddp_met(plan: Plan) -> str:
    """A pipeline under ddp."""
    found = plan.layout.pp > 1 and plan.shard.carrier == "ddp"
    return f"shard.carrier = 'ddp' with layout.pp = {plan.layout.pp}" if found else ""


def pipeline_fsdp2_met(plan: Plan) -> str:
    """A pipeline under fsdp2 whose schedule comes back to several stages of a rank, or to weights after the backward."""
    pipe = plan.pipeline
    if plan.layout.pp == 1 or plan.shard.carrier != "fsdp2" or (pipe.chunks == 1 and pipe.schedule != "zb-h1"):
        return ""
    return f"shard.carrier = 'fsdp2' with schedule {pipe.schedule} and {pipe.chunks} chunks"


def pipeline_empty_met(plan: Plan) -> str:
    """A stage without blocks."""
    layers = plan.pipeline.layers_per_stage
    return f"pipeline.layers_per_stage = {list(layers)}" if plan.layout.pp > 1 and layers and min(layers) == 0 else ""


def roles(precision: Precision, *names: str) -> str:
    """Roles with their dtypes, in words."""
    return ", ".join(f"{name} {getattr(precision, name)}" for name in names)


def fp16_met(plan: Plan) -> str:
    """The first role in fp16."""
    for name in Precision.__struct_fields__:
        if getattr(plan.precision, name) == "fp16":
            return f"precision.{name} = 'fp16'"
    return ""


def cast_none_met(plan: Plan) -> str:
    """Unequal roles without a cast."""
    p = plan.precision
    equal = p.embedding == p.block == p.head == p.master
    return (
        "" if p.cast != "none" or equal else f"precision.cast = 'none' with {roles(p, 'embedding', 'block', 'head', 'master')}"
    )


def cast_some_met(plan: Plan) -> str:
    """A cast that is not fp32 to bf16."""
    p = plan.precision
    if p.cast == "none" or (p.block == "bf16" and p.master == "fp32"):
        return ""
    return f"precision.cast = {p.cast!r} with {roles(p, 'block', 'master')}"


def cast_roles_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Roles under cast weights that are neither the blocks' dtype nor the masters', or that a tied weight cannot have."""
    p = plan.precision
    odd = any(role not in (p.block, p.master) for role in (p.embedding, p.head))
    tied = spec is not None and spec.tied_embeddings and p.embedding != p.head
    if p.cast == "weights" and (odd or tied):
        return f"precision.cast = 'weights' with {roles(p, 'embedding', 'block', 'head')}" + (", tied" if tied else "")
    return ""


def autocast_roles_met(plan: Plan) -> str:
    """Roles that autocast does not produce."""
    p = plan.precision
    if p.cast == "autocast" and (p.head != p.block or p.embedding not in (p.master, p.block)):
        return f"precision.cast = 'autocast' with {roles(p, 'embedding', 'block', 'head')}"
    return ""


def weights_ddp_met(plan: Plan) -> str:
    """A cast copy under ddp."""
    return (
        "precision.cast = 'weights' with carrier ddp"
        if plan.precision.cast == "weights" and plan.shard.carrier == "ddp"
        else ""
    )


def master_met(plan: Plan) -> str:
    """Masters or states in a dtype that the optimizer does not take."""
    p = plan.precision
    if p.master not in ("fp32", "fp64") or p.optimizer_state != p.master:
        return f"precision: {roles(p, 'master', 'optimizer_state')}"
    return ""


def loss_dtype_met(plan: Plan) -> str:
    """A loss dtype other than the masters'."""
    p = plan.precision
    return "" if p.loss == p.master else f"precision: {roles(p, 'loss', 'master')}"


def gradient_met(plan: Plan) -> str:
    """Storage of gradients: as wide as the masters, or as a carrier leaves them with one micro-batch."""
    p = plan.precision
    if p.gradient == p.master:
        return ""
    if plan.batch.accumulation > 1:
        return f"precision.gradient = {p.gradient!r} with accumulation {plan.batch.accumulation}"
    narrow = p.block if p.embedding == p.block == p.head else p.master
    allowed = p.cast == "weights" and p.gradient == (narrow if plan.shard.carrier == "none" else p.reduction)
    return "" if allowed else f"precision.gradient = {p.gradient!r} with {roles(p, 'cast', 'block', 'reduction')}"


def reduction_met(plan: Plan) -> str:
    """A reduction dtype that the carrier does not have."""
    p = plan.precision
    if p.reduction == p.master:
        return ""
    if p.reduction == p.block and p.cast == "weights" and plan.shard.carrier in ("fsdp2", "flat"):
        return ""
    return f"precision.reduction = {p.reduction!r} with carrier {plan.shard.carrier}, {roles(p, 'cast', 'block', 'master')}"


def sequence_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """A sample longer than the model's positions."""
    if not spec or not spec.max_sequence or plan.workload.sequence_length <= spec.max_sequence:
        return ""
    return f"workload.sequence_length = {plan.workload.sequence_length}, and {spec.name} has {spec.max_sequence} positions"


def digest_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """The digest of another model."""
    wanted = plan.model.digest
    return (
        ""
        if not spec or not wanted or wanted == spec.digest
        else f"model.digest = {wanted!r}, and {spec.name} has {spec.digest!r}"
    )


def altered_logits_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """A chunked loss behind altered logits."""
    altered = spec is not None and plan.loss.kind == "chunked" and spec.family in ALTERED_LOGITS
    return f"loss.kind = 'chunked' with family {spec.family}" if spec and altered else ""


def separate_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Separate documents for a model without position_ids."""
    if plan.workload.documents == "separate" and spec and spec.family == "module":
        return f"workload.documents = 'separate' with {spec.name}"
    return ""


RANKS_A_CORE = 8
"""Processes that may share a core of a CPU host; more only wait for each other, each with its own memory."""


def devices_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """More ranks than devices; ranks of a CPU host are processes, some of which may share a core."""
    ranks = plan.layout.world_size
    if not cluster:
        return ""
    if cluster.device.kind == "cpu":
        cores = sum(group.count * group.host.num_cores for group in cluster.groups)
        return f"{ranks} ranks on {cores} cores, over {RANKS_A_CORE} a core" if ranks > RANKS_A_CORE * cores else ""
    return f"{ranks} ranks on {cluster.num_devices} devices of {cluster.name}" if ranks > cluster.num_devices else ""


def compiler_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Compilation on a CPU host known to have no compiler."""
    if plan.compile.mode == "off" or not cluster or cluster.device.kind != "cpu" or cluster.host.has_compiler is not False:
        return ""
    return f"compile.mode = {plan.compile.mode!r} on a host without a C++ compiler"


def pin_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Pinned memory without a GPU."""
    return "data.pin = true on a host without a GPU" if plan.data.pin and cluster and cluster.device.kind == "cpu" else ""


def workers_met(plan: Plan) -> str:
    """Workers that may prepare nothing ahead."""
    return (
        f"data.prefetch = {plan.data.prefetch} with {plan.data.workers} workers"
        if plan.data.workers > 0 > plan.data.prefetch - 1
        else ""
    )


def ctas_met(plan: Plan) -> str:
    """More CTAs than NCCL has channels, or fewer than none."""
    return "" if 0 <= plan.comm.ctas <= 64 else f"comm.ctas = {plan.comm.ctas}"


def env_met(plan: Plan) -> str:
    """A variable that no communication library reads."""
    for name in plan.comm.env:
        if not name.startswith(ENV_PREFIXES) or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            return f"comm.env sets {name!r}"
    return ""
