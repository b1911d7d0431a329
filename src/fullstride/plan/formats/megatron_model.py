"""The model that Megatron's arguments describe, as a Hugging Face configuration; and the arguments for one."""

from __future__ import annotations

import re
from typing import Any

from fullstride.plan.formats.table import Draft, shown

TOKENIZERS = {
    "GPT2BPETokenizer": 50257,
    "GPT2BPETokenizerFast": 50257,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 131072,
    "BertWordPieceLowerCase": 30522,
}
"""Entries of the tokenizers whose size is their own, not the file's."""


def describe(draft: Draft, *, tp: int) -> None:
    """Put the model into the draft: its shape, and its configuration where a Hugging Face family is near enough."""
    facts = draft.facts
    if not all(facts.get(name) for name in ("layers", "hidden", "heads")):
        return
    if facts.get("hybrid"):
        draft.leave("--is-hybrid-model", True, "not a decoder of equal blocks; give the model with --model")
        return
    vocab = vocabulary(draft, tp)
    if vocab is None:
        draft.leave(
            "--vocab-size", "absent", f"{facts.get('tokenizer', 'the tokenizer')} decides it; give the model with --model"
        )
        return
    draft.model_name = f"megatron-{facts['layers']}x{facts['hidden']}"
    draft.shape = _shape(draft, vocab)
    config: dict[str, Any] = {
        "hidden_size": facts["hidden"],
        "num_hidden_layers": facts["layers"],
        "num_attention_heads": facts["heads"],
        "num_key_value_heads": draft.shape["kv_heads"],
        "vocab_size": padded(vocab, draft, tp),
        "max_position_embeddings": draft.shape["positions"],
        "tie_word_embeddings": not facts.get("untied", False),
    }
    if facts.get("head_dim"):
        config["head_dim"] = facts["head_dim"]
    gated = facts.get("swiglu", False)
    config["intermediate_size"] = facts.get("ffn") or _default_ffn(facts["hidden"], gated=gated)
    family = _sparse if facts.get("experts") else _gated if gated else _plain
    more = family(draft, config)
    if more:
        draft.config = config | more


def _default_ffn(hidden: int, *, gated: bool) -> int:
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _shape(draft: Draft, vocab: int) -> dict[str, Any]:
    """The fields of a `MegatronShape`; what even that cannot say is put on the list."""
    facts = draft.facts
    gated = facts.get("swiglu", False)
    if facts.get("squared_relu"):
        draft.leave("--squared-relu", True, "carried as GELU, which has the same products")
    attention_dropout = facts.get("attention_dropout", 0.1)
    if attention_dropout != facts.get("hidden_dropout", 0.1):
        draft.leave("--attention-dropout", attention_dropout, "carried with the dropout of the residuals")
    rotary = draft.get("position", "learned_absolute") in ("rope", "none", "yarn") or facts.get("rotary", False)
    shape: dict[str, Any] = {
        "layers": facts["layers"],
        "hidden": facts["hidden"],
        "heads": facts["heads"],
        "kv_heads": facts.get("kv_heads", facts["heads"]) if facts.get("grouped", False) else facts["heads"],
        "ffn": facts.get("ffn", 0),
        "head_dim": facts.get("head_dim", 0),
        "vocab": vocab,
        "positions": facts.get("positions") or facts.get("sequence") or 2048,
        "rotary": rotary,
        "gated": gated,
        "rms_norm": draft.get("normalization", "LayerNorm") == "RMSNorm",
        "bias": not facts.get("no_bias", False),
        "qkv_bias": facts.get("qkv_bias", False),
        "qk_norm": facts.get("qk_norm", False),
        "untied": facts.get("untied", False),
        "dropout": facts.get("hidden_dropout", 0.1),
        "predictions": facts.get("predictions", 0),
        "implementation": "local" if draft.get("implementation", "transformer_engine") == "local" else "te",
    }
    if facts.get("experts"):
        ffn = facts.get("moe_ffn") or facts.get("ffn") or _default_ffn(facts["hidden"], gated=gated)
        shape["experts"] = {"count": facts["experts"], "per_token": facts.get("topk", 2), "ffn": ffn}
        shape["experts"] |= {"shared_ffn": facts.get("shared_ffn", 0), "grouped": facts.get("grouped_experts", False)}
        pattern = expert_pattern(str(facts.get("moe_pattern", "1")), facts["layers"])
        if pattern is None:
            draft.leave(
                "--moe-layer-freq", facts["moe_pattern"], "not a pattern that fullstride reads; all blocks have experts"
            )
        shape["expert_layers"] = [bool(kind) for kind in pattern or []]
    if facts.get("latent"):
        names = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        defaults = (None, 512, 128, 64, 128)
        shape["latent"] = {name: facts.get(name, default) for name, default in zip(names, defaults, strict=True)}
    return shape


