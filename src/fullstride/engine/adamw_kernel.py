"""AdamW in one pass over memory, by Triton, which comes with torch for GPUs.

torch's fused AdamW takes gradients in the masters' dtype and leaves narrow weights to a copy: with bf16 weights and gradients
that is 40 bytes a parameter moved, and here it is 28. The formulae are those of torch's kernel (Loshchilov and Hutter, 2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

_BLOCK = 1024
# Triton reads a kernel's annotations as code: they can name its own types alone.


@triton.jit  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    master_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    narrow_ptr,
    divisor_ptr,
    void_ptr,
    count,
    lr,
    rest1,
    rest2,
    eps,
    decay,
    correction1,
    root_correction2,
    divides: tl.constexpr,
    skips: tl.constexpr,
    narrows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    if skips:  # noqa: SIM102 (decided at compile time, the inner one is not)
        if tl.load(void_ptr) != 0.0:
            return
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    grad = tl.load(grad_ptr + at, mask=inside).to(tl.float32)
    if divides:
        grad = grad / tl.load(divisor_ptr)
    master = tl.load(master_ptr + at, mask=inside)
    first = tl.load(first_ptr + at, mask=inside)
    second = tl.load(second_ptr + at, mask=inside)
    master -= lr * decay * master
    first += rest1 * (grad - first)
    second += rest2 * (grad * grad - second)
    master -= (lr / correction1) * first / (tl.sqrt(second) / root_correction2 + eps)
    tl.store(first_ptr + at, first, mask=inside)
    tl.store(second_ptr + at, second, mask=inside)
    tl.store(master_ptr + at, master, mask=inside)
    if narrows:
        tl.store(narrow_ptr + at, master.to(narrow_ptr.dtype.element_ty), mask=inside)


def step(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    narrow: torch.Tensor | None,
    group: dict[str, Any],
    number: int,
    divisor: torch.Tensor | None,
    void: torch.Tensor | None,
) -> None:
    """Update fp32 masters and their moments; all contiguous and of one shape.

    Args:
        master: to be stepped.
        gradient: in any floating dtype.
        first: moment, fp32.
        second: moment, fp32.
        narrow: where the new masters are written in another dtype as well.
        group: `lr`, `betas`, `eps` and `weight_decay` as torch's optimizers hold them.
        number: of this step, from 1.
        divisor: fp32 scalar by which gradients are divided first.
        void: scalar; 1 leaves everything as it is.
    """
    beta1, beta2 = group["betas"]
    count = master.numel()
    _adamw[(triton.cdiv(count, _BLOCK),)](
        master,
        gradient,
        first,
        second,
        master if narrow is None else narrow,
        master if divisor is None else divisor,
        master if void is None else void,
        count,
        group["lr"],
        1 - beta1,
        1 - beta2,
        group["eps"],
        group["weight_decay"],
        1 - beta1**number,
        math.sqrt(1 - beta2**number),
        divides=divisor is not None,
        skips=void is not None,
        narrows=narrow is not None,
        block=_BLOCK,
    )
