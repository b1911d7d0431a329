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

from fullstride.engine.deferred import gradient
from fullstride.engine.parallel.collectives import (
    Ranks,
    sequence_back,
    sequence_first,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    wait,
)


@dataclasses.dataclass(frozen=True)
class Border:
    """How the hidden state passes into a region and out of it."""

    ranks: Ranks
    sequence: bool
    """Outside regions each rank holds its part of the sequence alone."""

    def start_spread(self, part: torch.Tensor) -> torch.Tensor:
        """Begin to make what a region reads."""
        return start_gather(part, self.ranks) if self.sequence else part

    def spread(self, started: torch.Tensor) -> torch.Tensor:
        """[samples, seq, hidden] of what was begun."""
        return sequence_back(wait(started), self.ranks.size) if self.sequence else started

    def start_sum(self, term: torch.Tensor) -> torch.Tensor:
        """Begin to sum the ranks' terms [samples, seq, hidden]."""
        if self.sequence:
            return start_reduce_scatter(sequence_first(term, self.ranks.size), self.ranks)
        return start_all_reduce(term, self.ranks)


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


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _weight_gradient(weight: torch.Tensor, out: torch.Tensor, hidden: torch.Tensor, transposed: bool) -> torch.Tensor | None:
    """Of a product; None if it waits."""

    def make() -> torch.Tensor:
        rows, outs = _rows(hidden), _rows(out)
        return (rows.t() @ outs if transposed else outs.t() @ rows).to(weight.dtype)

    return gradient(weight, make)


def _bias_gradient(bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    return gradient(bias, lambda: _rows(out).sum(0).to(bias.dtype))


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """Hidden x weight in the dtype of `hidden` (autocast keeps weights wider)."""
    narrow = weight.to(hidden.dtype)
    extra = None if bias is None else bias.to(hidden.dtype)
    return torch.nn.functional.linear(hidden, narrow.t() if transposed else narrow, extra)


def _onward(grad: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The weight as the gradient of the input is multiplied by it."""
    narrow = weight.to(grad.dtype)
    return narrow.t() if transposed else narrow


def _keep(ctx: Any, held: torch.Tensor, parameters: tuple[torch.Tensor | None, ...]) -> None:
    """Save what backward needs.

    A gradient that waits belongs to the parameter itself, and recomputation hands out detached copies of what was saved, so
    the parameters are kept by reference as well. Compiled code has no use for that: nothing waits in it.
    """
    there = tuple(p for p in parameters if p is not None)
    ctx.biased = tuple(p is not None for p in parameters)
    ctx.save_for_backward(held, *there)
    if not torch.compiler.is_compiling():
        ctx.parameters = there


def _kept(ctx: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    held, *saved = ctx.saved_tensors
    there = iter(getattr(ctx, "parameters", saved))
    return held, [next(there) if has else None for has in ctx.biased]


class Columns(torch.autograd.Function):
    """All products of one region that read its input, at its border.

    Backward: the gradient of the input is made first and its sum over the ranks begun; the weights' gradients are computed
    beside it. Where the sequence is cut, this rank's part of the input alone is kept, and gathered again beside the input's
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        whole: torch.Tensor,
        border: Border,
        options: tuple[bool, bool, int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The products.

        Args:
            ctx: autograd's.
            part: the region's input outside, which gets the gradient.
            whole: the same inside, [samples, seq, hidden], cut off from autograd.
            border: which lies between the two.
            options: weights are [in, out], as GPT-2 has them; the whole input is kept; number of weights.
            tensors: weights, then as many biases or None.
        """
        transposed, keep, count = options
        weights, biases = tensors[:count], tensors[count:]
        ctx.border, ctx.options = border, options
        _keep(ctx, whole if keep or not border.sequence else part, tensors)
        return tuple(_product(whole, w, b, transposed) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """Input first, its sum beside the weights."""
        border, (transposed, keep, count) = ctx.border, ctx.options
        held, parameters = _kept(ctx)
        weights = [weight for weight in parameters[:count] if weight is not None]
        again = border.sequence and not keep
        started = border.start_spread(held) if again else held
        needs = ctx.needs_input_grad[4:]
        total = None
        if ctx.needs_input_grad[0]:
            summed: torch.Tensor | None = None
            for grad, weight in zip(grads, weights, strict=True):
                rows, narrow = _rows(grad), _onward(grad, weight, transposed)
                summed = rows @ narrow if summed is None else torch.addmm(summed, rows, narrow)
            assert summed is not None
            total = border.start_sum(summed.view(*grads[0].shape[:-1], summed.shape[-1]))
        whole = border.spread(started) if again else held
        made = [
            _weight_gradient(w, g, whole, transposed) if need else None
            for w, g, need in zip(weights, grads, needs[:count], strict=True)
        ]
        biases = [
            _bias_gradient(b, g) if b is not None and need else None
            for b, g, need in zip(parameters[count:], grads, needs[count:], strict=True)
        ]
        return (None if total is None else wait(total), None, None, None, *made, *biases)


class Row(torch.autograd.Function):
    """A product whose result is one rank's term; the bias is added by one rank, and has its gradient on all."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: tuple[bool, bool]
    ) -> torch.Tensor:
        """The term; `options`: the weight is [in, out], this rank adds the bias."""
        ctx.options = options
        _keep(ctx, hidden, (weight, bias))
        return _product(hidden, weight, bias if options[1] else None, options[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """The gradient of a sum is that of each term."""
        hidden, (weight, bias) = _kept(ctx)
        assert weight is not None
        transposed, grad, needs = ctx.options[0], grads[0], ctx.needs_input_grad
        d_hidden = (_rows(grad) @ _onward(grad, weight, transposed)).view(hidden.shape) if needs[0] else None
        d_weight = _weight_gradient(weight, grad, hidden, transposed) if needs[1] else None
        return d_hidden, d_weight, _bias_gradient(bias, grad) if bias is not None and needs[2] else None, None
