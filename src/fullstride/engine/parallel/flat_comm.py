"""The collectives of flat buffers, and the side streams they run on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 gave both a new name and warns at the old one.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Join the equal parts of all ranks; `part` may be this rank's place in `whole`."""
    _gather(whole, part, group=group)


def scatter_mean(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the mean of `whole` over the ranks. NCCL divides by itself, gloo does not."""
    if part.is_cuda:
        _scatter(part, whole, op=dist.ReduceOp.AVG, group=group)
    else:
        _scatter(part, whole, group=group)
        part.div_(group.size())


def mean(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The mean over the ranks, in place."""
    if tensor.is_cuda:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    else:
        dist.all_reduce(tensor, group=group)
        tensor.div_(group.size())


class Lane:
    """A stream beside the one that computes. On a CPU there is none: work is done at once."""

    def __init__(self, device: torch.device, *, urgent: bool = True) -> None:
        """Make it; what is urgent, as collectives are, goes before computation where both could run."""
        priority = -1 if urgent else 0
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def after_compute(self, event: torch.cuda.Event | None = None) -> Iterator[None]:
        """What is queued inside runs on this lane, after all that the computing stream has been given so far, and `event`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if event is not None:
            self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """A point on the lane to wait for."""
        return None if self._stream is None else self._stream.record_event()


def join(event: torch.cuda.Event | None) -> None:
    """Let the computing stream wait for a point on a lane; the host does not wait."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