def vocabulary(draft: Draft, tp: int) -> int | None:
    """Entries of the vocabulary before Megatron pads it; None where only the tokenizer's files know."""
    facts = draft.facts
    word = facts.get("tokenizer", "GPT2BPETokenizer")
    if facts.get("padded_vocab"):
        return int(facts["padded_vocab"])
    if facts.get("vocab"):
        size: int = int(facts["vocab"]) + (word == "NullTokenizer")  # which adds an end of document
    elif word in TOKENIZERS:
        size = TOKENIZERS[word]
        draft.assumed.append(f"{size} vocabulary entries, those of {word}")
    else:
        return None
    return padded(size, draft, tp) if facts.get("vocab_multiple", 128) != 128 else size


def padded(size: int, draft: Draft, tp: int) -> int:
    """Rows of the embedding: Megatron pads to a multiple of `make-vocab-size-divisible-by` (128) x tp."""
    multiple: int = draft.get("vocab_multiple", 128) * tp
    return -(-size // multiple) * multiple


def _note(draft: Draft, name: str, option: str, why: str) -> None:
    if value := draft.facts.get(name):
        draft.config_notes.append(f"--{option} {shown(value)}: {why}")


def _norms(draft: Draft, wanted: str) -> None:
    found = draft.get("normalization", "LayerNorm")
    if found != wanted:
        draft.config_notes.append(f"--normalization {found}: {wanted}, the family's own, is taken")


def _gated(draft: Draft, config: dict[str, Any]) -> dict[str, Any]:
    facts, bias = draft.facts, not draft.get("no_bias", False)
    if facts.get("latent"):
        return _latent(draft, config)
    _norms(draft, "RMSNorm")
    common = {"hidden_act": "silu", "rms_norm_eps": facts.get("norm_eps", 1e-5)}
    if facts.get("rotary_base"):
        common["rope_theta"] = facts["rotary_base"]
    if facts.get("qk_norm"):
        return common | {"model_type": "qwen3", "attention_bias": bias}
    if facts.get("qkv_bias") and not bias:
        return common | {"model_type": "qwen2"}
    return common | {"model_type": "llama", "attention_bias": bias, "mlp_bias": bias}


def _latent(draft: Draft, config: dict[str, Any]) -> dict[str, Any]:
    facts = draft.facts
    config.pop("head_dim", None)
    config["num_key_value_heads"] = config["num_attention_heads"]
    if not facts.get("experts"):
        config |= {"first_k_dense_replace": config["num_hidden_layers"]}
    ffn = facts.get("moe_ffn") or config["intermediate_size"]
    shared = facts.get("shared_ffn", 0)
    if not facts.get("experts") or not shared or shared % ffn:
        shared = max(ffn, shared)
        if facts.get("experts"):
            draft.config_notes.append("--moe-shared-expert-intermediate-size: the family has a shared expert")
    return {
        "model_type": "deepseek_v3",
        "q_lora_rank": facts.get("q_rank"),
        "kv_lora_rank": facts.get("kv_rank", 512),
        "qk_nope_head_dim": facts.get("nope_dim", 128),
        "qk_rope_head_dim": facts.get("rope_dim", 64),
        "v_head_dim": facts.get("value_dim", 128),
        "moe_intermediate_size": ffn,
        "n_shared_experts": shared // ffn,
        "n_routed_experts": facts.get("experts", 1),
        "num_experts_per_tok": facts.get("topk", 2 if facts.get("experts") else 1),
        "first_k_dense_replace": config.get("first_k_dense_replace", _dense_first(draft)),
        "norm_topk_prob": not facts.get("pre_softmax", False),
    }


def _dense_first(draft: Draft) -> int:
    """Blocks without experts at the beginning, from `--moe-layer-freq`: a step, or a list such as `([0]*3+[1]*58)`."""
    pattern = expert_pattern(str(draft.facts.get("moe_pattern", "1")), draft.facts["layers"])
    if pattern is None:
        draft.config_notes.append("--moe-layer-freq: not a pattern that fullstride reads")
        return 0
    first = pattern.index(1) if 1 in pattern else len(pattern)
    if 0 in pattern[first:]:
        draft.config_notes.append("--moe-layer-freq: dense blocks between those with experts")
    return first


def expert_pattern(text: str, layers: int) -> list[int] | None:
    """Which blocks have experts (1), from Megatron's notation; None where it is none."""
    plain = text.replace(" ", "").strip("()'\"")
    if plain.isdigit():
        step = int(plain)
        return [int(index % step == 0) for index in range(layers)] if step else None
    found: list[int] = []
    for term in plain.split("+"):
        match = re.fullmatch(r"\(?\[([01](?:,[01])*)\](?:\*(\d+))?\)?(?:\*(\d+))?", term)
        if match is None:
            return None
        found += [int(word) for word in match[1].split(",")] * int(match[2] or 1) * int(match[3] or 1)
    return found if len(found) == layers else None


def _sparse(draft: Draft, config: dict[str, Any]) -> dict[str, Any]:
    facts = draft.facts
    if facts.get("latent"):
        return _latent(draft, config)
    if not facts.get("swiglu"):
        draft.config_notes.append("--num-experts: experts without a gate are no known family; give --model")
        return {}
    _norms(draft, "RMSNorm")
    dense = not draft.get("no_bias", False)
    if dense:
        draft.config_notes.append("--disable-bias-linear: carried without biases, the family has none")
    ffn = facts.get("moe_ffn") or config["intermediate_size"]
    common = {"hidden_act": "silu", "num_experts_per_tok": facts.get("topk", 2), "rms_norm_eps": facts.get("norm_eps", 1e-5)}
    pattern = expert_pattern(str(facts.get("moe_pattern", "1")), facts["layers"])
    if pattern is None:
        draft.config_notes.append("--moe-layer-freq: not a pattern that fullstride reads")
    sparse = {"mlp_only_layers": [index for index, kind in enumerate(pattern or []) if not kind], "decoder_sparse_step": 1}
    normed = {"norm_topk_prob": not facts.get("pre_softmax", False), "num_experts": facts["experts"]}
    if facts.get("shared_ffn"):
        _note(draft, "qk_norm", "qk-layernorm", "the family with a shared expert has no norms on q and k")
        gate = facts.get("shared_gate", False)
        if not gate:
            draft.config_notes.append("--moe-shared-expert-gate: the family's shared expert has a gate")
        return (
            common
            | normed
            | sparse
            | {
                "model_type": "qwen2_moe",
                "moe_intermediate_size": ffn,
                "shared_expert_intermediate_size": facts["shared_ffn"],
                "qkv_bias": bool(facts.get("qkv_bias", False)),
            }
        )
    if facts.get("qk_norm") or (pattern and 0 in pattern):
        return common | normed | sparse | {"model_type": "qwen3_moe", "moe_intermediate_size": ffn}
    config["intermediate_size"] = ffn
    return common | {"model_type": "mixtral", "num_local_experts": facts["experts"], "sliding_window": None}


def _plain(draft: Draft, config: dict[str, Any]) -> dict[str, Any]:
    """GPT: LayerNorm, biases, GELU; learned positions or rotary ones."""
    facts = draft.facts
    _norms(draft, "LayerNorm")
    _note(draft, "squared_relu", "squared-relu", "carried as GELU")
    _note(draft, "qk_norm", "qk-layernorm", "the family has no norms on q and k")
    _note(draft, "no_bias", "disable-bias-linear", "carried with biases, the family has them")
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        draft.config_notes.append("--num-query-groups: the family's heads have keys and values each")
        config["num_key_value_heads"] = config["num_attention_heads"]
    head_dim = config.pop("head_dim", None)
    if head_dim and head_dim * config["num_attention_heads"] != config["hidden_size"]:
        draft.config_notes.append(f"--kv-channels {head_dim}: the family's heads have hidden size / heads dimensions")
    dropout = facts.get("hidden_dropout", 0.1)
    if draft.get("position", "learned_absolute") == "rope" or facts.get("rotary"):
        share = facts.get("rotary_percent", 1.0)
        gelu = {"hidden_act": "gelu", "hidden_dropout": dropout, "attention_dropout": facts.get("attention_dropout", 0.1)}
        return gelu | {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": share}
    attention = facts.get("attention_dropout", 0.1)
    config["n_positions"] = config.pop("max_position_embeddings")
    for new, old in (("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers"), ("n_head", "num_attention_heads")):
        config[new] = config.pop(old)
    config["n_inner"] = config.pop("intermediate_size")
    config.pop("num_key_value_heads")
    dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": attention}
    return dropouts | {"model_type": "gpt2", "activation_function": "gelu_new"}


def model_options(config: dict[str, Any]) -> dict[str, Any] | None:
    """Megatron's options for a configuration, by name without dashes; None for a family Megatron has no words for."""
    get = config.get
    heads = get("num_attention_heads") or get("n_head")
    hidden: int = get("hidden_size") or config["n_embd"]
    options: dict[str, Any] = {
        "num-layers": get("num_hidden_layers") or get("n_layer"),
        "hidden-size": hidden,
        "num-attention-heads": heads,
        "max-position-embeddings": get("max_position_embeddings") or get("n_positions"),
        "padded-vocab-size": get("vocab_size"),
        "ffn-hidden-size": get("intermediate_size") or get("n_inner") or 4 * hidden,
    }
    if not get("tie_word_embeddings", config["model_type"] == "gpt2"):
        options["untie-embeddings-and-output-weights"] = True
    kv_heads = get("num_key_value_heads") or heads
    if kv_heads != heads:
        options |= {"group-query-attention": True, "num-query-groups": kv_heads}
    family = _FAMILIES.get(config["model_type"])
    return options | family(config) if family else None


def _like_llama(config: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"swiglu": True, "normalization": "RMSNorm", "position-embedding-type": "rope"}
    if not config.get("attention_bias", False):
        options["disable-bias-linear"] = True
    if config.get("head_dim"):
        options["kv-channels"] = config["head_dim"]
    return options | {"attention-dropout": 0.0, "hidden-dropout": 0.0}


def _like_gpt2(config: dict[str, Any]) -> dict[str, Any]:
    dropout = config.get("resid_pdrop", 0.1)
    return {"attention-dropout": config.get("attn_pdrop", 0.1), "hidden-dropout": dropout}


def _like_mixtral(config: dict[str, Any]) -> dict[str, Any]:
    return _like_llama(config) | {
        "num-experts": config.get("num_local_experts", 8),
        "moe-router-topk": config.get("num_experts_per_tok", 2),
    }


def _like_qwen3_moe(config: dict[str, Any]) -> dict[str, Any]:
    options = _like_llama(config) | {"qk-layernorm": True, "moe-ffn-hidden-size": config["moe_intermediate_size"]}
    chosen = config.get("num_experts_per_tok", 8)
    return options | {"num-experts": config.get("num_experts", 128), "moe-router-topk": chosen}


_FAMILIES = {
    "llama": _like_llama,
    "gpt2": _like_gpt2,
    "qwen3": lambda config: _like_llama(config) | {"qk-layernorm": True},
    "qwen2": lambda config: _like_llama(config) | {"add-qkv-bias": True},
    "mixtral": _like_mixtral,
    "qwen3_moe": _like_qwen3_moe,
}
