"""One pipeline rank's view of a plan: its parts of the model, cut as the layout cuts them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from fullstride.model.saved import dtype_bytes, is_kept
from fullstride.model.spec import ModelSpec, Saved, Stack, Sublayer
from fullstride.plan.adapted import adapted
from fullstride.plan.facts import (
    OTHER_CARRIERS,
    Part,
    compute_bytes,
    experts_cut,
    fixed_bytes,
    micro_tokens,
    once,
    parts,
    product_bytes,
    shards,
    weight_bytes,
)
from fullstride.plan.ledger.alive import alive, micro_batch_of
from fullstride.plan.ledger.cuts import kept_share, last_name, local_elements
from fullstride.plan.plan import Plan
from fullstride.plan.stages import stages_of

AGAIN = re.compile(r"\.compute\.\d+$")
"""Names of second and further narrow copies of one tensor."""
WHOLE_INPUTS = (
    *("attn.q", "attn.q_norm", "attn.q_b", "attn.kv_a", "attn.kv_norm", "attn.kv_b"),
    *("shared.gate_up", "shared.up", "shared.join"),
)
"""Sublayers inside a region that read what is not cut."""
WHOLE_ROWS = ("rows", "order", "rows_sorted", "down_proj", "shares_sorted", "inverse")
"""What experts keep of each row whose width is not cut."""
NOTHING = Part(
    group="head", path="", first=0, count=0, parameters=0, trainable=0, tensors=0, largest=0, matmul_weights=0, sublayers=()
)
"""An end of the model that lies on another rank."""


@dataclass(frozen=True)
class Local:
    """What the ledger's rows are made from; without pipeline and cuts its parts are the whole model's."""

    plan: Plan
    spec: ModelSpec
    rank: int
    """Pipeline rank."""
    parts: tuple[Part, ...]
    """In the order of execution; an end that is elsewhere is missing."""

    @cached_property
    def embedding(self) -> Part:
        """The part with the embedding; empty where it is elsewhere."""
        return next((part for part in self.parts if part.group == "embedding"), replace(NOTHING, group="embedding"))

    @cached_property
    def head(self) -> Part:
        """The part with final norm and head; empty where it is elsewhere."""
        return next((part for part in self.parts if part.group == "head"), NOTHING)

    @cached_property
    def blocks(self) -> tuple[Part, ...]:
        """The runs of equal blocks."""
        return tuple(part for part in self.parts if part.group == "blocks")

    @cached_property
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(part.count * part.parameters for part in self.parts)

    @cached_property
    def trainable(self) -> int:
        """Elements that the optimizer steps."""
        return sum(part.count * part.trainable for part in self.parts)

    @cached_property
    def experts(self) -> int:
        """Elements of experts among them."""
        return sum(part.count * part.experts for part in self.parts)

    @cached_property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter."""
        return max((part.largest for part in self.parts), default=0)

    @cached_property
    def largest_block(self) -> int:
        """Bytes of the largest block's weights as they are computed with."""
        return max((part.parameters * weight_bytes(self.plan, part) for part in self.blocks), default=0)

    @cached_property
    def shards(self) -> int:
        """Ranks that share the states of what is not an expert."""
        layout, carrier = self.plan.layout, self.plan.shard.carrier
        if carrier in ("megatron", "deepspeed"):
            return layout.dp_shard * layout.cp if self.plan.shard.stage else 1
        return shards(self.plan) * (layout.cp if carrier == "fsdp2" else 1)

    @cached_property
    def expert_shards(self) -> float:
        """Ranks that share the states of an expert: ranks of a stage over those that the experts are spread over."""
        layout = self.plan.layout
        if self.shards == 1:
            return 1
        return max(1.0, self.shards * layout.tp / experts_cut(self.plan, layout.ep * layout.expert_tp))

    def over_shards(self, total: float, experts: float) -> float:
        """What of `total` elements (of which `experts` are experts') lies on one rank of those that share states."""
        if self.expert_shards == self.shards or not experts:
            return total / self.shards
        return (total - experts) / self.shards + experts / self.expert_shards

    def fullest_share(self, *, trainable: bool = False) -> float:
        """Elements of all (or trainable) parameters on the rank that has most: FSDP2 deals out whole rows of each tensor, the
        first ranks taking one more (torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
        """
        plan, total = self.plan, self.trainable if trainable else self.count
        even = self.expert_shards == self.shards or not self.experts
        if plan.shard.carrier != "fsdp2" or plan.layout.tp > 1 or not even:
            return self.over_shards(total, self.experts)
        pipe = plan.pipeline
        place = (plan.layout.pp, pipe.schedule, pipe.chunks, pipe.layers_per_stage, self.rank, plan.adapter)
        key = ("rows", self.shards, trainable, place)
        return once(self.spec, key, lambda: sum(p.count * self.whole_rows(p, trainable) for p in self.parts))

    def whole_rows(self, part: Part, trainable: bool) -> int:
        """Elements of one of a part's blocks on the rank that holds most, by whole rows; with adapters: of these alone if
        trainable, else of what is frozen.
        """
        low, total = self.plan.adapter.rank, 0
        shapes: list[tuple[int, ...]]
        if low and trainable:
            products = [m for s in part.sublayers for m in adapted(self.plan, s)]
            shapes = [shape for m in products for shape in ((low, m.k), (m.n, low))]
        else:
            shapes = [p.shape for s in part.sublayers for p in s.parameters if low or p.trainable or not trainable]
        for shape in shapes:
            rows = shape[0] if shape else 1
            total += ceil(rows / self.shards) * (prod(shape) // rows)
        return total

    @cached_property
    def micro_tokens(self) -> float:
        """Tokens of one micro-batch on this rank."""
        return micro_batch_of(self.plan, self.rank) * self.plan.workload.sequence_length / self.plan.layout.cp

    @cached_property
    def stream_tokens(self) -> float:
        """Tokens of a micro-batch that this rank holds of the residual stream."""
        layout = self.plan.layout
        return self.micro_tokens / layout.tp if layout.sequence_parallel else self.micro_tokens

    @property
    def is_cut(self) -> bool:
        """Whether kept tensors are cut at all."""
        layout = self.plan.layout
        return layout.tp > 1 or layout.cp > 1

    def kept(self, sublayer: Sublayer) -> float:
        """Bytes that a sublayer keeps for backward of one micro-batch when nothing is made again."""
        plan = self.plan
        fused = plan.shard.carrier == "megatron"  # its kernels are fused by hand, as a compiler would
        plain = not self.is_cut and not fused and not plan.adapter.rank and not plan.pipeline.micro_batch_per_stage
        if plain and plan.kernels.attention == "sdpa":
            return fixed_bytes(sublayer, plan)
        low = len(adapted(plan, sublayer))
        if plan.adapter.rank and sublayer.kind in ("linear", "head") and not low:
            return 0.0  # a frozen product does not need its input
        compiled = fused or plan.compile.mode == "block"
        length, size, total = plan.workload.sequence_length, compute_bytes(plan), 0.0
        tokens = self.micro_tokens * plan.layout.cp
        times = {"token": tokens, "position": length, "pair": tokens * length}
        for item in sublayer.saved:
            if not is_kept(item, plan.precision.cast, compiled=compiled) or length <= item.beyond:
                continue
            if plan.adapter.rank and not for_frozen(item, sublayer, low):
                continue
            share = kept_share(item, sublayer, plan.layout)
            if not fused and plan.layout.tp > 1:
                share = self.own_share(item, sublayer, share)
            total += item.elements * times[item.per] * dtype_bytes(item.dtype, plan.precision.cast, size) * share
        return total + self.scores(sublayer) + self.low_rank(sublayer)

    def own_share(self, item: Saved, sublayer: Sublayer, share: float) -> float:
        """What the engine's own tensor parallelism keeps otherwise than Megatron's: products of one input share its narrow
        copy, and the head keeps its input whole (`engine/parallel/tensor_ops.py`, `tensor.py`).
        """
        if sublayer.kind == "linear" and AGAIN.search(item.name):
            return 0.0
        if self.plan.layout.ep == 1 and _whole_in_region(item, sublayer):
            return 1.0 / self.plan.layout.cp
        return 1.0 / self.plan.layout.cp if sublayer.kind == "head" else share

    def scores(self, sublayer: Sublayer) -> float:
        """Bytes of attention's probabilities where they stand whole: after softmax (in fp32 without a fused kernel), and with
        dropout a mask and a second copy.
        """
        core = sublayer.attention
        if core is None or self.plan.kernels.attention == "sdpa":
            return 0.0
        size = compute_bytes(self.plan)
        softmax = size if self.plan.kernels.attention == "fused_softmax" else max(4, size)
        each = softmax + (1 + size if self.drops else 0)
        length = self.plan.workload.sequence_length
        return core.num_heads / self.plan.layout.tp * self.micro_tokens * length * each

    def core(self, sublayer: Sublayer) -> float:
        """Bytes of attention's own results, which selective recomputation makes again from q, k and v."""
        core = sublayer.attention
        if core is None:
            return 0.0
        if self.plan.kernels.attention != "sdpa":
            return self.scores(sublayer)
        size = core.num_heads * (core.value_dim * compute_bytes(self.plan) + 4)
        return size * self.micro_tokens / self.plan.layout.tp

    @cached_property
    def drops(self) -> bool:
        """Whether blocks keep dropout masks; then attention drops too."""
        return any(
            item.dtype == "bool" for part in self.blocks for s in part.sublayers if s.kind == "residual" for item in s.saved
        )

    def low_rank(self, sublayer: Sublayer) -> float:
        """Bytes of what adapters keep between their two products."""
        return len(adapted(self.plan, sublayer)) * self.plan.adapter.rank * self.micro_tokens * compute_bytes(self.plan)

    def kept_products(self, part: Part) -> list[float]:
        """Bytes of the outputs of matrix products and attention that `norm_activation` keeps, sublayer by sublayer.

        Compiled blocks do not keep what closes a block: backward does not need it.
        """
        before, found = 0, []
        for sublayer in part.sublayers:
            found.append(self.products(sublayer, before))
            before += len(sublayer.matmuls)
        last = max((index for index, s in enumerate(part.sublayers) if s.matmuls), default=0)
        if self.plan.layout.tp > 1 and self.plan.shard.carrier not in OTHER_CARRIERS and part.experts:
            found[last] += self.stream_tokens * self.spec.hidden_size * compute_bytes(self.plan)  # the experts' sum over ranks
        if self.plan.compile.mode == "block" and found:
            found[last] = 0.0
        return found

    def products(self, sublayer: Sublayer, before: int = 0) -> float:
        """Bytes of the outputs of matrix products and attention; `before` products precede it in its block."""
        layout = self.plan.layout
        if not self.is_cut and not self.plan.pipeline.micro_batch_per_stage:
            return product_bytes(sublayer, self.plan, before)
        whole = product_bytes(sublayer, self.plan, before) * self.micro_tokens / micro_tokens(self.plan)
        if sublayer.kind == "experts" and layout.ep == 1 and self.plan.shard.carrier not in OTHER_CARRIERS:
            down = sublayer.matmuls[-1]  # each rank makes a term of all rows
            term = down.n * down.rows_per_token * self.micro_tokens * compute_bytes(self.plan)
            return (whole - term) / layout.tp + term
        if sublayer.name in ("attn.q", "attn.kv_a") and self.plan.shard.carrier not in OTHER_CARRIERS:
            return whole
        row = sublayer.kind == "linear" and last_name(sublayer) in ("out", "down")
        closes = self.plan.shard.carrier == "megatron" or not sublayer.name.startswith("shared.")
        summed = layout.sequence_parallel and closes  # the sum over the ranks is kept in its place, cut along the sequence
        return whole if row and not summed else whole / layout.tp


def _whole_in_region(item: Saved, sublayer: Sublayer) -> bool:
    """Whether every rank has it whole: what routing, and the columns of shared experts, read inside a region of experts, rows
    sorted by expert, and terms; and all up to the expansion of latents, which every rank makes.
    """
    if sublayer.kind == "experts":
        return item.name in WHOLE_ROWS
    return sublayer.kind == "router" or sublayer.name in WHOLE_INPUTS


def for_frozen(item: Saved, sublayer: Sublayer, num_adapted: int) -> bool:
    """Whether a tensor is kept although weights are frozen: not what a norm's gain needs, nor a narrow copy of the input for
    each product, but for each that has an adapter.
    """
    if sublayer.kind == "norm":
        return not item.name.startswith("normed")
    again = AGAIN.search(item.name)
    return sublayer.kind != "linear" or again is None or int(again[0].rpartition(".")[2]) < num_adapted


def local_of(plan: Plan, spec: ModelSpec, rank: int = 0) -> Local:
    """The view of one pipeline rank."""
    layout, pipe = plan.layout, plan.pipeline
    uncut = layout.pp == layout.tp == layout.ep == layout.expert_tp == 1
    if uncut and not plan.adapter.rank and plan.shard.carrier != "megatron":
        return Local(plan=plan, spec=spec, rank=rank, parts=parts(spec))
    own = plan.batch.micro_batch if pipe.micro_batch_per_stage else 0
    key = (layout, pipe, plan.batch.accumulation, own, plan.adapter, plan.shard.carrier == "megatron", rank)
    made = once(spec, ("local", key), lambda: _local_parts(plan, spec, rank))
    return Local(plan=plan, spec=spec, rank=rank, parts=made)


def _local_parts(plan: Plan, spec: ModelSpec, rank: int) -> tuple[Part, ...]:
    found, standing = [], alive(plan, rank)
    for stage in stages_of(plan, spec):
        if stage.rank != rank:
            continue
        count = standing[stage.chunk]
        if stage.has_embedding:
            found.append(_part(plan, spec, "embedding", None, 1, spec.embedding, count))
        for stack, blocks in stage.stacks:
            found.append(_part(plan, spec, "blocks", stack, blocks, stack.sublayers, count))
        if stage.has_head:
            tail = _part(plan, spec, "head", None, 1, spec.tail, 1.0)
            if (spec.tied_embeddings or _looks_ahead(spec)) and plan.layout.pp > 1:
                tail = _with_tied(tail, _part(plan, spec, "embedding", None, 1, _table(spec), 1.0))
            found.append(tail)
    return tuple(found)


def _looks_ahead(spec: ModelSpec) -> bool:
    """Whether the tail predicts further tokens, which takes the embedding of those before them."""
    return any(sublayer.name.startswith("mtp") for sublayer in spec.tail)


def _table(spec: ModelSpec) -> tuple[Sublayer, ...]:
    """The sublayers that hold the token table, which a tied head needs a copy of."""
    return tuple(s for s in spec.embedding if any(p.shape[0] == spec.vocab_size for p in s.parameters))


def _with_tied(tail: Part, table: Part) -> Part:
    return replace(
        tail,
        parameters=tail.parameters + table.parameters,
        trainable=tail.trainable + table.trainable,
        tensors=tail.tensors + table.tensors,
        largest=max(tail.largest, table.largest),
    )


def _part(
    plan: Plan, spec: ModelSpec, group: str, stack: Stack | None, count: int, sublayers: tuple[Sublayer, ...], standing: float
) -> Part:
    frozen, low = plan.adapter.rank > 0, 0
    total = trainable = experts = largest = tensors = weights = 0
    for sublayer in sublayers:
        here = [(p, local_elements(p, sublayer, plan, spec.vocab_size)) for p in sublayer.parameters]
        for parameter, size in here:
            total, tensors, largest = total + size, tensors + 1, max(largest, size)
            if parameter.trainable and not frozen:
                trainable += size
                experts += size if parameter.role == "expert" else 0
        whole = sum(p.count for p in sublayer.parameters)
        share = sum(size for _, size in here) / whole if whole else 1.0 / plan.layout.tp
        weights += round(sum(m.n * m.k * m.groups for m in sublayer.matmuls) * share)
        products = adapted(plan, sublayer)
        low += sum(_adapter(plan, m.n, m.k) for m in products)
        tensors += 2 * len(products)
    return Part(
        group=group,
        path=stack.path if stack else "",
        first=stack.first if stack else 0,
        count=count,
        parameters=total + low,
        trainable=trainable + low,
        tensors=tensors,
        largest=largest,
        matmul_weights=weights,
        sublayers=sublayers,
        experts=experts,
        adapters=low,
        alive=standing,
    )


def _adapter(plan: Plan, n: int, k: int) -> int:
    """Elements of the pair A [rank, k] and B [n, rank]; tensor parallelism cuts the side that the product cuts."""
    return plan.adapter.rank * (k + -(-n // plan.layout.tp))
