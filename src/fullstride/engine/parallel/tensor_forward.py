"""Forwards that stand in for those of a model's instances under tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy_region import is_transposed
from fullstride.engine.parallel.collectives import Ranks
from fullstride.engine.parallel.tensor_exit import Exit, Hold, Send
from fullstride.engine.parallel.tensor_ops import (
    Columns,
    Enter,
    Entered,
    Leave,
    Reading,
    Row,
    Scatter,
    Sum,
    SumInside,
    read_in_parts,
)
from fullstride.engine.parallel.tensor_parts import Border


def replace(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one instance; its class, name and weights stay."""
    instance: Any = module
    instance.forward = forward


def crossing(forward: Callable[..., Any], group: Group | None, border: Border, *, closed: bool = False) -> Callable[..., Any]:
    """A region's forward between its borders; the hidden state is its first argument, and the first of its results.

    `closed`: its last product sums over the ranks itself.
    """

    def forward_across(*args: Any, **kwargs: Any) -> Any:
        leave: Any = Leave.apply
        hidden = _autocast(args[0] if args else kwargs["hidden_states"])
        whole = _enter(hidden, group, border)
        try:
            out = forward(whole, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": whole})
        finally:
            if group is not None:
                group.close()
        if closed:
            return out
        if isinstance(out, tuple):
            return (leave(out[0], border), *out[1:])
        return leave(out, border)

    return forward_across


def _enter(hidden: torch.Tensor, group: Group | None, border: Border) -> torch.Tensor:
    """The whole hidden state, and the group ready for its products."""
    if group is not None and group.in_parts:
        return group.open_in_parts(hidden)
    enter: Any = Enter.apply
    whole: torch.Tensor = enter(hidden, border)
    if group is not None:
        group.open(hidden, whole)
    return whole


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


def closing(module: Any, how: Exit) -> Callable[..., Any]:
    """The product that ends a region, and its sum over the ranks."""

    def product(hidden: torch.Tensor) -> torch.Tensor:
        hold: Any = Hold.apply
        send: Any = Send.apply
        weight, bias = module.weight, module.bias
        held, place = hold(_autocast(hidden), weight, bias, how.transposed)
        made: torch.Tensor = send(held, place, weight, bias, how)
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

    def __init__(self, members: list[Any], border: Border, keep: bool, in_parts: bool = False) -> None:
        """`keep`: the whole input is kept for backward, not gathered again there (where it is recomputed anyway).

        `in_parts`: products are made with the gather, before the region's own code runs.
        """
        self.members, self.border, self.keep, self.in_parts = members, border, keep, in_parts
        self.part: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None
        self.made: list[torch.Tensor] = []

    def open(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """A region begins: its input outside and inside."""
        self.part, self.whole, self.made = part, whole, []

    def open_in_parts(self, part: torch.Tensor) -> torch.Tensor:
        """A region begins, its products made beside the gather of its input, which is returned."""
        how, weights, biases = self._reading(ready=True), [m.weight for m in self.members], [m.bias for m in self.members]
        columns: Any = Columns.apply
        entered: Any = Entered.apply
        whole, made = read_in_parts(part, weights, biases, how)
        self.made = list(columns(part, whole, how, *weights, *biases, *made))
        self.whole = entered(part, whole, self.border)
        return self.whole

    def _reading(self, *, ready: bool) -> Reading:
        return Reading(self.border, is_transposed(self.members[0]), self.keep, len(self.members), ready)

    def close(self) -> None:
        """It ends, and lets go of them."""
        self.part, self.whole, self.made = None, None, []

    def take(self, index: int) -> torch.Tensor:
        """The result of one member, [samples, seq, columns]."""
        if not self.made:
            assert self.part is not None and self.whole is not None
            weights, biases = [m.weight for m in self.members], [m.bias for m in self.members]
            apply: Any = Columns.apply
            self.made = list(apply(self.part, self.whole.detach(), self._reading(ready=False), *weights, *biases))
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
