"""Times of the parts of a model for one micro-batch on one rank: what the terms are put together from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import asdict, replace

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.files import Value
from fullstride.model.saved import cost_of
from fullstride.model.spec import Attention, Matmul, ModelSpec, Sublayer
from fullstride.plan.adapted import adapted
from fullstride.plan.cost import inside
from fullstride.plan.estimate import Confidence
from fullstride.plan.facts import BYTES, Part, compute_bytes, experts_cut, micro_tokens, once, parts
from fullstride.plan.plan import Plan

T = TypeVar("T")

BACKWARD_TRAFFIC = 2.0
"""Memory-bound operators read the gradient and their inputs and write a gradient: about twice forward's bytes."""
WIDE = ("embedding", "norm", "residual")
"""Sublayers that touch the residual stream, which is fp32 under autocast. In compiled blocks the casts of all others are part
of the operator that wrote, as if weights were narrow."""
FUSED = ("megatron", "deepspeed")
"""Carriers whose own blocks fuse memory-bound operators, compiled or not."""
ROW_PARALLEL = ("out", "down")
"""Products that tensor parallelism cuts along their inner size, by the end of the sublayer's name; others along the outer."""
REPLICATED = ("attn.q", "attn.kv_a", "router")
"""Products that every tensor-parallel rank has whole (latent attention's way down, the router), on its part of the tokens."""
SCORE_PASSES = {"fused_softmax": (5.0, 7.0), "unfused": (14.5, 15.5)}
"""Passes over the scores, forward and backward, where they stand whole: written by the first product; softmax reads and
writes (the fused one reads only the half that a causal mask leaves); dropout reads, writes, and its mask; read by the second;
unfused adds scale, mask and widening. Of the fused ones about one forward and one and a half backward find what the kernel
before left in the cache (assumed)."""
EXPERT_LAUNCHES = 8
"""Kernels that quantise one local expert's rows and weights, forward: grouped products do not take them together; assumed."""
QUANTISED_BYTES = {"tensorwise": 4.0, "rowwise": 4.5, "delayed": 4.0, "blockwise": 5.0, "mxfp8": 5.0, "nvfp4": 5.0}
"""Bytes moved to quantise an element of a product's input: read 2, written narrow, straight and transposed, and scales."""


class Piece(Value, frozen=True, kw_only=True):
    """One part of the model (one block of a stack) under one plan, one micro-batch, in seconds."""

    products_forward: float
    products_backward: float
    attention_forward: float
    attention_backward: float
    bound_forward: float
    bound_backward: float
    operators: float
    """Kernels launched in forward."""
    confidence: Confidence
    source: str
    tensor: inside.Moved = inside.NOTHING
    """Communication of tensor parallelism."""
    context: inside.Moved = inside.NOTHING
    experts: inside.Moved = inside.NOTHING

    @property
    def forward(self) -> float:
        """All of forward, with the communication that shows."""
        shown = self.tensor.forward_exposed + self.context.forward_exposed + self.experts.forward_exposed
        return self.products_forward + self.attention_forward + self.bound_forward + shown

    @property
    def backward(self) -> float:
        """All of backward, nothing made again."""
        shown = self.tensor.backward_exposed + self.context.backward_exposed + self.experts.backward_exposed
        return self.products_backward + self.attention_backward + self.bound_backward + shown

    def times(self, factor: float) -> Piece:
        """So many of them."""
        if factor == 1.0:
            return self
        scaled: dict[str, Any] = {
            name: inside.Moved(*(factor * each for each in value)) if isinstance(value, tuple) else factor * value
            for name, value in asdict(self).items()
            if not isinstance(value, str)
        }
        return replace(self, **scaled)


def once_for(spec: ModelSpec, cluster: Cluster, key: Any, make: Callable[[], T]) -> T:
    """`make()`, remembered for this pair."""
    table = _table(spec, cluster)
    if key not in table:
        table[key] = make()
    return table[key]  # type: ignore[no-any-return]


