"""The models that torchtitan 0.2 knows by name and flavor, as presets or Hugging Face configurations.

Sizes are those of torchtitan's own `models/*/__init__.py`; a flavor whose network a preset is stands as the preset.
"""

from __future__ import annotations

from typing import Any

_LLAMA: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": False, "vocab_size": 128256}
_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 16384,
}
_LLAMA_DEBUG = _LLAMA | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "vocab_size": 2048,
    "max_position_embeddings": 131072,
}
_QWEN_DEBUG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def _deepseek(**sizes: Any) -> dict[str, Any]:
    return _DEEPSEEK | sizes


MODELS: dict[tuple[str, str], str | dict[str, Any]] = {
    ("llama3", "debugmodel"): _LLAMA_DEBUG,
    ("llama3", "8B"): "llama3-8b",
    ("llama3", "70B"): "llama3-70b",
    ("llama3", "405B"): "llama3-405b",
    ("qwen3", "debugmodel"): _QWEN_DEBUG,
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "debugmodel"): _deepseek(
        hidden_size=256,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=16,
        vocab_size=2048,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        q_lora_rank=None,
        norm_topk_prob=False,
    ),
    ("deepseek_v3", "16B"): _deepseek(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=27,
        num_attention_heads=16,
        vocab_size=102400,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=None,
        norm_topk_prob=False,
    ),
    ("deepseek_v3", "236B"): _deepseek(
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=60,
        num_attention_heads=128,
        vocab_size=102400,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        q_lora_rank=1536,
        norm_topk_prob=False,
    ),
    ("deepseek_v3", "671B"): _deepseek(
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        vocab_size=129280,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        norm_topk_prob=True,
    ),
}
ATTENTIONS = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Ends of a flavor's name that choose an attention and no other sizes."""
FAMILY_NAMES = {"llama": "llama3", "qwen3": "qwen3", "qwen3_moe": "qwen3", "deepseek_v3": "deepseek_v3"}
"""torchtitan's name for a family."""


def plain_flavor(flavor: str) -> tuple[str, str]:
    """A flavor without the attention in its name, and that."""
    for end in ATTENTIONS:
        if flavor.endswith(end):
            return flavor.removesuffix(end), end.strip("_").removesuffix("_attn")
    return flavor, ""


def flavor_of(source: str) -> tuple[str, str] | None:
    """Name and flavor of a preset; None where torchtitan has no such model."""
    return next((names for names, model in MODELS.items() if model == source), None)
