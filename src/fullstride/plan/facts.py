"""What pricing needs to know again and again: sizes that follow from a Plan, and sums over a ModelSpec, made once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fullstride.cluster.cluster import Cluster
from fullstride.model.saved import cost_of, saved_bytes
from fullstride.model.spec import ModelSpec, Sublayer
from fullstride.plan.plan import DType, Plan

BYTES: dict[DType, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
T = TypeVar("T")

_MEMO: OrderedDict[int, tuple[Any, dict[Any, Any]]] = OrderedDict()
_MEMO_SIZE = 16


def once(owner: object, key: Any, make: Callable[[], T]) -> T:
    """`make()`, remembered for this very object: pricing asks the same of one spec and one cluster thousands of times.

    The table holds the object, so that its identity stays its own; it forgets the objects not used longest.
    """
    entry = _MEMO.get(id(owner))
    if entry is None:
        entry = _MEMO[id(owner)] = (owner, {})
        if len(_MEMO) > _MEMO_SIZE:
            _MEMO.popitem(last=False)
    table = entry[1]
    if key not in table:
        table[key] = make()
    return table[key]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Part:
    """A group of parameters that is wrapped together: the embedding, one block of a stack, or the tail."""

    group: str
    """`embedding`, `blocks` or `head`."""
    path: str
    first: int
    count: int
    """How many equal ones."""
    parameters: int
    """Elements in one of them."""
    trainable: int
    tensors: int
    largest: int
    """Elements of its largest tensor."""
    matmul_weights: int
    """Elements that matrix products read: what autocast makes a copy of."""
    sublayers: tuple[Sublayer, ...]
    experts: int = 0
    """Elements of experts among the trainable parameters, which have a data-parallel degree of their own."""
    adapters: int = 0
    """Elements of low-rank adapters among the parameters."""
    alive: float = 1.0
    """Micro-batches whose activations stand here at the peak (pipelines)."""


def parts(spec: ModelSpec) -> tuple[Part, ...]:
    """The model in the order of execution."""
    return once(spec, "parts", lambda: _parts(spec))


def _parts(spec: ModelSpec) -> tuple[Part, ...]:
    stacks = [_part("blocks", stack.path, stack.first, stack.count, stack.sublayers) for stack in spec.stacks]
    return (_part("embedding", "", 0, 1, spec.embedding), *stacks, _part("head", "", 0, 1, spec.tail))


def _part(group: str, path: str, first: int, count: int, sublayers: tuple[Sublayer, ...]) -> Part:
    tensors = [p for s in sublayers for p in s.parameters]
    return Part(
        group=group,
        path=path,
        first=first,
        count=count,
        parameters=sum(p.count for p in tensors),
        trainable=sum(p.count for p in tensors if p.trainable),
        tensors=len(tensors),
        largest=max((p.count for p in tensors), default=0),
        matmul_weights=sum(m.n * m.k * m.groups for s in sublayers for m in s.matmuls),
        sublayers=sublayers,
    )


def num_parameters(spec: ModelSpec) -> int:
    """Elements in all parameters."""
    return once(spec, "parameters", lambda: sum(p.count * p.parameters for p in parts(spec)))


def num_trainable(spec: ModelSpec) -> int:
    """Elements that the optimizer steps."""
    return once(spec, "trainable", lambda: sum(p.count * p.trainable for p in parts(spec)))


def num_tensors(spec: ModelSpec) -> int:
    """Parameters as tensors."""
    return once(spec, "tensors", lambda: sum(p.count * p.tensors for p in parts(spec)))


def largest_block(plan: Plan, spec: ModelSpec) -> int:
    """Bytes of the largest block's weights as they are computed with."""
    return max((p.parameters * weight_bytes(plan, p) for p in parts(spec) if p.group == "blocks"), default=0)


def largest_tensor(spec: ModelSpec) -> int:
    """Elements of the largest parameter."""
    return max(part.largest for part in parts(spec))


def micro_tokens(plan: Plan) -> int:
    """Tokens of one micro-batch on one rank."""
    return plan.batch.micro_batch * plan.workload.sequence_length


def compute_bytes(plan: Plan) -> int:
    """Bytes of an element that matrix products take."""
    return BYTES[plan.precision.block]


def master_bytes(plan: Plan) -> int:
    """Bytes of an element of the master weights."""
    return BYTES[plan.precision.master]


OTHER_CARRIERS = ("megatron", "deepspeed")
"""Carriers of other frameworks."""


