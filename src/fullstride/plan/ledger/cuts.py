"""What of a sublayer lies on one rank: tensor, sequence, context and expert parallelism cut parameters and kept tensors.

Column-parallel products cut their outputs, row-parallel ones their inputs (Shoeybi et al., arXiv 1909.08053); with sequence
parallelism what lies between them is cut too (Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

from math import ceil

from fullstride.model.spec import Parameter, Saved, Sublayer
from fullstride.plan.facts import OTHER_CARRIERS, experts_cut
from fullstride.plan.plan import Layout, Plan

ROW = ("out", "down", "o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "wo", "w2", "linear_proj", "linear_fc2")
"""Ends of the names of products whose input is cut: they close attention and the MLP."""
WHOLE = ("q_a", "kv_a", "shared.join", "eh_proj_whole")
"""Products that every rank of a tensor-parallel group does whole: the low-rank halves of latent attention."""
CUT_KINDS = ("attention", "rotary", "activation")
"""Sublayers between a column-parallel and a row-parallel product: cut by tp with or without sequence parallelism."""
PAD = 128
"""Megatron pads the vocabulary to a multiple of this times tp (`--make-vocab-size-divisible-by`)."""


def last_name(sublayer: Sublayer) -> str:
    """The end of a sublayer's path."""
    return sublayer.name.rsplit(".", 1)[-1]


def is_row(sublayer: Sublayer) -> bool:
    """Whether this product's input is cut, not its output."""
    return sublayer.kind == "linear" and last_name(sublayer) in ROW


def padded_vocabulary(plan: Plan, size: int) -> int:
    """Entries of the vocabulary as it is stored over all ranks."""
    unit = plan.layout.tp * (PAD if plan.shard.carrier == "megatron" else 1)
    return ceil(size / unit) * unit


def local_elements(parameter: Parameter, sublayer: Sublayer, plan: Plan, vocab: int) -> int:
    """Elements of a parameter on one rank (before ZeRO)."""
    layout, count = plan.layout, parameter.count
    if parameter.role == "expert":
        return count // experts_cut(plan, layout.ep * layout.expert_tp)
    if parameter.role in ("embedding", "head"):
        if parameter.shape[0] != vocab:  # positions
            return count
        return count // vocab * (padded_vocabulary(plan, vocab) // layout.tp)
    if parameter.role in ("norm", "router") or last_name(sublayer) in WHOLE:
        return count
    if sublayer.name == "attn.q" and plan.shard.carrier not in OTHER_CARRIERS:  # of latent attention alone
        return count
    if parameter.role == "bias" and is_row(sublayer):
        return count
    if sublayer.kind in ("linear", "experts", "head"):
        return ceil(count / layout.tp)
    return count


def kept_share(saved: Saved, sublayer: Sublayer, layout: Layout) -> float:
    """What share of a kept tensor's elements lies on one rank."""
    share = 1.0 / layout.cp
    if layout.tp == 1:
        return share
    cut = sublayer.kind in CUT_KINDS or is_row(sublayer) or sublayer.name.endswith("qk_norm")
    if saved.per == "position":  # tables are made whole on every rank
        return share
    if sublayer.kind == "experts":  # ranks that share an expert each have all of its rows
        return share / layout.tp * (layout.expert_tp if saved.name == "rows_sorted" else 1)
    return share / layout.tp if cut or layout.sequence_parallel else share
