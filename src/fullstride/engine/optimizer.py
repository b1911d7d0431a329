"""AdamW on the parts that a rank holds, with exact clipping by the global norm.

Decoupled weight decay after Loshchilov and Hutter (2019), on matrices only. The clip factor goes into the fused kernel as its
gradient scale, so that clipping costs no pass of its own, and a norm that is not finite skips the update on the device, so that
nobody waits for it. On a GPU `fused` is our own kernel for large tensors with fp32 masters (`adamw_kernel.py`), and torch's for
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from fullstride.engine.compiling import compile_available
from fullstride.engine.precision import Weights, local
from fullstride.plan.plan import Recipe

_PIECE_ELEMENTS = 64 * 2**20
"""Gradients are widened, where weights are cast, this many elements at a time."""
_LARGE = 2**16
"""Elements from which a kernel of its own costs a tensor less than its share of torch's kernel for many."""
OnePass = Callable[..., None]
"""`adamw_kernel.step`."""


def one_pass(master: torch.Tensor, implementation: str) -> OnePass | None:
    """Our kernel, where the plan wants a fused one and there is a GPU that it can be compiled for."""
    if implementation != "fused" or master.device.type != "cuda" or master.dtype != torch.float32:
        return None
    if compile_available(master.device):
        return None
    from fullstride.engine.adamw_kernel import step  # imports Triton, which is not everywhere

    return step


def global_norm(grads: list[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device) -> torch.Tensor:
    """The 2-norm over all gradients, summed in fp32 or wider.

    Args:
        grads: this rank's parts; each element of the model's gradient on exactly one rank of `group`.
        group: ranks that hold parts; None if this rank holds all.
        device: where the result lies when there are no gradients.

    Returns:
        A scalar on the device, equal on all ranks.
    """
    parts = [grad for grad in grads if grad.numel()]
    wide = torch.promote_types(parts[0].dtype, torch.float32) if parts else torch.float32
    total = torch.zeros((), dtype=wide, device=device)
    if parts:
        total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts, 2, dtype=wide)))
    if group is not None:
        total = total.square()
        dist.all_reduce(total, group=group)
        total = total.sqrt()
    return total


