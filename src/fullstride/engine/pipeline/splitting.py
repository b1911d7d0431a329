"""Linear layers whose backward comes in two halves: the gradient of the input at once, that of the weight when it is asked for.

Only the forward of instances is replaced. The halves are exact under recompute, since what the weight's half needs is kept
from the one recomputation, and under compile, since these products are left out of compiled code. Modules whose weights have
other gradients (norms, tables, fused experts) compute theirs in the input's half.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fullstride.engine.deferred import gradient


class _Product(torch.autograd.Function):
    """input, weight, bias -> linear. `across`: the weight is [in, out], as in transformers' Conv1D."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, across: bool) -> torch.Tensor:
        device = value.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
        narrow = value.to(compute)
        # Recomputation hands detached copies of saved tensors back, and a gradient belongs to the parameter itself.
        ctx.weight, ctx.bias, ctx.across = weight, bias, across
        ctx.wide = value.dtype
        ctx.save_for_backward(narrow)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(compute)
            return functional.linear(narrow, matrix.t() if across else matrix, None if bias is None else bias.to(compute))

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (value,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        rows = outputs[0].reshape(-1, outputs[0].shape[-1])
        found: list[torch.Tensor | None] = [None, None, None, None]
        if ctx.needs_input_grad[0]:
            matrix = weight.detach().to(rows.dtype)
            found[0] = (rows @ (matrix.t() if ctx.across else matrix)).view(value.shape).to(ctx.wide)
        if ctx.needs_input_grad[1]:
            flat, across = value.reshape(-1, value.shape[-1]), ctx.across
            found[1] = gradient(weight, lambda: (flat.t() @ rows if across else rows.t() @ flat).to(weight.dtype))
        if bias is not None and ctx.needs_input_grad[2]:
            found[2] = gradient(bias, lambda: rows.sum(0).to(bias.dtype))
        return tuple(found)


def split_backward(parts: Iterable[nn.Module]) -> int:
    """Let the products in these modules put their weights' gradients off; how many there are.

    Products that have a forward of their own already (cut over ranks, or joined with the loss) are left as they are.
    """
    count = 0
    for part in parts:
        for module in part.modules():
            across = type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")
            if (type(module) is nn.Linear or across) and "forward" not in vars(module):
                instance: Any = module
                instance.forward = _forward(module, across)
                count += 1
    return count


def _forward(module: nn.Module, across: bool) -> Any:
    def product(value: torch.Tensor) -> torch.Tensor:
        made: Any = _Product.apply
        result: torch.Tensor = made(value, module.weight, module.bias, across)
        return result

    outside: Any = torch.compiler.disable
    return outside(product)
