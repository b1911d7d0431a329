"""The end of a region whose result is one product's: the product and its sum over the ranks.

Two steps in autograd. `Hold` keeps what backward needs and computes nothing; `Send` computes and keeps nothing. So where a
block is made again in backward, that ends in front of the block's last product and its collective, which nobody asks for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import library

from fullstride.engine.parallel.collectives import SENT, Ranks, wait
from fullstride.engine.parallel.tensor_ops import bias_gradient, keep, kept, matrix_of, onward, weight_gradient
from fullstride.engine.parallel.tensor_parts import Border, finish, start_summed_products


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a region ends."""

    border: Border
    transposed: bool
    """The weight is [in, out]."""
    first: bool
    """This rank adds the bias."""
    whole: bool
    """As one operator, whose result recomputation keeps. Compiled code is told its parts instead, and keeps the sum."""


def _summed(
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    size: int,
    rank: int,
    name: str,
    sequence: bool,
    parts: int,
) -> torch.Tensor:
    border = Border(Ranks(size, rank, name), sequence, parts)
    return finish(start_summed_products([hidden], [matrix], bias, border))


def _shape(
    hidden: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    size: int,
    rank: int,
    name: str,
    sequence: bool,
    parts: int,
) -> torch.Tensor:
    length = hidden.shape[1] // size if sequence else hidden.shape[1]
    return hidden.new_empty((hidden.shape[0], length, matrix.shape[0]))


library.define(
    SENT, "(Tensor hidden, Tensor matrix, Tensor? bias, int size, int rank, str name, bool sequence, int parts) -> Tensor"
)
library.impl(SENT, ("cpu", "cuda"))(_summed)
library.register_fake(SENT)(_shape)


class Hold(torch.autograd.Function):
    """The product's input and the place of its result, and what the weight's gradient needs kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The input, and a place of the result's shape without memory, through which its gradient comes."""
        ctx.transposed = transposed
        keep(ctx, hidden, (weight, bias))
        outs = weight.shape[1 if transposed else 0]
        return hidden.view_as(hidden), hidden.new_empty(()).expand(*hidden.shape[:-1], outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The weight's gradient over all rows, which may wait."""
        d_hidden, out = grads
        hidden, (weight, bias) = kept(ctx)
        assert weight is not None
        needs = ctx.needs_input_grad
        d_weight = weight_gradient(weight, out, hidden, ctx.transposed) if needs[1] else None
        return d_hidden, d_weight, bias_gradient(bias, out) if bias is not None and needs[2] else None, None


class Send(torch.autograd.Function):
    """The product and its sum over the ranks, cut where the sequence is cut."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, place: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Exit
    ) -> torch.Tensor:
        """The region's result; `weight` and `bias` have their gradients by `Hold`."""
        ctx.how = how
        if torch.compiler.is_compiling():
            ctx.save_for_backward(weight)
        else:  # kept by the parameter itself, so that nothing has to be made again for it
            ctx.weight = weight
        border, matrix = how.border, matrix_of(weight, hidden.dtype, how.transposed)
        extra = bias.to(hidden.dtype) if bias is not None and how.first else None
        if how.whole and not torch.compiler.is_compiling():
            ranks = border.ranks
            made: torch.Tensor = torch.ops.fullstride.product_summed(
                hidden, matrix, extra, ranks.size, ranks.rank, ranks.name, border.sequence, border.parts
            )
            return made
        return finish(start_summed_products([hidden], [matrix], extra, border))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The gradient gathered, each part beside the product of the one before."""
        how, out = ctx.how, grads[0]
        weight = ctx.saved_tensors[0] if torch.compiler.is_compiling() or ctx.saved_tensors else ctx.weight
        narrow, border = onward(out, weight, how.transposed), how.border
        if not border.sequence:
            return out @ narrow, out, None, None, None
        gathered, made = [], []
        for started in border.start_gathers(out):
            gathered.append(wait(started))
            made.append(gathered[-1] @ narrow)
        return border.joined(made), border.joined(gathered), None, None, None