class AdamW(torch.optim.Optimizer):
    """AdamW over a model's masters; its states exist from the start.

    `step()` is for hand-written loops and steps unclipped; `update` does what a Run needs. Bias correction follows
    `num_steps`, skipped steps included, so that a step number restores it.
    """

    def __init__(self, weights: Weights, recipe: Recipe, implementation: Literal["fused", "foreach", "loop"]) -> None:
        """Make zero moments for every trainable parameter."""
        self._weights = weights
        self._implementation = implementation
        self._one_pass = one_pass(local(weights.masters[0]), implementation)
        trainable = [i for i, p in enumerate(weights.params) if p.requires_grad]
        self._groups = [[i for i in trainable if (weights.params[i].ndim >= 2) is matrices] for matrices in (True, False)]
        groups: list[dict[str, Any]] = [
            {"params": [weights.masters[i] for i in members], "weight_decay": decay}
            for members, decay in zip(self._groups, (recipe.weight_decay, 0.0), strict=True)
            if members
        ]
        self._groups = [members for members in self._groups if members]
        super().__init__(groups, {"lr": recipe.learning_rate, "betas": (recipe.beta1, recipe.beta2), "eps": recipe.eps})
        self.num_steps = 0
        device = local(weights.masters[0]).device
        # One vector, one view a parameter: a single kernel sets them all.
        self._counts = torch.zeros(len(weights.params), device=device)
        for index in trainable:
            first, second = self._zero_moments(index)
            self.state[weights.masters[index]] = {"exp_avg": first, "exp_avg_sq": second}

    def _zero_moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        master = self._weights.masters[index]
        return torch.zeros_like(master), torch.zeros_like(master)

    def moments(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`exp_avg` and `exp_avg_sq` of parameter `index`, live; None if it is frozen."""
        state = self.state.get(self._weights.masters[index])
        return (state["exp_avg"], state["exp_avg_sq"]) if state else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients (they are always set to None)."""
        self._weights.clear()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update once from the gradients as they are.

        Args:
            closure: called first, with gradients enabled, as torch's optimizers do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._weights.settle()
        self.update(None, None)
        return loss

    @torch.no_grad()
    def update(self, divisor: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Update once.

        Args:
            divisor: scalar on the device by which gradients are divided first.
            found_inf: scalar on the device; 1 leaves weights and moments as they are.
        """
        if self._cannot_skip(found_inf):
            return
        self._counts.fill_(self.num_steps)
        counts = self._counts.unbind()
        for group, members in zip(self.param_groups, self._groups, strict=True):
            rest = [index for index in members if not self._update_large(group, index, divisor, found_inf)]
            for piece in self._pieces(rest):
                self._update_piece(group, piece, counts, divisor, found_inf)
        self.num_steps += 1

    def _cannot_skip(self, found_inf: torch.Tensor | None) -> bool:
        """Whether this step is void and was skipped here: plain implementations cannot do it on the device, so they wait."""
        void = self._implementation != "fused" and found_inf is not None and bool(found_inf)
        self.num_steps += void
        return void

    def _update_large(
        self, group: dict[str, Any], index: int, divisor: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> bool:
        """Whether our kernel took this parameter."""
        weights = self._weights
        master, gradient = local(weights.masters[index]), weights.gradient(index)
        if self._one_pass is None or gradient is None or master.numel() < _LARGE:
            return False
        state, narrow = self.state[weights.masters[index]], weights.narrow(index)
        parts = master, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"])
        if not all(part.is_contiguous() for part in (*parts, master if narrow is None else narrow)):
            return False
        self._one_pass(*parts, narrow, group, self.num_steps + 1, divisor, found_inf)
        return True

    def _pieces(self, members: list[int]) -> Iterator[list[int]]:
        """Parameters that have a gradient, all at once or, where it must be widened, some at a time."""
        piece, size = [], 0
        for index in members:
            grad = self._weights.gradient(index)
            if grad is None or not grad.numel():
                continue
            piece.append(index)
            size += grad.numel()
            if self._weights.cast and size >= _PIECE_ELEMENTS:
                yield piece
                piece, size = [], 0
        if piece:
            yield piece

    def _update_piece(
        self,
        group: dict[str, Any],
        piece: list[int],
        counts: tuple[torch.Tensor, ...],
        divisor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        weights = self._weights
        masters = [local(weights.masters[i]) for i in piece]
        found = [weights.gradient(i) for i in piece]
        grads = [g.to(m.dtype) for g, m in zip(found, masters, strict=True) if g is not None]
        states = [self.state[weights.masters[i]] for i in piece]
        firsts, seconds = [local(state["exp_avg"]) for state in states], [local(state["exp_avg_sq"]) for state in states]
        self._kernel(group, masters, grads, firsts, seconds, [counts[i] for i in piece], divisor, found_inf)
        weights.publish(piece)

    def _kernel(
        self,
        group: dict[str, Any],
        masters: list[torch.Tensor],
        grads: list[torch.Tensor],
        firsts: list[torch.Tensor],
        seconds: list[torch.Tensor],
        counts: list[torch.Tensor],
        divisor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        """One call of torch's AdamW on plain tensors of one dtype, `grads` to be divided first."""
        # The fused kernel takes its scale in fp32: in fp64 that would round.
        inside = self._implementation == "fused" and masters[0].dtype == torch.float32
        if divisor is not None and not inside:
            torch._foreach_div_(grads, divisor.to(grads[0].dtype))
        adamw(
            masters,
            grads,
            firsts,
            seconds,
            [],
            counts,
            foreach=self._implementation == "foreach",
            fused=self._implementation == "fused",
            grad_scale=divisor.float() if divisor is not None and inside else None,
            found_inf=found_inf if self._implementation == "fused" else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
