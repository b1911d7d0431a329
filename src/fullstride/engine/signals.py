"""Being asked to stop: SIGTERM and SIGINT set a flag, and all ranks agree on the step after which they stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fullstride.engine.process import Ancestors

_CHECK_EVERY = 20


class StopFlag:
    """Asked once a step by all ranks. The answer is one step old: nobody waits for the message that carries it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Take over SIGTERM and SIGINT. `group`: a gloo group of all ranks; None for one rank."""
        self.asked = False
        self._group, self._turn = group, 0
        self._ancestors = Ancestors(1)
        self._flag: torch.Tensor | None = None
        self._work: Any = None
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def agreed(self) -> bool:
        """Whether a rank had been asked to stop by the previous call; the same answer on all ranks."""
        self._turn += 1
        if self._turn % _CHECK_EVERY == 0 and self._ancestors.gone():
            self.asked = True
        if self._group is None:
            return self.asked
        answer = self._answer()
        self._flag = torch.tensor([int(self.asked)])
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer

    def _answer(self) -> bool:
        if self._work is None or self._flag is None:
            return False
        self._work.wait()
        return bool(self._flag.item())

    def close(self) -> None:
        """Give the signals back."""
        self._answer()
        for number, handler in self._before.items():
            signal.signal(number, handler)
