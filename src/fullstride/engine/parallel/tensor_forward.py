"""Forwards that stand in for those of a model's instances under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy_region import is_transposed
from fullstride.engine.parallel.collectives import Ranks
from fullstride.engine.parallel.tensor_ops import Border, Columns, Enter, Leave, Row, Scatter, Sum, SumInside


def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one instance; its class, name and weights stay."""
    instance: Any = module
    instance.forward = forward


def crossing(forward: Callable[..., Any], group: Group | None, border: Border) -> Callable[..., Any]:
    """A region's forward between its borders; the hidden state is its first argument, and the first of its results."""

    def forward_across(*args: Any, **kwargs: Any) -> Any:
        enter: Any = Enter.apply
        leave: Any = Leave.apply
        hidden = _autocast(args[0] if args else kwargs["hidden_states"])
        whole = enter(hidden, border)
        if group is not None:
            group.open(hidden, whole)
        try:
            out = forward(whole, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": whole})
        finally:
            if group is not None:
                group.close()
        if isinstance(out, tuple):
            return (leave(out[0], border), *out[1:])
        return leave(out, border)

    return forward_across


def column(module: Any, group: Group, index: int) -> Callable[..., Any]:
    """A product that reads its region's input: with the others of its group, or by itself when it is handed something else."""

    def product(hidden: torch.Tensor) -> torch.Tensor:
        if group.whole is hidden:
            return group.take(index)
        weight = module.weight.t() if is_transposed(module) else module.weight
        return nn.functional.linear(hidden, weight, module.bias)

    return product


def row(module: Any, first: bool) -> Callable[..., Any]:
    """A product that makes one rank's term; the first rank adds the bias."""

    def product(hidden: torch.Tensor) -> torch.Tensor:
        hidden = _autocast(hidden)
        apply: Any = Row.apply
        made: torch.Tensor = apply(hidden, module.weight, module.bias, (is_transposed(module), first))
        return made

    return product


def wide_norm(module: Any, ranks: Ranks, copies: int) -> Callable[..., Any]:
    """Root mean square over all heads (Zhang and Sennrich, 2019), from each rank's sum of squares."""
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0

    def norm(hidden: torch.Tensor) -> torch.Tensor:
        apply: Any = SumInside.apply
        wide = hidden.float()
        count = hidden.shape[-1] * ranks.size / copies
        mean = apply(wide.square().sum(-1, keepdim=True), ranks) / (copies * count)
        made: torch.Tensor = (module.weight * (wide * torch.rsqrt(mean + eps))).to(hidden.dtype)
        return made

    return norm


class Group:
    """The products that read one region's input, made together when the first is asked for."""

    def __init__(self, members: list[nn.Module], border: Border, keep: bool) -> None:
        """`keep`: the whole input is kept for backward, not gathered again there (where it is recomputed anyway)."""
        self.members, self.border, self.keep = members, border, keep
        self.part: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None
        self.made: list[torch.Tensor] = []

    def open(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """A region begins: its input outside and inside."""
        self.part, self.whole, self.made = part, whole, []

    def close(self) -> None:
        """It ends, and lets go of them."""
        self.part, self.whole, self.made = None, None, []

    def take(self, index: int) -> torch.Tensor:
        """The result of one member, [samples, seq, columns]."""
        if not self.made:
            assert self.part is not None and self.whole is not None
            weights = [m.weight for m in self.members]
            biases = [m.bias for m in self.members]
            options = (is_transposed(self.members[0]), self.keep, len(weights))
            apply: Any = Columns.apply
            self.made = list(apply(self.part, self.whole.detach(), self.border, options, *weights, *biases))
        return self.made[index]


def _autocast(hidden: torch.Tensor) -> torch.Tensor:
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def scattering(border: Border) -> Any:
    """A pre-hook that cuts the sequence of the hidden state."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        scatter: Any = Scatter.apply
        if args:
            return (scatter(args[0], border), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": scatter(kwargs["hidden_states"], border)}

    return hook


def entering(border: Border) -> Any:
    """A hook behind which a region begins that does not end: that of the head."""

    def hook(_module: nn.Module, _args: Any, out: Any) -> Any:
        enter: Any = Enter.apply
        return (enter(out[0], border), *out[1:]) if isinstance(out, tuple) else enter(out, border)

    return hook


def looking_up(forward: Callable[..., Any], lo: int, hi: int, ranks: Ranks) -> Callable[..., Any]:
    """Each rank looks up its own rows, zero for the others, and the sum is everybody's."""

    def embed(ids: torch.Tensor) -> torch.Tensor:
        apply: Any = Sum.apply
        mine = (ids >= lo) & (ids < hi)
        found = forward((ids - lo).clamp(0, hi - lo - 1)).masked_fill(~mine.unsqueeze(-1), 0.0)
        whole: torch.Tensor = apply(found, ranks)
        return whole

    return embed