def steps_in_one_pass(plan: Plan, cluster: Cluster) -> bool:
    """Whether this engine's own kernel steps: it reads gradients and writes weights in whatever dtype they have."""
    fused = plan.optimizer.implementation == "fused" and plan.precision.master == "fp32"
    return fused and cluster.device.kind != "cpu" and plan.shard.carrier not in OTHER_CARRIERS


def experts_cut(plan: Plan, others: int) -> int:
    """Ranks over which experts' weights are spread: `others`, but for this engine without expert parallelism the
    tensor-parallel ranks, each of which has a part of every expert's width.
    """
    own = plan.layout.ep == 1 and plan.shard.carrier not in OTHER_CARRIERS
    return plan.layout.tp if own else others


def residual_bytes(plan: Plan) -> int:
    """Bytes of an element of the residual stream: the embedding's own dtype under autocast."""
    return BYTES[plan.precision.master] if plan.precision.cast == "autocast" else BYTES[plan.precision.block]


def weight_bytes(plan: Plan, part: Part) -> int:
    """Bytes of an element of a part's weights as it computes with them (gathered, under FSDP2)."""
    p = plan.precision
    return (
        BYTES[{"embedding": p.embedding, "blocks": p.block, "head": p.head}[part.group]]
        if p.cast == "weights"
        else BYTES[p.master]
    )


def whole_weights(plan: Plan, spec: ModelSpec) -> int:
    """Bytes of all weights as they are computed with, on one rank."""
    return sum(part.count * part.parameters * weight_bytes(plan, part) for part in parts(spec))


def shards(plan: Plan) -> int:
    """Ranks that share one copy of the optimizer's states."""
    return plan.layout.dp_shard if plan.shard.carrier in ("fsdp2", "flat") else 1


def resharded(plan: Plan, part: Part, index: int = 0) -> bool:
    """Whether this part's weights are freed between forward and backward (ZeRO-3); the most specific rule wins."""
    rules = plan.shard.reshard
    if plan.shard.stage != 3:
        return False
    return rules.get(plan.model.block(part.path, part.first + index), rules.get(part.group, True))


def num_resharded(plan: Plan, part: Part) -> int:
    """How many of a part's equal blocks are freed between forward and backward."""
    if plan.shard.stage != 3:
        return 0
    if plan.shard.reshard.keys() <= {"embedding", "blocks", "head"}:
        return part.count if resharded(plan, part) else 0
    return sum(resharded(plan, part, index) for index in range(part.count))


def fixed_bytes(sublayer: Sublayer, plan: Plan) -> float:
    """Bytes that a sublayer keeps for backward when nothing is recomputed, one micro-batch."""
    return saved_bytes(
        (sublayer,),
        cast=plan.precision.cast,
        compute_bytes=compute_bytes(plan),
        compiled=plan.compile.mode == "block",
        samples=plan.batch.micro_batch,
        sequence_length=plan.workload.sequence_length,
    )


def product_bytes(sublayer: Sublayer, plan: Plan, before: int = 0) -> float:
    """Bytes of the outputs of its matrix products and its attention: what selective recompute keeps.

    Args:
        sublayer: a step of a block.
        plan: says how large a micro-batch is, and what share of products is made again.
        before: products of the block before it.
    """
    tokens, size = micro_tokens(plan), compute_bytes(plan)
    again = plan.recompute.products
    kept = [m for index, m in enumerate(sublayer.matmuls, before) if not made_again(index, again)]
    outputs = sum(m.n * m.rows_per_token for m in kept) * size
    if (core := sublayer.attention) is not None:
        outputs += core.num_heads * (core.value_dim * size + 4)  # and the softmax's log-sum-exp, fp32
    return outputs * tokens


def made_again(index: int, share: float) -> bool:
    """Whether the product with this number in its block is one of the evenly spread share that is made again.

    With a half it is every second one, the first being kept (torchtitan's per-operator choice).
    """
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


@dataclass(frozen=True)
class Traffic:
    """What memory-bound operators of one forward of a sublayer cost, for each token."""

    bytes: float
    operators: int


def traffic(sublayer: Sublayer, plan: Plan) -> Traffic:
    """Bytes read and written for each token, and kernels launched, by this plan's cast and compilation."""
    compiled, cost = plan.compile.mode == "block", cost_of(sublayer, plan.precision.cast)
    moved = cost.fused_elements if compiled else cost.moved_elements
    moved += cost.moved_pair_elements * plan.workload.sequence_length
    operators = cost.fused_operators if compiled else cost.operators
    return Traffic(bytes=moved * compute_bytes(plan), operators=operators)
