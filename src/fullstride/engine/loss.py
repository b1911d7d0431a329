"""The loss: a mean per token over all samples of the step, whatever they are cut into.

Every micro-batch contributes the SUM over its counted tokens, times one scale: data-parallel degree / tokens of the step
over the world. Averaging gradients over ranks then gives the gradient of the mean over the world's tokens, exactly.

`chunked`: the head's forward is replaced by one that makes the loss and, in the same pass, its gradients, a chunk of tokens
at a time, so that logits never stand whole (the idea of Liger's fused linear cross entropy, Hsu et al., 2024). The model's own
forward runs around it: what it returns as logits is then the scaled loss.

With tensor parallelism each rank holds some rows of the head and makes the logits of those tokens alone. Two numbers a
position pass between the ranks, the logarithm of the sum of exponentials and the label's logit, never the logits
(Shoeybi et al., 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.parallel.collectives import Ranks, start_gather, wait
from fullstride.errors import BadInput, RuleBroken

IGNORED = -100
"""A label that is not counted."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The rows of the head that this rank holds, and who holds the others."""

    ranks: Ranks
    lo: int
    hi: int


def across(lse: torch.Tensor, picked: torch.Tensor, rows: Vocabulary) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the whole vocabulary what each rank knows of its rows.

    Args:
        lse: logarithm of the sum of exponentials over this rank's rows, [positions].
        picked: the label's logit, zero where another rank holds it, [positions].
        rows: which are this rank's.

    Returns:
        Both over all rows, equal to the last bit on all ranks.
    """
    both = torch.stack((lse, picked))
    all_ranks = wait(start_gather(both, rows.ranks)).view(rows.ranks.size, *both.shape)
    return torch.logsumexp(all_ranks[:, 0], 0), all_ranks[:, 1].sum(0)


class _SpreadLoss(torch.autograd.Function):
    """Logits of this rank's rows -> loss sum over all rows."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype, rows: Vocabulary) -> torch.Tensor:
        wide = logits.to(dtype)
        mine = (labels >= rows.lo) & (labels < rows.hi)
        target = (labels - rows.lo).clamp(0, rows.hi - rows.lo - 1).unsqueeze(1)
        picked = torch.where(mine, wide.gather(1, target).squeeze(1), 0.0)
        lse, picked = across(torch.logsumexp(wide, 1), picked, rows)
        ctx.save_for_backward(logits, labels, lse, target, mine)
        return torch.where(labels != IGNORED, lse - picked, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, lse, target, mine = ctx.saved_tensors
        share = (labels != IGNORED).to(lse.dtype) * grads[0]
        grad = logits.to(lse.dtype).sub(lse.unsqueeze(1)).exp_()
        grad.scatter_add_(1, target, -mine.to(grad.dtype).unsqueeze(1))
        return grad.mul_(share.unsqueeze(1)).to(logits.dtype), None, None, None


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Labels moved so that position t holds what position t predicts.

    Args:
        labels: int64 [samples, seq], position t naming the token that stands at t.

    Returns:
        int64 [samples, seq]; the last position is never counted.
    """
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def token_loss_sum(
    logits: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype, rows: Vocabulary | None = None
) -> torch.Tensor:
    """Cross entropy summed over counted tokens.

    Args:
        logits: [samples, seq, vocab], or of the rows of the vocabulary that are this rank's.
        labels: int64 [samples, seq], shifted, -100 where not counted.
        dtype: what the logits are widened to.
        rows: which, if not all are this rank's.

    Returns:
        A scalar of that dtype.
    """
    if rows is not None:
        spread: Any = _SpreadLoss.apply
        total: torch.Tensor = spread(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), dtype, rows)
        return total
    flat = logits.reshape(-1, logits.shape[-1]).to(dtype)
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction="sum")


def _chunk_eager(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    rows: Vocabulary | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled loss of a chunk, and the gradient of its logits in the dtype of `hidden`."""
    logits = functional.linear(hidden, weight, bias).to(dtype)
    lo = rows.lo if rows else 0
    mine = (labels >= lo) & (labels < lo + logits.shape[1])
    target = (labels - lo).clamp(0, logits.shape[1] - 1).unsqueeze(1)
    lse = torch.logsumexp(logits, dim=1)
    picked = torch.where(mine, logits.gather(1, target).squeeze(1), 0.0)
    if rows is not None:
        lse, picked = across(lse, picked, rows)
    share = (labels != IGNORED).to(dtype) * scale
    loss = ((lse - picked) * share).sum()
    grad = logits.sub_(lse.unsqueeze(1)).exp_()
    grad.scatter_add_(1, target, -mine.to(dtype).unsqueeze(1))
    return loss, grad.mul_(share.unsqueeze(1)).to(hidden.dtype)


def _chunk_fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    rows: Vocabulary | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in a form that a compiler makes two passes over the logits of."""
    logits = functional.linear(hidden, weight, bias).to(dtype)
    share = (labels != IGNORED).to(dtype) * scale
    lse = torch.logsumexp(logits, dim=1)
    lo = rows.lo if rows else 0
    hit = torch.arange(lo, lo + logits.shape[1], device=logits.device).unsqueeze(0) == labels.unsqueeze(1)
    picked = torch.where(hit, logits, 0.0).sum(1)
    if rows is not None:
        lse, picked = across(lse, picked, rows)
    loss = ((lse - picked) * share).sum()
    grad = (torch.exp(logits - lse.unsqueeze(1)) - hit.to(dtype)) * share.unsqueeze(1)
    return loss, grad.to(hidden.dtype)


def _accumulate(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor, *, first: bool) -> None:
    """Total [vocab, hidden] += grad.T @ hidden, without rounding the product where the device allows it; `first`: =."""
    beta = 0 if first else 1
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), hidden, beta=beta)
    elif grad.is_cuda:
        torch.addmm(total, grad.t(), hidden, beta=beta, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(grad.t() @ hidden)
    else:
        total.add_(grad.t() @ hidden)


def _narrowed(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiplied, then narrowed, in one pass."""
    return torch.mul(gradient, factor.to(gradient.dtype), out=torch.empty_like(gradient, dtype=dtype))


def _narrowed_fused(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same for a compiler, whose one pass is the faster one."""
    return (gradient * factor.to(gradient.dtype)).to(dtype)


class _ChunkedHead(torch.autograd.Function):
    """hidden, weight, bias -> scaled loss sum; the gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        scale: torch.Tensor,
        options: tuple[torch.dtype, torch.dtype, int, tuple[Callable[..., Any], Callable[..., Any]], bool, Vocabulary | None],
    ) -> torch.Tensor:
        compute, wide, chunk, (body, ctx.narrowed), learning, vocabulary = options
        rows, narrow = hidden.reshape(-1, hidden.shape[-1]).to(compute), weight.to(compute)
        extra = None if bias is None else bias.to(compute)
        flat = labels.reshape(-1)
        needs = [learning and need for need in ctx.needs_input_grad[:3]]
        d_hidden = torch.empty_like(rows) if needs[0] else None
        d_weight = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if needs[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None
        total = torch.zeros((), dtype=wide, device=rows.device)
        count = -(-rows.shape[0] // chunk)
        for part, piece in zip(rows.chunk(count), flat.chunk(count), strict=True):
            loss, grad = body(part, narrow, extra, piece, scale, wide, vocabulary)
            total += loss
            start = (part.storage_offset() - rows.storage_offset()) // rows.shape[1]
            if d_hidden is not None:
                torch.mm(grad, narrow, out=d_hidden[start : start + part.shape[0]])
            if d_weight is not None:
                _accumulate(d_weight, grad, part, first=start == 0)
            if d_bias is not None:
                d_bias += grad.sum(0, dtype=wide)
        ctx.shape, ctx.dtypes = hidden.shape, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*(t for t in (d_hidden, d_weight, d_bias)))
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads: list[torch.Tensor | None] = []
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if saved is None:
                grads.append(None)
                continue
            alike = saved.dtype == dtype
            grads.append(saved.mul_(outputs[0].to(dtype)) if alike else ctx.narrowed(saved, outputs[0], dtype))
        if grads[0] is not None:
            grads[0] = grads[0].view(ctx.shape)
        return (*grads, None, None, None)


class ChunkedHead:
    """The head of a model, able to return the loss instead of logits while it is armed."""

    def __init__(
        self, head: nn.Linear, chunk_tokens: int, dtype: torch.dtype, *, compiled: bool, vocabulary: Vocabulary | None = None
    ) -> None:
        """Replace the head's forward. `dtype`: what logits are widened to; `vocabulary`: the head's rows, if not all."""
        self._head = head
        self._vocabulary = vocabulary
        self._plain = head.forward
        self._chunk = chunk_tokens
        self._dtype = dtype
        bodies = (_chunk_fused, _narrowed_fused) if compiled else (_chunk_eager, _narrowed)
        self._bodies = tuple(torch.compile(body, dynamic=False) for body in bodies) if compiled else bodies
        self._armed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._made: torch.Tensor | None = None
        instance: Any = head
        instance.forward = self._forward

    def arm(self, labels: torch.Tensor, scale: torch.Tensor) -> None:
        """The next forward of the head returns scale x sum of losses over the shifted `labels` [samples, seq]."""
        self._armed, self._made = (labels, scale), None

    def take(self, output: torch.Tensor) -> torch.Tensor:
        """The loss out of what the model returned as logits, which must be what the head made.

        Raises:
            RuleBroken: the model changes logits after the head, so that a loss in their place is wrong.
        """
        self._armed, made, self._made = None, self._made, None
        if made is None or not (output is made or (made.grad_fn is not None and output.grad_fn is made.grad_fn)):
            raise altered_logits()
        return output

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._armed is None:
            result: torch.Tensor = self._plain(hidden)
            return result
        labels, scale = self._armed
        if hidden.shape[:-1] != labels.shape:
            raise altered_logits()
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        options = (compute, self._dtype, self._chunk, self._bodies, torch.is_grad_enabled(), self._vocabulary)
        with torch.autocast(device, enabled=False):
            apply: Any = _ChunkedHead.apply
            loss: torch.Tensor = apply(hidden, self._head.weight, self._head.bias, labels, scale, options)
        self._made = loss
        return loss


def altered_logits() -> RuleBroken:
    """The refusal of a chunked loss for a model whose logits are not simply the head's output."""
    return RuleBroken(
        "loss.kind is chunked, but this model changes its logits after the head (a scale or a soft cap)",
        fix="set loss.kind = 'model'",
    )


def chunked_head(
    model: nn.Module,
    anatomy: Anatomy,
    chunk_tokens: int,
    dtype: torch.dtype,
    *,
    compiled: bool,
    vocabulary: Vocabulary | None = None,
) -> ChunkedHead:
    """Make the model's head able to return the loss.

    Raises:
        BadInput: no linear head was found.
    """
    head = model.get_submodule(anatomy.head) if anatomy.head else None
    if not isinstance(head, nn.Linear):
        raise BadInput(
            f"loss.kind is chunked, but the head is {'missing' if head is None else type(head).__name__}, not nn.Linear",
            fix="set loss.kind = 'model', or name the layer that makes logits in model.head",
        )
    return ChunkedHead(head, chunk_tokens, dtype, compiled=compiled, vocabulary=vocabulary)
