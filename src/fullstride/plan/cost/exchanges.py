"""What tensor parallelism of this engine exchanges for one part of the model and one micro-batch, collective by collective.

The places are those of docs/tensor.md; that a step moves exactly these bytes is counted in tests/engine/test_tensor_counts.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fullstride.model.spec import ModelSpec
from fullstride.plan.facts import BYTES, Part, compute_bytes, micro_tokens, parts, residual_bytes
from fullstride.plan.plan import Plan

When = Literal["forward", "backward", "input", "again"]
"""`input`: in backward, the input of a region gathered again, beside the products of its gradient; blocks that are made again
have it then. `again`: where a block is made again."""
Op = Literal["all_gather", "reduce_scatter", "all_reduce"]


class Exchange(NamedTuple):
    """Some equal collectives."""

    when: When
    op: Op
    size: float
    """Bytes of the whole: what a gather makes, what a scatter and an all-reduce are given."""
    times: int
    split: bool = False
    """It lies at a product that `overlap.tensor` cuts into parts."""


def exchanges(part: Part, plan: Plan) -> tuple[Exchange, ...]:
    """All of one part: one block, the embedding, or the head with its loss."""
    if part.group != "blocks":
        return _ends(part, plan)
    size, cut = _stream(part, plan, compute_bytes(plan)), plan.layout.sequence_parallel
    found: list[Exchange] = []
    regions = _regions(part)
    for region in regions:
        if cut:
            found += [
                Exchange("forward", "all_gather", size, 1, region.reads),
                Exchange("forward", "reduce_scatter", size, 1, region.closes),
                Exchange("backward", "all_gather", size, 1, region.closes),
                Exchange("backward", "reduce_scatter", size, 1, region.reads),
                Exchange("input", "all_gather", size, int(region.reads)),
            ]
        else:
            found += [
                Exchange("forward", "all_reduce", size, 1, region.closes),
                Exchange("backward", "all_reduce", size, 1, region.reads),
            ]
    mode = plan.recompute.mode
    if cut and mode in ("norm_activation", "full"):
        found.append(Exchange("again", "all_gather", size, len(regions)))
    if mode == "full":  # what is made again ends in front of the last sum, unless a norm reads that
        sums = len(regions) - (not _ends_in_norm(part))
        found.append(Exchange("again", "reduce_scatter" if cut else "all_reduce", size, sums))
    return tuple(item for item in found if item.times)


class _Region(NamedTuple):
    reads: bool
    """It begins with products of its input."""
    closes: bool
    """It ends with one product."""


def _regions(part: Part) -> list[_Region]:
    """Attention, and the MLP or the experts."""
    names = {s.name for s in part.sublayers}
    found = []
    if any(name.startswith("attn.") for name in names):
        latent = {"attn.kv_a", "attn.q_b"} <= names  # what reads the input is whole on every rank
        found.append(_Region(reads=not latent, closes=True))
    if any(s.kind == "experts" for s in part.sublayers):
        found.append(_Region(reads=False, closes=False))
    elif any(name.startswith("mlp.") for name in names):
        found.append(_Region(reads=True, closes=True))
    return found


def _ends_in_norm(part: Part) -> bool:
    """Whether the sum that closes a block is read by a norm before it joins the stream."""
    last = max((index for index, s in enumerate(part.sublayers) if s.matmuls), default=0)
    return any(s.kind == "norm" for s in part.sublayers[last:])


def _ends(part: Part, plan: Plan) -> tuple[Exchange, ...]:
    stream, cut = _stream(part, plan, residual_bytes(plan)), plan.layout.sequence_parallel
    if part.group == "embedding":
        looked_up = Exchange("forward", "all_reduce", stream, 1)
        return (looked_up, Exchange("backward", "all_gather", stream, 1)) if cut else (looked_up,)
    numbers = 2 * plan.layout.tp * micro_tokens(plan) / plan.layout.cp * BYTES[plan.precision.loss]
    told = Exchange("forward", "all_gather", numbers, 1)
    if cut:
        return (Exchange("forward", "all_gather", stream, 1), told, Exchange("backward", "reduce_scatter", stream, 1))
    return (told, Exchange("backward", "all_reduce", stream, 1))


def _stream(part: Part, plan: Plan, width: int) -> float:
    return micro_tokens(plan) / plan.layout.cp * stream_width(part) * width


def stream_width(part: Part) -> int:
    """Width of the residual stream, from the part's own norm or product."""
    for sublayer in part.sublayers:
        for parameter in sublayer.parameters:
            if sublayer.kind == "norm" and len(parameter.shape) == 1:
                return parameter.shape[0]
            if sublayer.kind == "embedding":
                return parameter.shape[-1]
    return max((m.k for s in part.sublayers for m in s.matmuls), default=0)


def bytes_a_step(plan: Plan, spec: ModelSpec) -> dict[Op, float]:
    """What one rank's collectives carry in a step without a pipeline, by kind, as `Exchange.size` counts it."""
    found: dict[Op, float] = {"all_gather": 0.0, "reduce_scatter": 0.0, "all_reduce": 0.0}
    for part in parts(spec):
        again = part.count // plan.recompute.every if part.group == "blocks" and plan.recompute.mode != "none" else 0
        for item in exchanges(part, plan):
            blocks = {"again": again, "input": part.count - again}.get(item.when, part.count)
            found[item.op] += blocks * item.times * item.size * plan.batch.accumulation
    return found
