"""What no framework could do, in words with the arithmetic: sizes that do not divide, stages without blocks.

As in `met.py`, each function returns the value that breaks its rule, or an empty text where the rule holds or the model is
not given.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import Attention, ModelSpec
from fullstride.plan.plan import Plan, Schedule

CHUNKS: dict[Schedule, tuple[int, int]] = {
    "none": (1, 1),
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, 1_000_000),
    "bfs": (1, 1_000_000),
    "zb-h1": (1, 1),
    "zb-v": (2, 2),
}
"""Fewest and most stages on a rank, by schedule."""


def attentions(spec: ModelSpec) -> tuple[Attention, ...]:
    """The attentions of all kinds of blocks."""
    return tuple(s.attention for stack in spec.stacks for s in stack.sublayers if s.attention is not None)


def num_experts(spec: ModelSpec) -> int:
    """Experts of a block; 0 for a dense model."""
    found = [m.groups for stack in spec.stacks for s in stack.sublayers if s.kind == "experts" for m in s.matmuls]
    return max(found, default=0)


def data_ranks(plan: Plan) -> int:
    """Ranks that hold the same weights but for sharding: replicas, shards and slices of the context."""
    return plan.layout.data_parallel * plan.layout.cp


def over(amount: int, ranks: int) -> str:
    """A division in words: `30 / 4 = 7.5`, `256 / 8 = 32`."""
    share = Fraction(amount, ranks)
    shown = str(share.numerator) if share.denominator == 1 else f"{float(share):.4g}"
    return f"{amount} / {ranks} = {shown}"


def divisors(amount: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, int(amount**0.5) + 1) if amount % n == 0]
    return sorted({*small, *(amount // n for n in small)})


def heads_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Attention heads that do not come out even over tp, those of keys and values included."""
    tp = plan.layout.tp
    for core in attentions(spec) if spec and tp > 1 else ():
        if core.num_heads % tp:
            return f"layout.tp = {tp}, {over(core.num_heads, tp)} heads a rank"
        if core.num_kv_heads % tp and tp % core.num_kv_heads:
            return f"layout.tp = {tp}, {over(core.num_kv_heads, tp)} key-value heads a rank"
    return ""


def width_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """A product whose rows or columns do not come out even over tp."""
    tp = plan.layout.tp
    for stack in spec.stacks if spec and tp > 1 else ():
        for sublayer in stack.sublayers:
            if sublayer.kind not in ("linear", "experts"):
                continue
            for m in sublayer.matmuls:
                inner = m.k if spec and m.n == spec.hidden_size else m.n
                if inner % tp and inner >= tp:  # a product narrower than tp (a gate) is kept whole
                    return f"layout.tp = {tp}, {m.name} has {over(inner, tp)} a rank"
    return ""


def vocabulary_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """More ranks than rows of the vocabulary."""
    tp = plan.layout.tp
    return f"layout.tp = {tp}, {spec.vocab_size} rows of the vocabulary" if spec and tp > spec.vocab_size else ""


def context_met(plan: Plan) -> str:
    """A sequence that cannot be cut into two slices for each context-parallel rank."""
    cp, length = plan.layout.cp, plan.workload.sequence_length
    if cp == 1 or length % (2 * cp) == 0:
        return ""
    return f"layout.cp = {cp}, {over(length, 2 * cp)} tokens a slice"


def sequence_cut_met(plan: Plan) -> str:
    """A sequence that sequence parallelism cannot cut."""
    layout, length = plan.layout, plan.workload.sequence_length
    if layout.tp == 1 or not layout.sequence_parallel or length % (layout.tp * layout.cp) == 0:
        return ""
    return f"layout.tp = {layout.tp} x cp {layout.cp}, {over(length, layout.tp * layout.cp)} tokens a rank"


