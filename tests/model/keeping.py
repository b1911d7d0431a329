"""What real code keeps for backward: storages seen by saved-tensor hooks, each once, parameters and given tensors excluded."""

import contextlib

import torch


def kept_bytes(call, exclude=()):
    """Bytes of distinct storages packed while `call()` runs forward."""
    skipped = {t.untyped_storage().data_ptr() for t in exclude}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps the address taken
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(size for size, _ in seen.values())


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
DEEPSEEK = {
    **EXPERTS,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def _of(model_type, **more):
    return {"model_type": model_type, **SMALL, **more}


CONFIGS = {
    "llama": _of("llama"),
    "llama-gqa-bias-tied": _of(
        "llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=24
    ),
    "mistral": _of("mistral", sliding_window=None),
    "mistral-window": _of("mistral", sliding_window=16, head_dim=32),
    "qwen2": _of("qwen2"),
    "qwen3": _of("qwen3", head_dim=32),
    "gemma": _of("gemma", head_dim=32),
    "gemma2": _of("gemma2", head_dim=32, sliding_window=16),
    "gemma3_text": _of("gemma3_text", head_dim=32, num_hidden_layers=7, sliding_window=512),
    "phi": _of("phi"),
    "phi-qknorm": _of("phi", qk_layernorm=True),
    "phi3": _of("phi3"),
    "olmo2": _of("olmo2"),
    "gpt2": {"model_type": "gpt2", **GPT2},
    "gpt2-inner": {"model_type": "gpt2", **GPT2, "n_inner": 96, "tie_word_embeddings": False},
    "gpt_neox": _of("gpt_neox"),
    "gpt_neox-serial": _of("gpt_neox", use_parallel_residual=False, tie_word_embeddings=True),
    "mixtral": _of("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2_moe": _of("qwen2_moe", **EXPERTS, num_experts=8, shared_expert_intermediate_size=72),
    "qwen2_moe-mixed": _of("qwen2_moe", **EXPERTS, num_experts=8, shared_expert_intermediate_size=72, mlp_only_layers=[0]),
    "qwen3_moe": _of("qwen3_moe", **EXPERTS, num_experts=8, head_dim=32),
    "deepseek_v3": _of("deepseek_v3", **DEEPSEEK),
    "deepseek_v3-direct": _of("deepseek_v3", **{**DEEPSEEK, "q_lora_rank": None}),
}


def build(config, dtype=torch.float32, device="cpu"):
    """transformers' own model of a configuration."""
    import transformers

    kept = {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **kept)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
    return model.train()


def blocks_of(model, spec):
    return model.get_submodule(spec.stacks[0].path)


def cast_weights(sublayers):
    """Bytes of the 2-byte copies that autocast keeps of the weights of these products (grouped ones are not on its list)."""
    return sum(2 * m.n * m.k for s in sublayers for m in s.matmuls if m.groups == 1)


def autocast_if(cast, device="cpu"):
    return torch.autocast(device, dtype=torch.bfloat16) if cast == "autocast" else contextlib.nullcontext()


class _GotIt(Exception):
    pass


def inputs_of_block(model, block, ids, cast):
    """What the model calls its block with."""
    found = []

    def hook(module, args, kwargs):
        found.append((args, kwargs))
        raise _GotIt

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    with contextlib.suppress(_GotIt), autocast_if(cast, ids.device.type):
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return found[0]


def block_bytes(model, block, ids, cast, compiled=False):
    """Bytes that one block keeps, weights' copies included."""
    args, kwargs = inputs_of_block(model, block, ids, cast)
    given = [t for t in torch.utils._pytree.tree_leaves(kwargs) if isinstance(t, torch.Tensor)]
    entry = args[0].detach().requires_grad_()
    run = torch.compile(block) if compiled else block

    def call():
        with autocast_if(cast, ids.device.type):
            return run(entry, *args[1:], **kwargs)

    if compiled:
        call()
    return kept_bytes(call, [*block.parameters(), *model.buffers(), *given])
