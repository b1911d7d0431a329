"""Activations that are made again in backward instead of kept.

`full`: a block keeps its input alone. `norm_activation`: a block keeps the results of matrix products and attention, and
makes norms, rotary embedding and the activation product again, which costs a few per cent of its time (selective
recomputation; Korthikanti et al., 2022, chose the opposite half of the same trade).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fullstride.engine.anatomy import Anatomy
from fullstride.plan.plan import Recompute

_KEPT_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


def kept_operators() -> list[Any]:
    """Operators whose results `norm_activation` keeps, as far as this torch has them."""
    found = [getattr(torch.ops.aten, name, None) for name in _KEPT_NAMES]
    return [packet.default for packet in found if packet is not None and hasattr(packet, "default")]


def chosen(num_blocks: int, recompute: Recompute) -> list[int]:
    """Indices of the blocks that are recomputed: the last of each run of `every`."""
    if recompute.mode == "none":
        return []
    return [index for index in range(num_blocks) if (index + 1) % recompute.every == 0]


def apply_recompute(model: nn.Module, anatomy: Anatomy, recompute: Recompute) -> None:
    """Replace the forward of the chosen blocks by one that recomputes; names and modules stay as they are."""
    context: Callable[[], Any] | None = None
    if recompute.mode == "norm_activation":
        context = functools.partial(create_selective_checkpoint_contexts, kept_operators())
    for index in chosen(len(anatomy.blocks), recompute):
        block = model.get_submodule(anatomy.blocks[index])
        # Restoring the generator costs a wait for the device on each block: only where something draws from it.
        random = any(getattr(m, "p", 0) for m in block.modules() if "dropout" in type(m).__name__.lower())
        random = random or any(getattr(m, "attention_dropout", 0) for m in block.modules())
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": bool(random)}
        if context is not None:
            options["context_fn"] = context
        block.forward = _recomputing(block.forward, options)


def _recomputing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed
