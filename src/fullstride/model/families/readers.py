"""From the keys of a configuration to a Shape, with the defaults of transformers' own configuration classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fullstride.errors import BadInput
from fullstride.model.families.shape import Experts, Latent, Shape
from fullstride.model.read import Keys


def _base(keys: Keys, *, tied: bool = False, head_dim: int | None = None, **more: Any) -> Shape:
    """What all share. `head_dim` is the class's default; None for hidden size / heads."""
    hidden = keys.size("hidden_size", "n_embd")
    heads = keys.size("num_attention_heads", "n_head")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    keys.divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    size = keys.optional("head_dim") or head_dim
    if not size:
        keys.divides("num_attention_heads", heads, "hidden_size", hidden)
        size = hidden // heads
    return Shape(
        family=keys.kind,
        hidden=hidden,
        blocks=keys.size("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        vocab=keys.size("vocab_size"),
        max_positions=keys.size("max_position_embeddings", "n_positions", default=more.pop("positions", 2048)),
        tied=keys.flag("tie_word_embeddings", tied),
        **{"rotary_dim": size, **more},
    )


def _ffn(keys: Keys) -> int:
    return keys.size("intermediate_size")


def _windows(keys: Keys, blocks: int, window: int, types: list[str] | None = None) -> tuple[int, ...]:
    """The window of each block, from `layer_types` or the class's own default of it."""
    given = keys.words("layer_types") or types
    if given is not None and len(given) != blocks:
        raise BadInput(
            f"{keys.name}: layer_types has {len(given)} entries for {blocks} blocks", fix="give one entry for each block"
        )
    if not window:
        return ()
    if given is None:
        return (window,) * blocks
    return tuple(window if kind == "sliding_attention" else 0 for kind in given)


def llama(keys: Keys) -> Shape:
    """Llama 1 to 3."""
    bias = keys.flag("attention_bias", False)
    return _base(
        keys,
        ffn=_ffn(keys),
        activation=keys.activation("hidden_act", "silu"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def mistral(keys: Keys) -> Shape:
    """Mistral: every block looks back over a window (4096 when the key is missing, none when it is null)."""
    shape = _base(keys, ffn=_ffn(keys), activation=keys.activation("hidden_act", "silu"), positions=131072)
    window = keys.optional("sliding_window") if "sliding_window" in keys.config else 4096
    return replace(shape, windows=(window,) * shape.blocks if window else ())


def _qwen_windows(keys: Keys, shape: Shape) -> Shape:
    if not keys.flag("use_sliding_window", False):
        return replace(shape, windows=_windows(keys, shape.blocks, 0))
    first = int(keys.number("max_window_layers", default=28))
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(shape.blocks)]
    return replace(shape, windows=_windows(keys, shape.blocks, keys.size("sliding_window", default=4096), types))


def qwen2(keys: Keys) -> Shape:
    """Qwen 2 and 2.5: biases on q, k, v alone."""
    shape = _base(keys, ffn=_ffn(keys), activation=keys.activation("hidden_act", "silu"), qkv_bias=True, positions=32768)
    return _qwen_windows(keys, shape)


def qwen3(keys: Keys) -> Shape:
    """Qwen 3: norms on the heads of q and k."""
    bias = keys.flag("attention_bias", False)
    shape = _base(
        keys,
        head_dim=128,
        ffn=_ffn(keys),
        activation=keys.activation("hidden_act", "silu"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        positions=32768,
    )
    return _qwen_windows(keys, shape)


def gemma(keys: Keys, activation: str = "hidden_act", positions: int = 8192) -> Shape:
    """Gemma 1: norms of 1 + weight in fp32, embeddings scaled, head tied."""
    bias = keys.flag("attention_bias", False)
    return _base(
        keys,
        tied=True,
        head_dim=256,
        ffn=_ffn(keys),
        activation=keys.activation(activation, "gelu_pytorch_tanh"),
        norm="gemma",
        qkv_bias=bias,
        out_bias=bias,
        embed_scale=True,
        positions=positions,
    )


def gemma2(keys: Keys) -> Shape:
    """Gemma 2: norms on both sides, capped scores and logits, a window in every other block."""
    shape = gemma(keys, "hidden_activation")
    types = ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(shape.blocks)]
    return replace(
        shape,
        placement="sandwich",
        windows=_windows(keys, shape.blocks, keys.size("sliding_window", default=4096), types),
        score_cap=_capped(keys, "attn_logit_softcapping"),
        logit_cap=_capped(keys, "final_logit_softcapping"),
        eager_scores=True,
    )


def _capped(keys: Keys, key: str) -> bool:
    """Gemma 2 caps unless the key says null."""
    return keys.config.get(key, 1.0) is not None


def gemma3(keys: Keys) -> Shape:
    """Gemma 3 (text): norms on q and k, five windowed blocks to a full one, a rotary table for each kind."""
    shape = gemma(keys, "hidden_activation", 131072)
    pattern = keys.size("sliding_window_pattern", "_sliding_window_pattern", default=6)
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(shape.blocks)]
    given = keys.words("layer_types") or types
    return replace(
        shape,
        placement="sandwich",
        qk_norm="head",
        windows=_windows(keys, shape.blocks, keys.size("sliding_window", default=4096), types),
        logit_cap=keys.config.get("final_logit_softcapping") is not None,
        rotary_tables=len(set(given)),
    )


def phi(keys: Keys) -> Shape:
    """Phi 1 and 2: LayerNorm, half of each head rotated."""
    shape = _base(keys, ffn=_ffn(keys), norm="layer", activation=keys.activation("hidden_act", "gelu_new"))
    return replace(
        shape,
        qk_norm="head" if keys.flag("qk_layernorm", False) else "none",
        rotary_dim=int(shape.head_dim * keys.rope("partial_rotary_factor", 0.5)),
        rejoined=True,
        dropout=keys.number("resid_pdrop"),
        embed_dropout=keys.number("embd_pdrop"),
    )


def phi3(keys: Keys) -> Shape:
    """Phi 3: one projection for q, k, v and one for gate and up."""
    shape = _base(
        keys, ffn=_ffn(keys), activation=keys.activation("hidden_act", "silu"), fused_projections=True, positions=4096
    )
    window = keys.optional("sliding_window")
    return replace(
        shape,
        rotary_dim=int(shape.head_dim * keys.rope("partial_rotary_factor", 1.0)),
        windows=(window,) * shape.blocks if window else (),
        rejoined=True,
        dropout=keys.number("resid_pdrop"),
        embed_dropout=keys.number("embd_pdrop"),
    )


def olmo2(keys: Keys) -> Shape:
    """OLMo 2: norms after attention and MLP, and over the whole of q and k."""
    bias = keys.flag("attention_bias", False)
    return _base(
        keys,
        ffn=_ffn(keys),
        activation=keys.activation("hidden_act", "silu"),
        norm="olmo2",
        qkv_bias=bias,
        out_bias=bias,
        placement="post",
        wide_tables=True,
        qk_norm="full",
    )


def gpt2(keys: Keys) -> Shape:
    """GPT-2."""
    shape = _base(
        keys,
        tied=True,
        ffn=keys.optional("n_inner") or 4 * keys.size("hidden_size", "n_embd"),
        norm="layer",
        activation=keys.activation("activation_function", "gelu_new"),
        positions=1024,
    )
    if keys.flag("add_cross_attention", False):
        raise BadInput(f"{keys.name}: add_cross_attention is true, only decoders are planned", fix="set it to false")
    return replace(
        shape,
        rotary_dim=0,
        dropout=keys.number("resid_pdrop", default=0.1),
        embed_dropout=keys.number("embd_pdrop", default=0.1),
    )


def gpt_neox(keys: Keys) -> Shape:
    """GPT-NeoX and Pythia: a quarter of each head rotated."""
    shape = _base(
        keys,
        ffn=_ffn(keys),
        norm="layer",
        activation=keys.activation("hidden_act", "gelu"),
        qkv_bias=keys.flag("attention_bias", True),
        parallel=keys.flag("use_parallel_residual", True),
    )
    share = keys.rope("partial_rotary_factor", keys.number("rotary_pct", default=0.25))
    dropout = keys.number("hidden_dropout")
    return replace(shape, rotary_dim=int(shape.head_dim * share), rejoined=True, dropout=dropout, embed_dropout=dropout)


def _mixture(keys: Keys, count: int, chosen: int) -> None:
    if chosen > count:
        raise BadInput(
            f"{keys.name}: num_experts_per_tok {chosen} is more than the {count} experts", fix="choose fewer experts a token"
        )


def mixtral(keys: Keys) -> Shape:
    """Mixtral: experts in every block (arXiv 2401.04088)."""
    shape = _base(keys, ffn=_ffn(keys), activation=keys.activation("hidden_act", "silu"), positions=131072)
    count, chosen = keys.size("num_local_experts", default=8), keys.size("num_experts_per_tok", default=2)
    _mixture(keys, count, chosen)
    window = keys.optional("sliding_window")
    return replace(
        shape,
        windows=(window,) * shape.blocks if window else (),
        experts=Experts(count=count, per_token=chosen, ffn=shape.ffn, style="mixtral", normalise=True),
        expert_blocks=frozenset(range(shape.blocks)),
    )


def _sparse_blocks(keys: Keys, blocks: int) -> frozenset[int]:
    step = keys.size("decoder_sparse_step", default=1)
    dense = set(keys.words("mlp_only_layers") or ())
    return frozenset(i for i in range(blocks) if i not in dense and (i + 1) % step == 0)


def qwen2_moe(keys: Keys) -> Shape:
    """Qwen2-MoE: fine experts and a gated shared one."""
    shape = _base(
        keys,
        ffn=_ffn(keys),
        activation=keys.activation("hidden_act", "silu"),
        qkv_bias=keys.flag("qkv_bias", True),
        positions=32768,
    )
    count, chosen = keys.size("num_experts", default=60), keys.size("num_experts_per_tok", default=4)
    _mixture(keys, count, chosen)
    experts = Experts(
        count=count,
        per_token=chosen,
        ffn=keys.size("moe_intermediate_size", default=1408),
        shared_ffn=keys.size("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
        normalise=keys.flag("norm_topk_prob", False),
    )
    shape = replace(shape, experts=experts, expert_blocks=_sparse_blocks(keys, shape.blocks))
    return _qwen_windows(keys, shape)


def qwen3_moe(keys: Keys) -> Shape:
    """Qwen3-MoE: fine experts, no shared one, norms on the heads of q and k."""
    bias = keys.flag("attention_bias", False)
    shape = _base(
        keys,
        ffn=_ffn(keys),
        activation=keys.activation("hidden_act", "silu"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        positions=32768,
    )
    count = keys.size("num_experts", "num_local_experts", default=128)
    chosen = keys.size("num_experts_per_tok", default=8)
    _mixture(keys, count, chosen)
    experts = Experts(
        count=count,
        per_token=chosen,
        ffn=keys.size("moe_intermediate_size", default=768),
        normalise=keys.flag("norm_topk_prob", False),
    )
    shape = replace(shape, experts=experts, expert_blocks=_sparse_blocks(keys, shape.blocks))
    window = keys.optional("sliding_window") if keys.flag("use_sliding_window", False) else 0
    return replace(shape, windows=(window,) * shape.blocks if window else ())


def deepseek_v3(keys: Keys) -> Shape:
    """DeepSeek-V3: latent attention, dense blocks first, then experts and a shared one (arXiv 2412.19437)."""
    nope, rope = keys.size("qk_nope_head_dim", default=128), keys.size("qk_rope_head_dim", default=64)
    bias = keys.flag("attention_bias", False)
    shape = _base(
        keys,
        head_dim=nope + rope,
        ffn=_ffn(keys),
        activation=keys.activation("hidden_act", "silu"),
        qkv_bias=bias,
        out_bias=bias,
        positions=4096,
    )
    count = keys.size("n_routed_experts", "num_local_experts", default=256)
    chosen = keys.size("num_experts_per_tok", default=8)
    _mixture(keys, count, chosen)
    ffn = keys.size("moe_intermediate_size", default=2048)
    rank = keys.optional("q_lora_rank") if "q_lora_rank" in keys.config else 1536
    return replace(
        shape,
        rotary_dim=rope,
        latent=Latent(
            q_rank=rank or None,
            kv_rank=keys.size("kv_lora_rank", default=512),
            nope_dim=nope,
            rope_dim=rope,
            value_dim=keys.size("v_head_dim", default=128),
        ),
        experts=Experts(
            count=count,
            per_token=chosen,
            ffn=ffn,
            shared_ffn=ffn * keys.size("n_shared_experts", default=1),
            style="deepseek",
            normalise=keys.flag("norm_topk_prob", True),
        ),
        expert_blocks=frozenset(range(int(keys.number("first_k_dense_replace", default=3)), shape.blocks)),
    )
