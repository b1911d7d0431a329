"""Passes over the logits of one micro-batch, wherever the head is."""

from __future__ import annotations

from typing import NamedTuple

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.pieces import local_tokens
from fullstride.plan.facts import BYTES
from fullstride.plan.plan import Plan


class Passes(NamedTuple):
    """What the loss costs beside the head's products, which are counted with the products."""

    seconds: float
    each: float
    """Bytes a logit."""
    rate: rates.Rate


def loss_passes(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Passes:
    """Widening, log-softmax, its backward, narrowing: one micro-batch on a rank that has the head."""
    head, wide, tokens = BYTES[plan.precision.head], BYTES[plan.precision.loss], local_tokens(plan)
    narrow = 2 * (head + wide) if head != wide else 0  # widen and narrow again
    each = narrow + 6 * wide  # log-softmax reads and writes; nll's gradient; its backward reads two and writes one
    extra = 0.0
    if plan.loss.kind == "chunked":
        each = 3 * head if plan.compile.mode == "block" else narrow + 10 * wide
        chunks = -(-tokens // plan.loss.chunk_tokens)
        extra = (chunks * 8.0 + 6.0) * spec.vocab_size * spec.hidden_size  # the weight's gradient: summed in fp32, scaled once
    rate = rates.copy_seconds(cluster, (tokens * spec.vocab_size * each + extra) / plan.layout.tp)
    return Passes(rate.seconds, each, rate)
