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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.parallel.collectives import SENT
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


_SUMS = ("_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce", SENT)
"""What regions of tensor parallelism end with: kept, so that backward repeats no sum over ranks. Their gathered inputs are
not: they are what the sequence is cut to save."""


def kept_operators() -> list[Any]:
    """Operators whose results `norm_activation` keeps, as far as this torch has them."""
    found = [getattr(torch.ops.aten, name, None) for name in _KEPT_NAMES]
    found += [getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1], None) for name in _SUMS]
    return [packet.default for packet in found if packet is not None and hasattr(packet, "default")]


def chosen(num_blocks: int, recompute: Recompute) -> list[int]:
    """Indices of the blocks that are recomputed: the last of each run of `every`."""
    if recompute.mode == "none":
        return []
    return [index for index in range(num_blocks) if (index + 1) % recompute.every == 0]


def _keeping(adapter_rank: int) -> Callable[..., CheckpointPolicy]:
    """Keep the results of products and attention, but not those of an adapter's two: they are as large and cost little."""
    kept = set(kept_operators())

    def policy(_context: Any, operator: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        matrix = args[-1] if args else None
        thin = isinstance(matrix, torch.Tensor) and matrix.ndim == 2 and adapter_rank in matrix.shape
        return CheckpointPolicy.MUST_SAVE if operator in kept and not thin else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def apply_recompute(model: nn.Module, anatomy: Anatomy, recompute: Recompute, *, adapter_rank: int = 0) -> None:
    """Replace the forward of the chosen blocks by one that recomputes; names and modules stay as they are."""
    context: Callable[[], Any] | None = None
    if recompute.mode == "norm_activation":
        kept = _keeping(adapter_rank) if adapter_rank else kept_operators()
        context = functools.partial(create_selective_checkpoint_contexts, kept)
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
