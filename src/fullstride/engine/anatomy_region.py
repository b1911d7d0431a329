"""The words of a block's anatomy: names of products, what a region is, how a weight is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from fullstride.engine.pieces import Cut

Role = Literal["column", "row", "whole"]
"""`column`: each rank makes part of the outputs; `row`: each reads part of the inputs and makes a term of a sum; `whole`:
every rank does all of it."""

FUSED = {"c_attn": "parts", "qkv_proj": "parts", "Wqkv": "parts", "qkv": "parts", "query_key_value": "heads"}
"""Queries, keys and values in one: one part behind the other, or head by head."""
FUSED_ELSE = {name: {"parts": "heads", "heads": "parts"}[way] for name, way in FUSED.items()}
"""The other way round, as the same names are used elsewhere."""
_COLUMNS = (
    *("q_proj", "k_proj", "v_proj", "query", "key", "value", "wq", "wk", "wv", "q_b_proj", "kv_b_proj", *FUSED),
    *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
)
_ROWS = ("o_proj", "out_proj", "wo", "dense", "down_proj", "w2", "fc2", "fc_out", "c_proj", "dense_4h_to_h")
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate", "router")
NAMES: Mapping[str, Role] = {
    **dict.fromkeys(_COLUMNS, "column"),
    **dict.fromkeys(_ROWS, "row"),
    **dict.fromkeys(_WHOLE, "whole"),
}
"""Products by the last part of their path."""
QUERY_NAMES = frozenset({"q_proj", "q_b_proj", "query", "wq", *FUSED})
KEY_NAMES = frozenset({"k_proj", "v_proj", "key", "value", "wk", "wv"})
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads")


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of a dim that is cut evenly; with `copies`, that many neighbouring ranks hold the same share of it."""

    size: int
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Slicing:
    """How a parameter is cut over tensor-parallel ranks."""

    dim: int
    parts: tuple[Part, ...]

    @property
    def copies(self) -> int:
        """Ranks that hold the same share."""
        return self.parts[0].copies

    def cut(self, rank: int, ranks: int) -> Cut:
        """The share of one rank. Runs that do not divide (vocabularies) differ by one element, the longer ones first."""
        ranges, begun = [], 0
        for part in self.parts:
            shares, mine = ranks // part.copies, rank // part.copies
            each, rest = divmod(part.size, shares)
            low = mine * each + min(mine, rest)
            ranges.append((begun + low, begun + low + each + (mine < rest)))
            begun += part.size
        return Cut(dim=self.dim, ranges=tuple(ranges))


@dataclasses.dataclass
class Region:
    """One region and how tensor parallelism cuts it. Paths are those of the model."""

    path: str
    columns: list[str] = dataclasses.field(default_factory=list)
    """Products that read the region's input."""
    inner: list[str] = dataclasses.field(default_factory=list)
    """Column products that read something else."""
    rows: list[str] = dataclasses.field(default_factory=list)
    wide_norms: dict[str, int] = dataclasses.field(default_factory=dict)
    """Norms over the width that is cut, with the number of ranks that hold the same share."""
    slicings: dict[str, Slicing] = dataclasses.field(default_factory=dict)
    """By parameter."""
    terms: list[str] = dataclasses.field(default_factory=list)
    """Parameters kept whole, whose gradient is a sum over the ranks."""
    settings: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    """Module, attribute and value by which its own code reckons with a rank's share."""
    heads: dict[str, int] = dataclasses.field(default_factory=dict)
    """A rank's share of the heads under every name that code may ask its configuration for; empty without attention."""


def is_product(module: nn.Module) -> bool:
    """Whether a module is `nn.Linear`, or transformers' `Conv1D`, whose weight is [in, out]."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def widths(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a product."""
    weight: Any = module.weight
    return (weight.shape[0], weight.shape[1]) if is_transposed(module) else (weight.shape[1], weight.shape[0])
