"""Small models for the parity check: one of every family of transformers that plans know, and two modules of our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61, "max_position_embeddings": 32}
_LLAMA_LIKE = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2}
_GEMMA_LIKE = {**_LLAMA_LIKE, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "pad_token_id": None}
"""Without a padding token: its embedding is zero, and so, where it comes first, is the hidden state after every block, at which
two norms a sublayer multiply the gradient by 1e6; after four blocks fp32 overflows, in the unmodified model too."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_LIKE, "model_type": "llama"},
    "qwen3": {**_LLAMA_LIKE, "model_type": "qwen3", "head_dim": 8},
    "gemma": {**_LLAMA_LIKE, "model_type": "gemma", "head_dim": 8},
    "phi": {**_LLAMA_LIKE, "model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 61,
        "initializer_range": 0.2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mistral": {**_LLAMA_LIKE, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**_LLAMA_LIKE, "model_type": "qwen2"},
    "gemma2": {**_GEMMA_LIKE, "model_type": "gemma2"},
    "gemma3_text": {**_GEMMA_LIKE, "model_type": "gemma3_text"},
    "phi3": {**_LLAMA_LIKE, "model_type": "phi3", "pad_token_id": 0},
    "olmo2": {**_LLAMA_LIKE, "model_type": "olmo2"},
    "gpt_neox": {**_LLAMA_LIKE, "model_type": "gpt_neox", "rotary_pct": 0.5},
    "qwen2_moe": {
        **_LLAMA_LIKE,
        "model_type": "qwen2_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "deepseek_v3": {
        **_LLAMA_LIKE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "mixtral": {**_LLAMA_LIKE, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "plain": {"vocab_size": 61},
    "modular": {"vocab_size": 61},
}
"""Small models by family; `plain` and `modular` are modules of this file. Vocabulary and experts divide by no ranks."""
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
WIDENING = frozenset(set(FAMILIES) - {"gpt2", "plain", "modular"})
"""Families whose own code computes norms or rotary angles in fp32, so that fp64 is not fp64 throughout."""

ONLY_FP32 = frozenset(_MIXTURES)
"""Families that use an operator without fp64 (grouped matrix products)."""


class _PlainBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(samples, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        added: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + added


class _HeadedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width, bias=False)  # softmax is blind to a bias of keys: its gradient is rounding alone
        self.to_v = nn.Linear(width, width)
        self.back = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (f(x).view(samples, length, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.back(mixed.transpose(1, 2).reshape(samples, length, -1))
        return result


class _ModularBlock(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _HeadedAttention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        fed: torch.Tensor = self.feed(self.between(x))
        return x + fed


class _Scale(nn.Module):
    """A root-mean-square norm whose class does not say so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.gain
        return scaled

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gain)


class LooseModel(nn.Module):
    """A language model whose blocks are attributes, with nothing in its names or order that tells its parts."""

    named: dict[str, Any] = {"embedding": "words", "final_norm": "gauge", "head": "out"}  # read only

    def __init__(self, vocab: int = 61, width: int = 32, depth: int = 3, *, tied: bool = False) -> None:
        """Make blocks `b0`, `b1`, ..., registered in another order than they run in."""
        super().__init__()
        self.out = nn.Linear(width, vocab, bias=not tied)
        self.gauge = _Scale(width)
        for number in reversed(range(depth)):
            self.add_module(f"b{number}", _ModularBlock(width))
        self.places = nn.Embedding(vocab + 7, width)  # larger than that of the words
        self.words = nn.Embedding(vocab, width)
        if tied:
            self.out.weight = self.words.weight
        self.depth = depth

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every position."""
        x: torch.Tensor = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for number in range(self.depth):
            x = getattr(self, f"b{number}")(x)
        logits: torch.Tensor = self.out(self.gauge(x))
        return logits


class PlainModel(nn.Module):
    """A language model that owes nothing to transformers: int64 [samples, seq] to logits [samples, seq, vocab]."""

    def __init__(self, vocab: int = 61, width: int = 32, depth: int = 3, *, tied: bool = False, modular: bool = False) -> None:
        """Make `depth` blocks of `width`; `modular`: attention and MLP are modules of their own."""
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.stack = nn.ModuleList((_ModularBlock if modular else _PlainBlock)(width) for _ in range(depth))
        self.last_norm = nn.LayerNorm(width)
        self.to_vocab = nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.to_vocab.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every position."""
        x: torch.Tensor = self.table(tokens)
        for block in self.stack:
            x = block(x)
        logits: torch.Tensor = self.to_vocab(self.last_norm(x))
        return logits
