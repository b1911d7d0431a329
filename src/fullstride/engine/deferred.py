"""Weight gradients that can wait: a backward may be split into its input half and its weight half.

Linear layers that compute their own backward ask `gradient` for the weight's part. Usually it is computed at once; while a
`Deferred` collects, it is put into its list and computed when the schedule says so, after which it reaches the parameter by
autograd's own accumulation, hooks included. (Post-accumulate hooks also fire in the first half, where no gradient is yet.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

Make = Callable[[], torch.Tensor]

_collecting: list[Deferred] = []


class Deferred:
    """Weight gradients of one stage and one range of samples."""

    def __init__(self) -> None:
        """Begin empty."""
        self._waiting: list[tuple[torch.Tensor, Make]] = []

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Weight gradients of the backward inside wait here."""
        _collecting.append(self)
        try:
            yield
        finally:
            _collecting.remove(self)

    def put(self, weight: torch.Tensor, make: Make) -> None:
        """Let a gradient wait."""
        self._waiting.append((weight, make))

    @property
    def weights(self) -> list[torch.Tensor]:
        """Whose gradients wait, in the order in which they came."""
        return [weight for weight, _ in self._waiting]

    def run(self, made: Callable[[torch.Tensor], None] | None = None) -> None:
        """Compute what waits, in the order in which it came, and accumulate it.

        Args:
            made: called with each weight once its gradient has been accumulated.
        """
        waiting, self._waiting = self._waiting, []
        for number, (weight, make) in enumerate(waiting):
            with torch.no_grad():
                grad = make()
            waiting[number] = (weight, torch.Tensor)  # lets go of the inputs
            torch.autograd.backward((weight,), (grad,))
            if made is not None:
                made(weight)


def gradient(weight: torch.Tensor, make: Make) -> torch.Tensor | None:
    """A weight's gradient for the end of an autograd function's backward.

    Args:
        weight: the parameter, a leaf.
        make: computes its gradient.

    Returns:
        The gradient, or None if it waits.
    """
    if _collecting:
        _collecting[-1].put(weight, make)
        return None
    return make()
