"""What carries a model over data-parallel ranks, as the rest of the engine sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fullstride.engine.anatomy import Unit
from fullstride.engine.optimizer import AdamW
from fullstride.engine.precision import Weights
from fullstride.plan.plan import Plan

Make = Callable[[Unit], None]
"""Gives a unit's weights memory and values."""


class Carrier:
    """A model laid over data-parallel ranks.

    Attributes:
        module: what is called for a forward.
    """

    def __init__(self, module: nn.Module) -> None:
        """Hold the module."""
        self.module = module

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Stands around forward and backward of a micro-batch; gradients are whole after the last one."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Let the device wait for all reductions; to be called after the last backward, before gradients are read."""

    def reshard(self) -> None:
        """Free gathered weights, so that the next forward gathers the current ones."""

    def weights(self, *parts: Any) -> Weights:
        """The model's weights, once it is laid out; `parts` as `Weights` takes them."""
        return Weights(*parts)

    def optimizer(self, weights: Weights, plan: Plan) -> AdamW:
        """Steps what this rank holds."""
        return AdamW(weights, plan.recipe, plan.optimizer.implementation)


class Holding(Carrier):
    """A carrier whose gradients may wait until a schedule says that they are final."""

    def hold(self, on: bool) -> None:
        """While on, backward only adds gradients up on this rank, and `micro_batch` says nothing about the last one."""
        raise NotImplementedError

    def reduce(self, units: Sequence[str]) -> None:
        """Begin to reduce the gradients of these units (named as `anatomy.units` does), which are final.

        The ranks that share a parameter must ask for the same units in the same order.
        """
        raise NotImplementedError
