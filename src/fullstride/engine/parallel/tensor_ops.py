"""What tensor parallelism puts between a model's operators, forward and backward.

A region is a part of a block between two borders. At its entry every rank sees the whole hidden state, inside each computes
its own heads or columns, and the sum of what the ranks make is the region's result. So every gradient that a rank finds inside
is one term of a sum over the ranks: that of the input is summed at the entry, that of a replicated weight after the step.

Two ways to pass the borders (Shoeybi et al., 2019; Korthikanti et al., 2022):

    sequence cut    entry: all-gather, backward reduce-scatter    exit: reduce-scatter, backward all-gather
    whole           entry: nothing, backward all-reduce           exit: all-reduce, backward nothing
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import library

from fullstride.engine.deferred import gradient
from fullstride.engine.parallel.collectives import Ranks, start_all_reduce, wait
from fullstride.engine.parallel.tensor_parts import Border, finish, gathered_products, start_summed_products


class Enter(torch.autograd.Function):
    """The hidden state into a region; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, border: Border) -> torch.Tensor:
        """Give every rank the whole."""
        ctx.border = border
        return border.spread(border.start_spread(hidden)) if border.sequence else hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Sum, and cut as the input was."""
        return wait(ctx.border.start_sum(grads[0])), None


class Entered(torch.autograd.Function):
    """The whole hidden state that came with the region's products; who else reads it has a gradient as by `Enter`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, whole: torch.Tensor, border: Border) -> torch.Tensor:
        """It is there."""
        ctx.border = border
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Sum, and cut as the input was."""
        return wait(ctx.border.start_sum(grads[0])), None, None


class Leave(torch.autograd.Function):
    """The ranks' terms of a region's result, summed."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, border: Border) -> torch.Tensor:
        """Sum, and cut where the sequence is cut."""
        ctx.border = border
        return wait(border.start_sum(term))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Every term has the sum's gradient."""
        return ctx.border.spread(ctx.border.start_spread(grads[0])), None


class Scatter(torch.autograd.Function):
    """This rank's part of the sequence of a tensor that all ranks hold; backward gathers."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, border: Border) -> torch.Tensor:
        """Cut dim 1."""
        ctx.border = border
        length = whole.shape[1] // border.ranks.size
        return whole.narrow(1, border.ranks.rank * length, length).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Every rank gets the whole gradient, as it has the whole tensor."""
        return ctx.border.spread(ctx.border.start_spread(grads[0])), None