def experts_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Experts that do not come out even over ep, or that are not there."""
    ep = plan.layout.ep
    if ep == 1 or spec is None:
        return ""
    count = num_experts(spec)
    if not count:
        return f"layout.ep = {ep}, and {spec.name} has no experts"
    return f"layout.ep = {ep}, {over(count, ep)} experts a rank" if count % ep else ""


def expert_ranks_met(plan: Plan) -> str:
    """An expert axis that does not divide the data axes it lies over."""
    ep, ranks = plan.layout.ep, data_ranks(plan)
    return f"layout.ep = {ep} over {ranks} data-parallel ranks, {over(ranks, ep)}" if ranks % ep else ""


def pipeline_none_met(plan: Plan) -> str:
    """A schedule without a pipeline, or a pipeline without one."""
    pipe, pp = plan.pipeline, plan.layout.pp
    if (pipe.schedule == "none") == (pp == 1):
        lists = pipe.layers_per_stage or pipe.micro_batch_per_stage
        return "pipeline lists stages with layout.pp = 1" if pp == 1 and lists else ""
    return f"pipeline.schedule = {pipe.schedule!r} with layout.pp = {pp}"


def chunks_met(plan: Plan) -> str:
    """A number of stages on a rank that the schedule does not have."""
    low, high = CHUNKS[plan.pipeline.schedule]
    fits = low <= plan.pipeline.chunks <= high
    return "" if fits else f"pipeline.chunks = {plan.pipeline.chunks} with schedule {plan.pipeline.schedule}"


def num_stages(plan: Plan) -> int:
    """Stages of the whole pipeline, all chunks of all ranks."""
    return plan.layout.pp * plan.pipeline.chunks


def stages_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """More stages than blocks."""
    stages = num_stages(plan)
    if spec is None or stages <= spec.num_blocks:
        return ""
    return f"layout.pp = {plan.layout.pp} x chunks {plan.pipeline.chunks} = {stages} stages for {spec.num_blocks} blocks"


def even_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """Blocks that do not come out even over the stages, where nobody says how they lie."""
    stages = num_stages(plan)
    if spec is None or plan.pipeline.layers_per_stage or plan.layout.pp == 1 or stages > spec.num_blocks:
        return ""
    if spec.num_blocks % stages == 0:
        return ""
    return f"{spec.num_blocks} layers on {stages} stages, {over(spec.num_blocks, stages)} a stage"


def layers_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """A list of blocks by stage that is too short, too long, negative, or does not hold all blocks."""
    layers, stages = plan.pipeline.layers_per_stage, num_stages(plan)
    if not layers or plan.layout.pp == 1:
        return ""
    if len(layers) != stages or min(layers) < 0:
        return f"pipeline.layers_per_stage has {len(layers)} entries from {min(layers)} up, for {stages} stages"
    if spec and sum(layers) != spec.num_blocks:
        return f"pipeline.layers_per_stage adds up to {sum(layers)}, and {spec.name} has {spec.num_blocks} blocks"
    return ""


def rounds_met(plan: Plan) -> str:
    """Micro-batches that do not come in groups of pp, which interleaving deals out in turn."""
    pp, count = plan.layout.pp, plan.batch.accumulation
    if plan.pipeline.schedule != "interleaved" or pp == 1 or count % pp == 0:
        return ""
    return f"{count} micro-batches in turns of {pp}, {over(count, pp)}"


def stage_batches_met(plan: Plan) -> str:
    """Micro-batches by stage that are too few, too many, or do not fit into each other."""
    sizes, stages = plan.pipeline.micro_batch_per_stage, num_stages(plan)
    if not sizes or plan.layout.pp == 1:
        return ""
    if len(sizes) != stages or min(sizes) < 1:
        return f"pipeline.micro_batch_per_stage has {len(sizes)} entries from {min(sizes)} up, for {stages} stages"
    for one, other in pairwise(sizes):
        if max(one, other) % min(one, other):
            return f"pipeline.micro_batch_per_stage has {one} beside {other}"
    return ""


def shares_met(plan: Plan) -> str:
    """Shares of the optimizer's states that are no shares."""
    cpu, disk = plan.optimizer.cpu_share, plan.optimizer.nvme_share
    if 0 <= cpu <= 1 and 0 <= disk <= 1 and cpu + disk <= 1 + 1e-9:
        return ""
    return f"optimizer.cpu_share = {cpu}, nvme_share = {disk}"


def fp8_met(plan: Plan, spec: ModelSpec | None, cluster: Cluster | None) -> str:
    """fp8 on a device that is known to have none."""
    if plan.precision.fp8 == "off" or not cluster or not cluster.device.peak_flops or "fp8" in cluster.device.peak_flops:
        return ""
    return f"precision.fp8 = {plan.precision.fp8!r} on {cluster.device.kind}"
