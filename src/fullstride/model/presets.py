"""Published models by name, as the Hugging Face configurations that transformers builds them from.

Sizes are those of the models' published `config.json` files. GPT-2's dropout is 0 here (0.1 when it was published): large
models are trained without, and a step can then be repeated exactly. `tiny` is a small Llama for machines without a GPU.
"""

from __future__ import annotations

import copy
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **more,
    }


def _llama3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool = False, factor: float = 8.0) -> dict[str, Any]:
    return _llama(
        hidden,
        layers,
        heads,
        8,
        ffn,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={**_LLAMA3_ROPE, "factor": factor},
        tie_word_embeddings=tied,
        bos_token_id=128000,
        eos_token_id=128001,
    )


def _llama2(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return _llama(hidden, layers, heads, heads, ffn, vocab_size=32000, max_position_embeddings=4096, rope_parameters=rope)


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, kv_heads: int = 8, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _qwen3_moe(hidden: int, layers: int, heads: int, ffn: int, expert_ffn: int) -> dict[str, Any]:
    return {
        **_qwen3(hidden, layers, heads, ffn, kv_heads=4),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": expert_ffn,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }


def _tiny() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    ids = {"bos_token_id": None, "eos_token_id": None}
    return _llama(256, 8, 8, 4, 1024, vocab_size=384, max_position_embeddings=2048, rope_parameters=rope, **ids)


_CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": _tiny(),
    "llama3-1b": _llama3(2048, 16, 32, 8192, tied=True, factor=32.0),
    "llama3-3b": _llama3(3072, 28, 24, 8192, tied=True, factor=32.0),
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
    "llama3-405b": _llama3(16384, 126, 128, 53248),
    "llama2-7b": _llama2(4096, 32, 32, 11008),
    "llama2-13b": _llama2(5120, 40, 40, 13824),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 12288, 1536),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
}
PRESETS: tuple[str, ...] = tuple(_CONFIGS)
"""Names that stand for a model."""


def preset_config(name: str) -> dict[str, Any]:
    """A fresh copy of a preset's Hugging Face configuration (KeyError for a name that is not in PRESETS)."""
    return copy.deepcopy(_CONFIGS[name])
