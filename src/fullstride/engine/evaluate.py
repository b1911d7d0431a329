"""Loss on held-out data."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fullstride.engine.data.loader import Loader


class Evaluable(Protocol):
    """The part of a Run that evaluation needs."""

    def evaluate(self, batch: dict[str, Tensor]) -> tuple[float, int]:
        """Sum of the loss over the tokens that count, and their number, over the world."""
        ...


def held_out_loss(run: Evaluable, loader: Loader, steps: int) -> tuple[float, int]:
    """Mean loss per token over the first `steps` batches of a loader, the same batches at every call.

    Args:
        run: evaluated without training it.
        loader: of the held-out corpus; read by `batch`, so its position does not move.
        steps: batches of the whole world, each as large as a step's.

    Returns:
        The mean over all tokens that count, and how many there were.
    """
    total, tokens = 0.0, 0
    for step in range(steps):
        loss_sum, count = run.evaluate(loader.batch(step * loader.per_step))
        total, tokens = total + float(loss_sum), tokens + int(count)
    return total / max(1, tokens), tokens