def _table(spec: ModelSpec, cluster: Cluster) -> dict[Any, Any]:
    def make() -> tuple[Cluster, dict[Any, Any]]:
        return cluster, {}  # holds the cluster, so that its identity stays its own

    return once(spec, ("with", id(cluster)), make)[1]


def thread_factor(plan: Plan, cluster: Cluster) -> float:
    """On a CPU host, how much longer than measured: figures are for a rank's whole share of the cores.

    torchrun gives each of several ranks one thread unless the plan says otherwise.
    """
    if cluster.device.kind != "cpu":
        return 1.0
    ranks = plan.layout.world_size
    share = max(1, cluster.host.num_cores // max(1, min(ranks, cluster.num_devices)))
    measured = max(1, cluster.host.num_cores // max(1, cluster.groups[0].num_devices))
    threads = plan.threads.compute or (1 if ranks > 1 else share)
    return measured / min(threads, share)


def local_tokens(plan: Plan) -> float:
    """Tokens of one micro-batch on one rank: context parallelism gives each a part of the sequence."""
    return micro_tokens(plan) / plan.layout.cp


def pieces(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[tuple[Part, Piece], ...]:
    """Each part of the model with its times."""
    layout, p = plan.layout, plan.precision
    shape = (plan.batch.micro_batch, plan.workload.sequence_length, p.block, p.head, p.cast, p.fp8, _rows_of_head(plan))
    cut = (layout.tp, layout.cp, layout.ep, layout.sequence_parallel, plan.overlap.tensor, plan.overlap.experts)
    how = (plan.compile.mode, plan.shard.carrier in FUSED, plan.kernels.attention, plan.adapter)
    exchanged = (plan.recompute.mode, plan.shard.carrier, p.master, p.loss) if layout.tp > 1 else ()
    many = plan.batch.accumulation if p.fp8 != "off" else 1
    factor = thread_factor(plan, cluster)
    key = ("pieces", shape, cut, exchanged, how, many, factor)
    return once_for(spec, cluster, key, lambda: tuple((part, _piece(part, plan, cluster, factor)) for part in parts(spec)))


def _rows_of_head(plan: Plan) -> float:
    """Rows of one product of the head: a chunk's, or all."""
    tokens = local_tokens(plan)
    return min(plan.loss.chunk_tokens, tokens) if plan.loss.kind == "chunked" else tokens


def _piece(part: Part, plan: Plan, cluster: Cluster, factor: float) -> Piece:
    dtype = plan.precision.head if part.group == "head" else plan.precision.block
    there = back_there = attended = attended_back = 0.0
    moved, back = 0.0, 0.0
    trust: Confidence = "modelled"
    operators, sources = 0, set()
    for sublayer in part.sublayers:
        for m in sublayer.matmuls:
            work = _product(part, sublayer, m, plan, cluster, dtype)
            there, back_there = there + work.forward, back_there + work.backward
            moved, back = moved + work.quantised_forward, back + work.quantised_backward
            trust = "assumed" if work.rate.confidence == "assumed" else trust
            sources.add(work.rate.source)
        if sublayer.attention is not None:
            seconds = _attention(sublayer.attention, plan, cluster, dtype)
            attended, attended_back = attended + seconds[0], attended_back + seconds[1]
            operators += 0 if plan.kernels.attention == "sdpa" else 8
        if sublayer.kind == "experts" and plan.precision.fp8 != "off":
            operators += round(EXPERT_LAUNCHES * max(m.groups for m in sublayer.matmuls) / plan.layout.ep)
        if sublayer.kind != "loss":
            traffic, launched = _traffic(sublayer, plan)
            moved, back = moved + traffic, back + BACKWARD_TRAFFIC * traffic
            operators += launched
    reached = 1.0 if cluster.device.kind == "cpu" else cluster.reached.traffic
    return Piece(
        products_forward=there * factor,
        products_backward=back_there * factor,
        attention_forward=attended * factor,
        attention_backward=attended_back * factor,
        bound_forward=rates.copy_seconds(cluster, moved * reached).seconds,
        bound_backward=rates.copy_seconds(cluster, back * reached).seconds,
        operators=operators,
        confidence=trust,
        source=", ".join(sorted(sources)),
        tensor=inside.tensor(part, plan, cluster),
        context=inside.context(part, plan, cluster, attended, attended_back),
        experts=inside.experts(part, plan, cluster),
    )


class _Product(NamedTuple):
    forward: float
    backward: float
    quantised_forward: float
    """Bytes moved to quantise inputs (and weights, once a step)."""
    quantised_backward: float
    rate: rates.Rate


def local_shape(sublayer: Sublayer, m: Matmul, plan: Plan, tokens: float) -> tuple[float, int, int, int]:
    """(rows, n, k, how many) of a product on one rank under tensor and expert parallelism."""
    tp, ep = plan.layout.tp, plan.layout.ep
    if m.groups > 1:  # experts lie whole on their ranks; sequence parallelism has split the tokens
        groups = max(1, m.groups // ep)
        return tokens * m.rows_per_token / tp / groups, m.n, m.k, groups
    rows = tokens * m.rows_per_token
    if tp == 1:
        return rows, m.n, m.k, 1
    if sublayer.name in REPLICATED:
        return rows / (tp if plan.layout.sequence_parallel else 1), m.n, m.k, 1
    if sublayer.name.rsplit(".", 1)[-1] in ROW_PARALLEL:
        return rows, m.n, -(-m.k // tp), 1
    return rows, -(-m.n // tp), m.k, 1


def _product(part: Part, sublayer: Sublayer, m: Matmul, plan: Plan, cluster: Cluster, dtype: Any) -> _Product:
    tokens = local_tokens(plan)
    rows = _rows_of_head(plan) if part.group == "head" else tokens
    each, n, k, groups = local_shape(sublayer, m, plan, rows)
    times, fp8 = groups * tokens / rows, plan.precision.fp8
    narrow = part.group == "blocks" and fp8 != "off" and sublayer.kind != "router"
    if narrow:
        wanted = "fp4" if fp8 == "nvfp4" else "fp8"
        narrow = wanted in cluster.device.peak_flops
        dtype = wanted if narrow else dtype
    there, back, rate = _three(cluster, dtype, round(each), n, k)
    if plan.adapter.rank:  # frozen weights have no gradient; an adapter's two thin products come on top
        back = rates.matmul_seconds(cluster, dtype, max(1, round(each)), k, n).seconds
        extra = 2.0 * plan.adapter.rank * (n + k) / (n * k) if m in adapted(plan, sublayer) else 0.0
        there, back = there * (1 + extra), back * (1 + 2 * extra)
    forward = backward = 0.0
    if narrow:
        width = QUANTISED_BYTES[fp8]
        weights = groups * n * k * width / plan.batch.accumulation
        forward, backward = width * each * k * groups + weights, width * each * n * groups
    return _Product(there * times, back * times, forward, backward, rate)


def _three(cluster: Cluster, dtype: Any, rows: int, n: int, k: int) -> tuple[float, float, rates.Rate]:
    """Forward, backward (input's and weight's gradient) of one product, and where forward's time comes from."""

    def make() -> tuple[float, float, rates.Rate]:
        aligned = n % 8 == 0 and k % 8 == 0  # the rows of weight and results, which all three read
        there = rates.matmul_seconds(cluster, dtype, max(1, rows), n, k, aligned=aligned)
        inputs = rates.matmul_seconds(cluster, dtype, max(1, rows), k, n, aligned=aligned)
        weight = rates.matmul_seconds(cluster, dtype, n, k, max(1, rows), aligned=aligned)
        return there.seconds, inputs.seconds + weight.seconds, there

    return once(cluster, ("product", dtype, rows, n, k), make)


def _attention(core: Attention, plan: Plan, cluster: Cluster, dtype: Any) -> tuple[float, float]:
    """Seconds forward and backward on one rank: heads over tensor ranks, queries over context ranks."""
    length, layout = plan.workload.sequence_length, plan.layout
    heads, kv_heads = max(1, core.num_heads // layout.tp), max(1, core.num_kv_heads // layout.tp)
    if plan.kernels.attention != "sdpa":
        return _scored(core, heads, plan, cluster, dtype)
    size = (core.head_dim + core.value_dim) // 2
    there, back = rates.attention_seconds(cluster, dtype, plan.batch.micro_batch, heads, kv_heads, size, length, core.causal)
    share = (min(core.window, length) if core.window else length) / length / layout.cp
    share *= 2.0 - share * layout.cp if core.window and core.causal else 1.0  # a window has no triangle left to save
    return there.seconds * share, back.seconds * share


def _scored(core: Attention, heads: int, plan: Plan, cluster: Cluster, dtype: Any) -> tuple[float, float]:
    """Attention whose scores stand whole: two batched products, and passes over the scores; a causal mask saves nothing."""
    length, count = plan.workload.sequence_length, plan.batch.micro_batch * heads
    rows = max(1, length // plan.layout.cp)
    scores = rates.matmul_seconds(cluster, dtype, rows * count, length, core.head_dim).seconds
    values = rates.matmul_seconds(cluster, dtype, rows * count, core.value_dim, length).seconds
    passes = SCORE_PASSES[plan.kernels.attention]
    one = rates.copy_seconds(cluster, float(count) * rows * length * BYTES[plan.precision.block]).seconds
    return scores + values + passes[0] * one, 2 * (scores + values) + passes[1] * one


def _traffic(sublayer: Sublayer, plan: Plan) -> tuple[float, int]:
    """Bytes that memory-bound operators of one forward move on one rank, and kernels launched."""
    fused, cast = plan.compile.mode == "block" or plan.shard.carrier in FUSED, plan.precision.cast
    if fused and cast == "autocast" and sublayer.kind not in WIDE:
        cast = "weights"
    cost = cost_of(sublayer, cast)
    elements = cost.fused_elements if fused else cost.moved_elements
    elements += cost.moved_pair_elements * plan.workload.sequence_length
    share = 1.0
    if plan.layout.tp > 1:
        cut = sublayer.kind in ("activation", "rotary", "attention", "linear", "head", "experts")
        share = 1.0 / plan.layout.tp if cut or plan.layout.sequence_parallel else 1.0
    operators = cost.fused_operators if fused else cost.operators
    return elements * share * compute_bytes(plan) * local_tokens(plan), operators


def gradient_traffic(plan: Plan, spec: ModelSpec) -> float:
    """Bytes that casts of weights and sums of gradients move in one step, whatever the number of tokens, on one rank."""
    size, micro = compute_bytes(plan), plan.batch.accumulation
    dense = sum(p.count * (p.matmul_weights - inside.expert_weights(p)) for p in parts(spec))
    sparse = sum(p.count * inside.expert_weights(p) for p in parts(spec))
    weights = (dense / plan.layout.tp + sparse / experts_cut(plan, plan.layout.ep)) / plan.layout.pp
    if plan.adapter.rank:  # frozen: no gradients; autocast narrows them in each forward
        return weights * (4 + size) * micro if plan.precision.cast == "autocast" else 0.0
    total = 0.0
    if plan.precision.cast == "autocast":  # forward narrows each weight, backward widens its gradient
        total += 2 * weights * (4 + size) * micro
    if plan.shard.carrier in FUSED:  # the weight gradient's product adds to the main gradient itself
        return total + weights * 2 * BYTES[plan.precision.gradient] * micro
    if micro > 1:  # read the new gradient and the sum, write the sum
        total += weights * (size + 8 if plan.precision.cast == "weights" else 12) * (micro - 1)
    return total
