"""Disk rates with direct I/O, several blocks in flight; no torch."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

BLOCK = 8 * 2**20
THREADS = 4
"""Blocks in flight; one at a time reaches a fifth of what a network disk can."""


def disk_rates(folder: str, size: int) -> Iterator[tuple[str, float | None, str]]:
    """(`write` or `read`, bytes per second or None, how it was measured or why not) of a folder's file system.

    Where direct I/O is refused, writing is buffered and synced, and reading is left out: it would time the page cache.
    """
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".fullstride-disk-")
    except OSError as error:
        yield "write", None, f"{folder}: {error.strerror}"
        return
    os.close(handle)
    try:
        yield from _rates(path, max(BLOCK * THREADS, size // BLOCK * BLOCK))
    except OSError as error:
        yield "write", None, f"{folder}: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108


def _rates(path: str, size: int) -> Iterator[tuple[str, float | None, str]]:
    direct = _open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0)) if hasattr(os, "O_DIRECT") else None
    note = f"{size >> 20} MiB in blocks of 8 MiB, {THREADS} in flight"
    # Direct I/O wants aligned memory: anonymous maps start at a page.
    blocks = [mmap.mmap(-1, BLOCK) for _ in range(THREADS)]
    for block in blocks:
        block.write(os.urandom(BLOCK))
    handle = direct if direct is not None else os.open(path, os.O_RDWR)
    try:
        os.ftruncate(handle, size)
        seconds = _pass(lambda at, block: os.pwritev(handle, [block], at), blocks, size, lambda: os.fsync(handle))
        yield (
            "write",
            size / seconds,
            f"{note}, {'direct I/O' if direct is not None else 'buffered and synced: no direct I/O here'}",
        )
        if direct is None:
            yield "read", None, "reading was left out: this file system has no direct I/O"
            return
        seconds = _pass(lambda at, block: os.preadv(handle, [block], at), blocks, size, lambda: None)
        yield "read", size / seconds, f"{note}, direct I/O"
    finally:
        os.close(handle)


def _pass(move: Callable[[int, mmap.mmap], int], blocks: list[mmap.mmap], size: int, finish: Callable[[], object]) -> float:
    def lane(number: int) -> None:
        for at in range(number * BLOCK, size, BLOCK * THREADS):
            moved = move(at, blocks[number])
            if moved != BLOCK:
                raise OSError(5, f"moved {moved} of {BLOCK} bytes")

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lane, range(THREADS)))
    finish()
    return time.perf_counter() - start


def _open(path: str, flags: int) -> int | None:
    try:
        return os.open(path, flags)
    except OSError:
        return None
