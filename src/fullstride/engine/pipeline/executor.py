"""Walks a rank's actions: what the simulator priced is what runs.

Forward keeps, for each chunk and range of samples, the hidden state that came in and where backward begins; the hidden state
that went out is let go of. A backward split in two computes the gradients of inputs first and puts those of weights off (see
`deferred.py`). Gradients of weights are reduced over data-parallel ranks as the carrier does it, in the last backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fullstride.engine.deferred import Deferred
from fullstride.engine.pipeline.cut import Cut
from fullstride.engine.pipeline.exchange import Exchange
from fullstride.engine.pipeline.held import Held
from fullstride.engine.pipeline.reducing import Reducing
from fullstride.plan.schedule.action import Action
from fullstride.plan.schedule.generators import FINAL, complete
from fullstride.plan.schedule.orders import Order
from fullstride.plan.schedule.placement import cuts
from fullstride.plan.schedule.text import Schedule

Forward = Callable[[int, int, bool], torch.Tensor]
"""(lo, hi, last): calls the model on samples [lo, hi); returns the scaled loss if this is the last stage, else logits that
mean nothing."""
Phase = Callable[..., contextlib.AbstractContextManager[object]]
"""Stands around each computation and each wait for a message: (`forward`, `backward`, `weight_grad` or `comm`, micro_batch=,
stage=)."""
Range = tuple[int, int, int]
"""(chunk, lo, hi)."""


@dataclasses.dataclass
class _Open:
    """A micro-batch between forward and backward."""

    received: torch.Tensor | None
    edge: GradientEdge | None
    """Where backward begins; None if nothing in the stage learns."""


class Executor:
    """One rank's part of a pipeline."""

    def __init__(self, schedule: Schedule, rank: int, cut: Cut, reducing: Reducing, exchange: Exchange, length: int) -> None:
        """Take the actions of a pipeline rank from a schedule that has been checked; `length`: tokens of a sample."""
        self._length = length
        self._schedule, self._rank = schedule, rank
        self._actions = [action for action in schedule.actions if action.rank == rank]
        self._cut, self._reducing, self._exchange = cut, reducing, exchange
        self._last = {a.chunk: a for a in self._actions if a.kind in FINAL}
        self._open: dict[Range, _Open] = {}
        self._put_off: dict[Range, Deferred] = {}
        self._states = [Held() for _ in cut.chunks]
        self._grads = [Held() for _ in cut.chunks]
        self._out: dict[tuple[str, int], Held] = {}
        self._losses: list[torch.Tensor] = []

    def step(self, forward: Forward, phase: Phase) -> list[torch.Tensor]:
        """Carry out one step, but for the optimizer.

        Args:
            forward: see `Forward`.
            phase: see `Phase`.

        Returns:
            Losses of the micro-batches, if this rank has the last stage.
        """
        self._losses = []
        self._exchange.begin(self._actions)
        self._reducing.begin()
        do: dict[str, Callable[[Action], None]] = {
            "forward": lambda action: self._forward(action, forward),
            "backward": self._backward,
            "input_grad": self._backward,
            "weight_grad": self._weight_grad,
            "reduce": lambda action: self._reducing.reduce(action.chunk),
        }
        for action in self._actions:
            where = {"micro_batch": action.lo, "stage": self._cut.chunks[action.chunk].stage}
            if action.kind in _PHASES:
                with phase(_PHASES[action.kind], **where):
                    do.get(action.kind, self._move)(action)
            else:
                do.get(action.kind, self._move)(action)
        self._exchange.finish()
        assert not self._open and not self._put_off and not self._out, "a schedule that was checked leaves nothing behind"
        return self._losses

    @torch.no_grad()
    def evaluate(self, forward: Forward, samples: int, size: int) -> list[torch.Tensor]:
        """Forward alone, any number of samples.

        Args:
            forward: see `Forward`.
            samples: in all.
            size: samples of a micro-batch.

        Returns:
            Losses of the micro-batches, if this rank has the last stage.
        """
        self._losses = []
        actions = [a for a in forward_only(self._schedule, samples, size) if a.rank == self._rank and a.kind != "optimizer"]
        self._exchange.begin(actions)
        for action in actions:
            if action.kind == "forward":
                self._forward(action, forward)
            else:
                self._move(action)
        self._exchange.finish()
        return self._losses

    def _move(self, action: Action) -> None:
        """Send or receive; the optimizer is the Run's."""
        chunk = action.chunk
        if action.kind.startswith("send"):
            held = self._out[action.kind, chunk]
            self._exchange.send(action, held.take(action.lo, action.hi))
            if not len(held):
                del self._out[action.kind, chunk]
        elif action.kind.startswith("recv"):
            store = self._states if action.kind == "recv_forward" else self._grads
            store[chunk].put(action.lo, action.hi, self._exchange.receive(action))

    def _forward(self, action: Action, forward: Forward) -> None:
        chunk, lo, hi = action.chunk, action.lo, action.hi
        own, received = self._cut.chunks[chunk], None
        learning = torch.is_grad_enabled()
        if not own.first:
            received = self._states[chunk].take(lo, hi).detach().requires_grad_(learning)
        result = self._cut.run(chunk, (hi - lo, self._length), received, lambda: forward(lo, hi, own.last))
        if learning:
            edge = get_gradient_edge(result) if result.requires_grad else None
            self._open[chunk, lo, hi] = _Open(received, edge)
        if own.last:
            self._losses.append(result.detach())
        else:
            self._hand_over("send_forward", chunk, lo, hi, result.detach())

    def _backward(self, action: Action) -> None:
        chunk, lo, hi = action.chunk, action.lo, action.hi
        own, open_ = self._cut.chunks[chunk], self._open.pop((chunk, lo, hi))
        grad = None if own.last else self._grads[chunk].take(lo, hi)
        deferred = Deferred()
        collecting: Any = deferred.collect() if action.kind == "input_grad" else contextlib.nullcontext()
        if open_.edge is not None:
            with collecting, self._reducing.around(action.kind, action is self._last[chunk]):
                torch.autograd.backward((open_.edge,), None if grad is None else (grad,))
        if action.kind == "input_grad":
            self._put_off[chunk, lo, hi] = deferred
        if open_.received is not None:
            handed = open_.received.grad
            self._hand_over("send_backward", chunk, lo, hi, torch.zeros_like(open_.received) if handed is None else handed)

    def _weight_grad(self, action: Action) -> None:
        deferred = self._put_off.pop((action.chunk, action.lo, action.hi))
        self._reducing.weights(action.chunk, deferred, action is self._last[action.chunk])

    def _hand_over(self, kind: str, chunk: int, lo: int, hi: int, tensor: torch.Tensor) -> None:
        """To the neighbour on this rank, or to what the next sends take."""
        stage = self._cut.chunks[chunk].stage + (1 if kind == "send_forward" else -1)
        here = next((place for place, other in enumerate(self._cut.chunks) if other.stage == stage), None)
        if here is None:
            self._out.setdefault((kind, chunk), Held()).put(lo, hi, tensor)
        else:
            (self._states if kind == "send_forward" else self._grads)[here].put(lo, hi, tensor)


_PHASES = {
    "forward": "forward",
    "backward": "backward",
    "input_grad": "backward",
    "weight_grad": "weight_grad",
    "recv_forward": "comm",
    "recv_backward": "comm",
}


def forward_only(schedule: Schedule, samples: int, size: int) -> tuple[Action, ...]:
    """Actions that bring samples forward through all stages, chunk by chunk on each rank."""
    where = schedule.placement
    parts = cuts(0, samples, size)
    order: Order = [("forward", chunk, lo, hi) for chunk in range(where.chunks) for lo, hi in parts]
    return complete([order] * where.pp, where, samples, (size,) * where.num_stages)
