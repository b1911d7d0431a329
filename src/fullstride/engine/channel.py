"""Talk between ranks on the host, through the rendezvous store: small messages, no device, each wait with a time-out.

It works while a collective hangs or a rank has left, because nothing but the store is needed.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from fullstride.errors import TimedOut

_untyped: Any = dist  # the stores carry no types
_LOOK_SECONDS, _LAST_SECONDS = 0.1, 1.0


class Channel:
    """One rank's end. All ranks make the same calls in the same order, except `claim`, `tell` and `told`: any rank may."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        """Speak through `store`; None where there is one rank."""
        assert store is not None or world_size == 1
        self.rank, self.world_size = rank, world_size
        self._store, self._turn = store, 0

    def gather(self, message: bytes, *, what: str, seconds: float) -> list[bytes]:
        """Every rank's message, by rank, on every rank.

        Raises:
            TimedOut: a rank did not speak in time; names the rank and `what` it was waited for.
        """
        if self._store is None:
            return [message]
        turn = self._next_turn()
        self._store.set(f"{turn}/{self.rank}", message)
        if self.rank:
            return msgspec.msgpack.decode(self._get(f"{turn}/all", 0, what, seconds), type=list[bytes])
        messages = [self._get(f"{turn}/{rank}", rank, what, seconds) for rank in range(self.world_size)]
        self._store.set(f"{turn}/all", msgspec.msgpack.encode(messages))
        return messages

    def broadcast(self, message: bytes, *, what: str, seconds: float) -> bytes:
        """Rank 0's message on every rank; the others' `message` is not looked at. Raises like `gather`."""
        if self._store is None:
            return message
        turn = self._next_turn()
        if self.rank:
            return self._get(f"{turn}/all", 0, what, seconds)
        self._store.set(f"{turn}/all", message)
        return message

    def claim(self, name: str) -> bool:
        """Whether this rank is the first to ask for `name`."""
        return self._store is None or bool(self._store.add(f"claim/{name}", 1) == 1)

    def tell(self, name: str, words: str) -> None:
        """Leave words under a name for whoever asks; returns at once."""
        if self._store is not None:
            self._store.set(f"told/{name}/{self.rank}", words.encode())

    def told(self, name: str, seconds: float) -> dict[int, str]:
        """What ranks have left under a name, by rank, as far as it comes in time; for the last rank little time is enough."""
        if self._store is None:
            return {}
        keys = {rank: f"told/{name}/{rank}" for rank in range(self.world_size)}
        there: list[int] = []
        end = time.monotonic() + seconds
        while len(there) < self.world_size and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
            found = [rank for rank, key in keys.items() if self._store.check([key])]
            if len(found) > len(there) and len(found) == self.world_size - 1:
                end = min(end, time.monotonic() + _LAST_SECONDS)
            there = found
        return {rank: bytes(self._store.get(keys[rank])).decode() for rank in there}

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _get(self, key: str, rank: int, what: str, seconds: float) -> bytes:
        assert self._store is not None
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except dist.DistError as error:
            message = f"waited {seconds:.0f} s for rank {rank}: {what}"
            raise TimedOut(message, fix=f"look at that rank's log ({str(error).splitlines()[0][:80]})") from None
        return bytes(self._store.get(key))


def open_channel(rank: int, world_size: int) -> Channel:
    """A channel of its own connection to the store that the launcher named in MASTER_ADDR and MASTER_PORT.

    The process group's own connection is not used: a wait on it would block the communication library's threads.
    """
    if world_size == 1:
        return Channel(None, rank, world_size)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    client = _untyped.TCPStore(address, port, None, False, timedelta(seconds=60), wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Channel(_untyped.PrefixStore(f"fullstride/{attempt}", client), rank, world_size)
