"""The numbers that a family's forward needs, taken from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

NormKind: TypeAlias = Literal["llama", "gemma", "olmo2", "layer"]
ActivationKind: TypeAlias = Literal["silu", "gelu", "gelu_new", "relu"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    """Width of the expert that every token visits; 0 for none."""
    shared_gate: bool = False
    style: Literal["mixtral", "qwen", "deepseek"] = "qwen"
    normalise: bool = False
    groups: int = 1


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Shape:
    """One network. Sizes in elements; `windows[i]` is the window of block i, 0 for none."""

    family: str
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    tied: bool
    norm: NormKind = "llama"
    activation: ActivationKind = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    placement: Literal["pre", "post", "sandwich"] = "pre"
    fused_projections: bool = False
    rotary_dim: int = 0
    rejoined: bool = False
    """Heads are joined anew after rotation, which leaves them head-major: where a part of each is not rotated, and in Phi-3."""
    rotary_tables: int = 1
    wide_tables: bool = False
    """Rotary tables stay in fp32 whatever the stream is (OLMo 2)."""
    embed_scale: bool = False
    eager_scores: bool = False
    """Attention is written out and keeps its scores (Gemma 2)."""
    score_cap: bool = False
    logit_cap: bool = False
    parallel: bool = True
    """GPT-NeoX: attention and MLP side by side."""
    dropout: float = 0.0
    embed_dropout: float = 0.0
    windows: tuple[int, ...] = ()
    experts: Experts | None = None
    expert_blocks: frozenset[int] = frozenset()
    latent: Latent | None = None
