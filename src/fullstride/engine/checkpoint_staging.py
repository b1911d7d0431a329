"""Where a checkpoint waits on the host while training goes on: pinned memory, allocated once and used by every save.

Copies run at the link's speed from pinned memory alone, and pinning is slow (a few GB/s), so that it is done once, in chunks
whose size torch's allocator of pinned memory does not round up. Where the host has no room for a copy, there is none: the
file is then written entry by entry while training stands still.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fullstride.cluster.host import available_memory
from fullstride.engine.checkpoint_boxes import Entry

_cuda: Any = torch.cuda  # untyped

CHUNK_BYTES = 2**29
"""One allocation: a power of two, at least BOX_BYTES."""
ROOM = 0.8
"""Largest part of the host's free memory that copies may take."""
_ALIGNED = 64
_PAGE = 4096


class Staging:
    """A rank's memory for copies of its state."""

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing yet. Memory is pinned if `device` is a GPU."""
        self._pin = device.type == "cuda"
        self._chunks: list[Tensor] = []
        self._stream: Any = None

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have memory for entries of these sizes in bytes."""
        _, chunks = places(sizes)
        missing = chunks[len(self._chunks) :] if self._fits(chunks) else chunks
        if not self._fits(chunks):
            self._chunks.clear()
        self._chunks += [torch.empty(size, dtype=torch.uint8, pin_memory=self._pin) for size in missing]

    def _fits(self, chunks: Sequence[int]) -> bool:
        return all(have.numel() >= size for have, size in zip(self._chunks, chunks, strict=False))

    def copy(self, found: Sequence[Entry]) -> list[Tensor]:
        """Copy entries to the host, on a stream of their own; they may change as soon as this returns.

        Returns:
            uint8, one for each entry, valid until the next call.
        """
        sizes = [entry.nbytes for entry in found]
        self.reserve(sizes)
        at, _ = places(sizes)
        blocks = [self._chunks[c][begin : begin + size] for (c, begin), size in zip(at, sizes, strict=True)]
        if not self._pin:
            _copy(found, blocks)
            return blocks
        self._stream = self._stream or _cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _copy(found, blocks)
        self._stream.synchronize()
        return blocks


def _copy(found: Sequence[Entry], blocks: Sequence[Tensor]) -> None:
    for entry, block in zip(found, blocks, strict=True):
        block.view(entry.view.dtype).view(entry.view.shape).copy_(entry.view, non_blocking=True)


def streamed(found: Sequence[Entry]) -> Iterator[Tensor]:
    """The same, one entry at a time, as the file is written."""
    for entry in found:
        yield entry.view.detach().to("cpu").contiguous().view(-1).view(torch.uint8)


def places(sizes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Where entries lie in chunks: (chunk and first byte) of each, and the sizes of the chunks."""
    at, chunk, begin = [], 0, 0
    ends = [0]
    for size in sizes:
        if begin and begin + size > CHUNK_BYTES:
            chunk, begin = chunk + 1, 0
            ends.append(0)
        at.append((chunk, begin))
        ends[chunk] = begin + size
        begin += -(-size // _ALIGNED) * _ALIGNED
    return at, [CHUNK_BYTES] * chunk + [min(-(-max(ends[-1], 1) // _PAGE) * _PAGE, max(CHUNK_BYTES, ends[-1]))]


def room_for(sizes: Sequence[int], exchange: Callable[[Any], list[Any]]) -> tuple[bool, str]:
    """Whether the copies of all ranks fit on every host; called by all ranks, with one answer.

    Args:
        sizes: of this rank's entries, in bytes.
        exchange: gives every rank's item to every rank.

    Returns:
        The answer, and the figures of the fullest host.
    """
    needed: dict[str, int] = {}
    free: dict[str, int] = {}
    for host, size, available in exchange((socket.gethostname(), sum(places(sizes)[1]), available_memory()[0])):
        needed[host] = needed.get(host, 0) + size
        free[host] = min(free.get(host, available), available)
    worst = max(needed, key=lambda host: needed[host] / max(free[host], 1))
    said = f"a copy takes {needed[worst] / 1e9:.1f} GB on {worst}, which has {free[worst] / 1e9:.1f} GB free"
    return needed[worst] <= ROOM * free[worst], said
