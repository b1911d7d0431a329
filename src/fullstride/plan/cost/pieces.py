"""Times of the parts of a model for one micro-batch: what the terms are put together from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Confidence
from fullstride.plan.facts import Part, compute_bytes, micro_tokens, once, parts, traffic
from fullstride.plan.plan import Plan

T = TypeVar("T")

BACKWARD_TRAFFIC = 2.0
"""Memory-bound operators read the gradient and their inputs and write a gradient: about twice forward's bytes."""


@dataclass(frozen=True)
class Piece:
    """One part of the model (one block of a stack) under one plan, one micro-batch, in seconds."""

    products_forward: float
    products_backward: float
    attention_forward: float
    attention_backward: float
    bound_forward: float
    bound_backward: float
    operators: int
    """Kernels launched in forward."""
    confidence: Confidence
    source: str

    @property
    def forward(self) -> float:
        """All of forward."""
        return self.products_forward + self.attention_forward + self.bound_forward

    @property
    def backward(self) -> float:
        """All of backward, nothing made again."""
        return self.products_backward + self.attention_backward + self.bound_backward


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


def pieces(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[tuple[Part, Piece], ...]:
    """Each part of the model with its times."""
    shape = (plan.batch.micro_batch, plan.workload.sequence_length, plan.precision.block, plan.precision.head)
    factor = thread_factor(plan, cluster)
    key = ("pieces", shape, plan.precision.cast, plan.compile.mode, _rows_of_head(plan), factor)
    return once_for(spec, cluster, key, lambda: tuple((p, _piece(p, plan, cluster, factor)) for p in parts(spec)))


def _rows_of_head(plan: Plan) -> int:
    """Rows of one product of the head: a chunk's, or all."""
    return min(plan.loss.chunk_tokens, micro_tokens(plan)) if plan.loss.kind == "chunked" else micro_tokens(plan)


def _piece(part: Part, plan: Plan, cluster: Cluster, factor: float) -> Piece:
    dtype = plan.precision.head if part.group == "head" else plan.precision.block
    tokens = micro_tokens(plan)
    rows = _rows_of_head(plan) if part.group == "head" else tokens
    forward = backward = attention_forward = attention_backward = moved = 0.0
    trust: Confidence = "modelled"
    operators, sources = 0, set()
    for sublayer in part.sublayers:
        for m in sublayer.matmuls:
            there, back, rate = _product(cluster, dtype, round(rows * m.rows_per_token / m.groups), m.n, m.k)
            forward += there * m.groups * tokens / rows
            backward += back * m.groups * tokens / rows
            trust = "assumed" if rate.confidence == "assumed" else trust
            sources.add(rate.source)
        if (core := sublayer.attention) is not None:
            span = min(core.window, plan.workload.sequence_length) if core.window else plan.workload.sequence_length
            there_, back_ = rates.attention_seconds(
                cluster,
                dtype,
                plan.batch.micro_batch,
                core.num_heads,
                core.num_kv_heads,
                core.head_dim,
                plan.workload.sequence_length,
                core.causal,
            )
            share = span / plan.workload.sequence_length
            attention_forward += there_.seconds * share
            attention_backward += back_.seconds * share
        if sublayer.kind != "loss":
            cost = traffic(sublayer, plan)
            moved += cost.bytes * tokens
            operators += cost.operators
    bound = rates.copy_seconds(cluster, moved).seconds
    return Piece(
        products_forward=forward * factor,
        products_backward=backward * factor,
        attention_forward=attention_forward * factor,
        attention_backward=attention_backward * factor,
        bound_forward=bound,
        bound_backward=BACKWARD_TRAFFIC * bound,
        operators=operators,
        confidence=trust,
        source=", ".join(sorted(sources)),
    )


def _product(cluster: Cluster, dtype: Any, rows: int, n: int, k: int) -> tuple[float, float, rates.Rate]:
    """Forward, backward (input's and weight's gradient) of one product, and where forward's time comes from."""

    def make() -> tuple[float, float, rates.Rate]:
        there = rates.matmul_seconds(cluster, dtype, max(1, rows), n, k)
        inputs = rates.matmul_seconds(cluster, dtype, max(1, rows), k, n)
        weight = rates.matmul_seconds(cluster, dtype, n, k, max(1, rows))
        return there.seconds, inputs.seconds + weight.seconds, there

    return once(cluster, ("product", dtype, rows, n, k), make)


def gradient_traffic(plan: Plan, spec: ModelSpec) -> float:
    """Bytes that casts of weights and sums of gradients move in one step, whatever the number of tokens."""
    size, micro = compute_bytes(plan), plan.batch.accumulation
    weights = sum(p.count * p.matmul_weights for p in parts(spec))
    total = 0.0
    if plan.precision.cast == "autocast":  # forward narrows each weight, backward widens its gradient
        total += 2 * weights * (4 + size) * micro
    if micro > 1:  # read the new gradient and the sum, write the sum
        total += weights * (size + 8 if plan.precision.cast == "weights" else 12) * (micro - 1)
    return total