class Sum(torch.autograd.Function):
    """Terms summed over the ranks into what all hold; backward hands the gradient on."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Sum."""
        return wait(start_all_reduce(term, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """As it is."""
        return grads[0], None


class SumInside(torch.autograd.Function):
    """A sum over the ranks in the middle of a region: what follows is again different on each, so backward sums too."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Sum."""
        ctx.ranks = ranks
        return wait(start_all_reduce(term, ranks))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Each rank's gradient is one term."""
        return wait(start_all_reduce(grads[0], ctx.ranks)), None


_COPY = "fullstride::later"
library.define(_COPY, "(Tensor tensor, Tensor after) -> Tensor")
library.impl(_COPY, ("cpu", "cuda"))(lambda tensor, after: tensor.clone(memory_format=torch.contiguous_format))
library.register_fake(_COPY)(lambda tensor, after: torch.empty_like(tensor, memory_format=torch.contiguous_format))


def _later(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """`tensor`, in compiled code a copy that is not there before `after` is.

    Without it the compiler finds that a gather in backward is the one of forward, or could be made there, and keeps the result.
    """
    if not torch.compiler.is_compiling():
        return tensor
    made: torch.Tensor = torch.ops.fullstride.later(tensor, after)
    return made


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def weight_gradient(weight: torch.Tensor, out: torch.Tensor, hidden: torch.Tensor, transposed: bool) -> torch.Tensor | None:
    """Of a product; None if it waits."""

    def make() -> torch.Tensor:
        rows, outs = _rows(hidden), _rows(out)
        return (rows.t() @ outs if transposed else outs.t() @ rows).to(weight.dtype)

    return gradient(weight, make)


def bias_gradient(bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """Of a product's bias; None if it waits."""
    return gradient(bias, lambda: _rows(out).sum(0).to(bias.dtype))


def matrix_of(weight: torch.Tensor, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """[out, in] in the dtype of what it is multiplied with (autocast keeps weights wider)."""
    narrow = weight.to(dtype)
    return narrow.t() if transposed else narrow


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """Hidden x weight in the dtype of `hidden`."""
    extra = None if bias is None else bias.to(hidden.dtype)
    return torch.nn.functional.linear(hidden, matrix_of(weight, hidden.dtype, transposed), extra)


def onward(grad: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The weight as the gradient of the input is multiplied by it."""
    narrow = weight.to(grad.dtype)
    return narrow.t() if transposed else narrow


def keep(ctx: Any, held: torch.Tensor, parameters: tuple[torch.Tensor | None, ...]) -> None:
    """Save what backward needs.

    A gradient that waits belongs to the parameter itself, and recomputation hands out detached copies of what was saved, so
    the parameters are kept by reference as well. Compiled code has no use for that: nothing waits in it.
    """
    there = tuple(p for p in parameters if p is not None)
    ctx.biased = tuple(p is not None for p in parameters)
    ctx.save_for_backward(held, *there)
    if not torch.compiler.is_compiling():
        ctx.parameters = there


def kept(ctx: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What was kept, and the parameters with None for a bias that is not there."""
    held, *saved = ctx.saved_tensors
    there = iter(getattr(ctx, "parameters", saved))
    return held, [next(there) if has else None for has in ctx.biased]


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the products that read a region's input are made."""

    border: Border
    transposed: bool
    """Weights are [in, out], as GPT-2 has them."""
    keep: bool
    """The whole input is kept for backward, not gathered again there."""
    count: int
    """Of weights."""
    ready: bool = False
    """The products were made with the gather, in parts, and are handed in."""


class Columns(torch.autograd.Function):
    """All products of one region that read its input, at its border.

    Backward: the gradient of the input is made first and its sum over the ranks begun; the weights' gradients are computed
    beside it. Where the sequence is cut, this rank's part of the input alone is kept, and gathered again beside the input's
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, whole: torch.Tensor, how: Reading, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The products.

        Args:
            ctx: autograd's.
            part: the region's input outside, which gets the gradient.
            whole: the same inside, [samples, seq, hidden], cut off from autograd.
            how: they are made.
            tensors: weights, then as many biases or None, then as many products where they are ready.
        """
        weights, biases = tensors[: how.count], tensors[how.count : 2 * how.count]
        ctx.how = how
        keep(ctx, whole if how.keep or not how.border.sequence else part, (*weights, *biases))
        if how.ready:
            return tuple(made.view_as(made) for made in tensors[2 * how.count :])
        return tuple(_product(whole, w, b, how.transposed) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Input first, its sum beside the weights."""
        how: Reading = ctx.how
        border, count = how.border, how.count
        held, parameters = kept(ctx)
        weights = [weight for weight in parameters[:count] if weight is not None]
        again = border.sequence and not how.keep
        started = border.start_spread(_later(held, grads[0])) if again else held
        needs = ctx.needs_input_grad[3:]
        total: list[torch.Tensor] = []
        if ctx.needs_input_grad[0]:
            total = _start_input_gradient(grads, weights, how)
        whole = border.spread(started) if again else held
        made = [
            weight_gradient(w, g, whole, how.transposed) if need else None
            for w, g, need in zip(weights, grads, needs[:count], strict=True)
        ]
        biases = [
            bias_gradient(b, g) if b is not None and need else None
            for b, g, need in zip(parameters[count:], grads, needs[count : 2 * count], strict=True)
        ]
        return (finish(total) if total else None, None, None, *made, *biases, *((None,) * count if how.ready else ()))


def _start_input_gradient(grads: tuple[torch.Tensor, ...], weights: list[torch.Tensor], how: Reading) -> list[torch.Tensor]:
    """Its sum over the ranks, begun: in one, or in parts."""
    border = how.border
    if border.parts > 1:
        return start_summed_products(
            grads, [onward(g, w, how.transposed).t() for g, w in zip(grads, weights, strict=True)], None, border
        )
    summed: torch.Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        rows, narrow = _rows(grad), onward(grad, weight, how.transposed)
        summed = rows @ narrow if summed is None else torch.addmm(summed, rows, narrow)
    assert summed is not None
    return [border.start_sum(summed.view(*grads[0].shape[:-1], summed.shape[-1]))]


def read_in_parts(
    part: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], how: Reading
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The whole input of a region and the products that read it, without autograd: `Columns` is handed them."""
    with torch.no_grad():
        narrow = [matrix_of(weight, part.dtype, how.transposed) for weight in weights]
        extra = [None if bias is None else bias.to(part.dtype) for bias in biases]
        return gathered_products(part, narrow, extra, how.border)


class Row(torch.autograd.Function):
    """A product whose result is one rank's term; the bias is added by one rank, and has its gradient on all."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: tuple[bool, bool]
    ) -> torch.Tensor:
        """The term; `options`: the weight is [in, out], this rank adds the bias."""
        ctx.options = options
        keep(ctx, hidden, (weight, bias))
        return _product(hidden, weight, bias if options[1] else None, options[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The gradient of a sum is that of each term."""
        hidden, (weight, bias) = kept(ctx)
        assert weight is not None
        transposed, grad, needs = ctx.options[0], grads[0], ctx.needs_input_grad
        d_hidden = (_rows(grad) @ onward(grad, weight, transposed)).view(hidden.shape) if needs[0] else None
        d_weight = weight_gradient(weight, grad, hidden, transposed) if needs[1] else None
        return d_hidden, d_weight, bias_gradient(bias, grad) if bias is not None and needs[2] else None, None
