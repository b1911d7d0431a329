"""Low-rank adapters written by hand on an unmodified model, as the parity check's reference; no part of `engine/adapter.py`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from fullstride.engine.init import seed_of
from fullstride.engine.precision import TORCH_DTYPE
from fullstride.plan.plan import Plan

ENDS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "c_attn", "qkv_proj", "query_key_value", "qkv"),
    "out": ("o_proj", "attn.c_proj", "self_attn.dense", "attention.dense", "out"),
    "gate_up": ("gate_proj", "up_proj", "c_fc", "fc1", "gate_up_proj", "dense_h_to_4h"),
    "down": ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h"),
}
"""What the names of a plan mean in the families of `parity_models.py`; other targets are ends of paths."""


def adapt_by_hand(model: nn.Module, plan: Plan) -> None:
    """Freeze a model and add A and B to its products by hooks; parameters are called as PEFT calls them."""
    adapter, dtype = plan.adapter, TORCH_DTYPE[plan.precision.master]
    ends = [f".{end}" for target in adapter.targets for end in ENDS.get(target, (target,))]
    model.requires_grad_(False)
    blocks = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and "expert" not in p]
    for path, module in list(model.named_modules()):
        inside = any(path.startswith(f"{block}.") for block in blocks)
        weight = getattr(module, "weight", None)
        if inside and path.endswith(tuple(ends)) and isinstance(weight, nn.Parameter) and weight.ndim == 2:
            wide, high = weight.shape if type(module).__name__ == "Conv1D" else weight.shape[::-1]
            _add(
                module,
                path,
                (adapter.rank, wide, high),
                plan.recipe.seed,
                dtype,
                (adapter.alpha or adapter.rank) / adapter.rank,
            )


def _add(module: nn.Module, path: str, sizes: tuple[int, int, int], seed: int, dtype: torch.dtype, scale: float) -> None:
    rank, wide, high = sizes
    first, second = nn.Module(), nn.Module()
    torch.manual_seed(seed_of(seed, f"{path}.lora_A"))
    a, b = torch.empty(rank, wide, dtype=dtype), torch.zeros(high, rank, dtype=dtype)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    first.weight, second.weight = nn.Parameter(a), nn.Parameter(b)
    module.lora_A, module.lora_B = first, second

    def hook(_module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = scale * (args[0] @ first.weight.T) @ second.weight.T
        return out + added

    module.register_forward_hook(hook)
