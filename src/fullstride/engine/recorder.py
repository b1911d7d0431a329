"""Step times and results to events, without making the device wait.

On a CPU a step ends when `run.step` returns. On a GPU the host runs ahead: an event on the device's stream marks each
boundary, and results are read on a stream of their own two steps later, so that nothing that is queued is waited for.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullstride.engine.failures import NotFinite
from fullstride.events import EventWriter, StepEnd, now_ns

_cuda: Any = torch.cuda  # untyped

LAG = 2
"""Steps that a result is read late on a GPU, one on a CPU (where reading never waits)."""


class Result(Protocol):
    """A step's result; reading it may wait for the device."""

    @property
    def loss(self) -> float:
        """Mean per token over the world."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that counted, over the world."""
        ...

    @property
    def grad_norm(self) -> float:
        """Before clipping."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of this step."""
        ...

    @property
    def skipped(self) -> bool:
        """Whether the update was left out because the norm was not finite."""
        ...


@dataclass
class _Pending:
    step: int
    start: Any
    end: Any
    result: Result
    order: str


class Clock:
    """Boundaries of steps as nanoseconds of the host's clock, from whichever clock the device has."""

    def __init__(self, device: torch.device) -> None:
        """On CUDA, tie the device's clock to the host's by one synchronisation."""
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._base = _cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            self._base.record()
            self._base.synchronize()
            self._base_ns = now_ns()

    def mark(self) -> Any:
        """A boundary, now: cheap, waits for nothing."""
        if not self._cuda:
            return now_ns()
        event = _cuda.Event(enable_timing=True)
        event.record()
        return event

    def nanoseconds(self, mark: Any) -> int:
        """The host's time of a boundary that the device has passed."""
        return self._base_ns + int(self._base.elapsed_time(mark) * 1e6) if self._cuda else int(mark)


class StepRecorder:
    """Writes StepEnd events late, in order.

    Attributes:
        losses: of the steps written so far.
    """

    def __init__(self, writer: EventWriter, device: torch.device, samples_per_step: int) -> None:
        """Write to `writer`; `samples_per_step` counts the whole world."""
        self.losses: list[float] = []
        self._writer, self._device, self._samples = writer, device, samples_per_step
        self._clock = Clock(device)
        self._pending: deque[_Pending] = deque()
        self._side = _cuda.Stream(device) if device.type == "cuda" else None
        self._last = self._clock.mark()

    def begin(self) -> None:
        """The time since the last step belongs to no step: an order begins, a checkpoint was made."""
        self._last = self._clock.mark()

    def step(self, step: int, result: Result, order: str = "") -> None:
        """A step has been issued; writes those that are due.

        Raises:
            NotFinite: the loss of a step that is now read is no number.
        """
        end = self._clock.mark()
        self._pending.append(_Pending(step, self._last, end, result, order))
        self._last = end
        while len(self._pending) > (LAG if self._side else 1):
            self._write(self._pending.popleft())

    def finish(self) -> None:
        """Write all that is left; waits for the device. Raises like `step`, after all is written."""
        error: NotFinite | None = None
        while self._pending:
            try:
                self._write(self._pending.popleft())
            except NotFinite as met:
                error = error or met
        self._writer.flush()
        if error:
            raise error

    def _write(self, pending: _Pending) -> None:
        if self._side:
            # The side stream waits for this step alone, so reading there does not wait for the steps queued since.
            self._side.wait_event(pending.end)
            with torch.cuda.stream(self._side):
                self._emit(pending)
        else:
            self._emit(pending)

    def _emit(self, pending: _Pending) -> None:
        result = pending.result
        loss = float(result.loss)
        if self._side:
            pending.end.synchronize()
        event = StepEnd(
            time_ns=self._clock.nanoseconds(pending.end),
            step=pending.step,
            start_ns=self._clock.nanoseconds(pending.start),
            samples=self._samples,
            tokens=int(result.tokens),
            loss=loss,
            grad_norm=float(result.grad_norm),
            lr=float(result.lr),
            skipped=bool(result.skipped),
            order=pending.order,
        )
        self._writer.write(event)
        self.losses.append(loss)
        if not math.isfinite(loss):
            raise NotFinite(f"the loss of step {pending.step} is {loss}", fix="lower the learning rate or use fp32")
