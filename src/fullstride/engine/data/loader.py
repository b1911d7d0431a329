"""This rank's samples of each step, prepared ahead by threads where the Plan asks for it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fullstride.engine.data.pack import Packing
from fullstride.errors import TimedOut
from fullstride.events import now_ns
from fullstride.plan.plan import Data, Layout

WAIT_SECONDS = 600.0
"""Longest wait for a worker thread to prepare a step."""


@dataclass(frozen=True)
class Share:
    """Which contiguous part of a step's samples a rank takes."""

    index: int
    """Its data-parallel rank."""
    count: int
    """Data-parallel degree."""


def share_of(layout: Layout, rank: int) -> Share:
    """The data-parallel place of a rank: ranks that differ only in tp, pp or cp see the same samples."""
    coordinates, rest = {}, rank
    for axis in reversed([axis for axis in layout.order if axis != "ep"]):
        rest, coordinates[axis] = divmod(rest, getattr(layout, axis))
    index = coordinates.get("dp_replicate", 0) * layout.dp_shard + coordinates.get("dp_shard", 0)
    return Share(index, layout.data_parallel)


class Loader:
    """Step after step, this rank's batch.

    Attributes:
        samples: global samples consumed by all ranks so far; where a resumed run goes on, in whatever layout.
        per_step: global samples of one step.
        num_samples: packed samples of the corpus, one epoch.
        waited: (start, end) in nanoseconds of the last wait inside `next`.
    """

    def __init__(
        self, packing: Packing, samples_per_step: int, share: Share, data: Data, *, pin: bool = False, first_sample: int = 0
    ) -> None:
        """Prepare to read.

        Args:
            packing: the corpus in samples.
            samples_per_step: of the whole world.
            share: this rank's part of them.
            data: threads and how far ahead they work.
            pin: put batches into pinned memory (only where there is a GPU).
            first_sample: global sample to begin with.
        """
        assert samples_per_step % share.count == 0, "rules.py lets only whole shares through"
        self.samples = first_sample
        self.waited = (0, 0)
        self.per_step = samples_per_step
        self.num_samples = packing.num_samples
        self._packing, self._share, self._pin = packing, share, pin
        self._pool = ThreadPoolExecutor(data.workers, thread_name_prefix="data") if data.workers else None
        self._ahead = max(1, data.prefetch)
        self._queue: deque[Future[dict[str, Tensor]]] = deque()

    def next(self) -> dict[str, Tensor]:
        """The next step's batch, on the host: `input_ids` and `labels` (and `document_ids`), [samples, sequence] int64.

        Raises:
            BadInput: what a worker thread met, raised here.
            TimedOut: the threads did not prepare the step in time.
        """
        start = now_ns()
        batch = self._prepared() if self._pool else self.batch(self.samples)
        self.samples += self.per_step
        self.waited = (start, now_ns())
        return batch

    def _prepared(self) -> dict[str, Tensor]:
        assert self._pool is not None
        while len(self._queue) < self._ahead:
            following = self.samples + len(self._queue) * self.per_step
            self._queue.append(self._pool.submit(self.batch, following))
        ready = self._queue.popleft()
        try:
            return ready.result(timeout=WAIT_SECONDS)
        except FutureTimeout:
            message = f"waited {WAIT_SECONDS:.0f} s for the data threads of data rank {self._share.index}"
            raise TimedOut(message, fix="check the disk that holds the data") from None
        finally:
            following = self.samples + (len(self._queue) + 1) * self.per_step
            self._queue.append(self._pool.submit(self.batch, following))

    def batch(self, first_sample: int) -> dict[str, Tensor]:
        """This rank's share of the step that begins at a global sample, on the host."""
        per_rank = self.per_step // self._share.count
        begin = first_sample + self._share.index * per_rank
        rows = [self._packing.sample(k) for k in range(begin, begin + per_rank)]
        batch = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
        return {name: value.pin_memory() for name, value in batch.items()} if self._pin else batch

    def close(self) -> None:
        """End the threads; what they had prepared is dropped."""
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
