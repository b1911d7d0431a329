"""The numbers of a checkpoint as rectangles of the unmodified model's parameters, in safetensors files, one a rank.

Each entry is named `KIND/NAME@OFFSETS`: `weights/model.norm.weight@512` holds elements from 512 on, as many as its shape says.
Which rank wrote a rectangle, and how the model was laid out then, nobody needs to know who reads it. Any reader of
safetensors reads these files; a checkpoint of one rank holds whole tensors as long as they are small.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fullstride.engine.pieces import Piece, parts
from fullstride.errors import BadInput

BOX_BYTES = 64 * 2**20
"""Largest entry: what is read, copied or written at a time."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_NAMED = {name: dtype for dtype, name in _DTYPES.items()}
_LONGEST_HEADER = 2**31


@dataclass(frozen=True)
class Entry:
    """A rectangle to write, and a view of its numbers."""

    key: str
    """`weights/NAME`, or another kind."""
    offsets: tuple[int, ...]
    view: Tensor

    @property
    def name(self) -> str:
        """In the file."""
        return f"{self.key}@{','.join(str(offset) for offset in self.offsets)}"

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.view.numel() * self.view.element_size()


def shares(everybody: Sequence[Mapping[str, Piece]]) -> list[set[str]]:
    """Which parameters each rank writes its piece of, so that every element is written once and the work is even.

    Args:
        everybody: the pieces of each rank, by name.
    """
    found: dict[tuple[object, ...], list[int]] = {}
    counts: dict[tuple[object, ...], int] = {}
    for rank, pieces in enumerate(everybody):
        for name, piece in pieces.items():
            if piece.counted and piece.count:
                key: tuple[object, ...] = (name, piece.cut, piece.lo, piece.end)
                found.setdefault(key, []).append(rank)
                counts[key] = piece.count
    load = [0] * len(everybody)
    chosen: list[set[str]] = [set() for _ in everybody]
    for key in sorted(found, key=lambda k: (len(found[k]), -counts[k], str(k[0]))):  # those without a choice first
        rank = min(found[key], key=lambda r: (load[r], r))
        load[rank] += counts[key]
        chosen[rank].add(str(key[0]))
    return chosen


def uncovered(everybody: Sequence[Mapping[str, Piece]], chosen: Sequence[set[str]]) -> str:
    """The first parameter whose elements are not written exactly once; empty if all are."""
    total: dict[str, int] = {}
    for pieces, names in zip(everybody, chosen, strict=True):
        for name in names:
            total[name] = total.get(name, 0) + pieces[name].count
    whole = {name: math.prod(piece.shape) for pieces in everybody for name, piece in pieces.items()}
    return next((name for name, count in whole.items() if total.get(name, 0) != count), "")


def entries(key: str, piece: Piece, local: Tensor, limit: int = BOX_BYTES) -> Iterable[Entry]:
    """A piece as entries of at most `limit` bytes.

    Args:
        key: `weights/NAME`.
        piece: where it lies.
        local: its elements.
        limit: bytes.
    """
    flat = local.reshape(-1)
    for part in parts(piece):
        for offsets, view in _split(part.offsets, part.of_local(flat), max(limit // local.element_size(), 1)):
            yield Entry(key, offsets, view)


def _split(offsets: tuple[int, ...], view: Tensor, limit: int) -> Iterable[tuple[tuple[int, ...], Tensor]]:
    """Slices of at most `limit` elements, along the first dims."""
    if view.numel() <= limit:
        yield offsets, view
        return
    dim = next(d for d, size in enumerate(view.shape) if size > 1)
    each = max(limit // math.prod(view.shape[dim + 1 :]), 1)
    for begin in range(0, view.shape[dim], each):
        part = view.narrow(dim, begin, min(each, view.shape[dim] - begin))
        yield from _split((*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :]), part, limit)


def ordered(found: Iterable[Entry]) -> list[Entry]:
    """Entries in the order of the file: wide dtypes first, so that each begins at a multiple of its own width."""
    return sorted(found, key=lambda entry: -entry.view.element_size())


def header(found: Sequence[Entry]) -> bytes:
    """The beginning of a safetensors file that holds the entries in this order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in found:
        place = [begin, begin + entry.nbytes]
        table[entry.name] = {"dtype": _DTYPES[entry.view.dtype], "shape": list(entry.view.shape), "data_offsets": place}
        begin = place[1]
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def write_file(path: Path, head: bytes, blocks: Iterable[Tensor]) -> tuple[int, int]:
    """Write a file and wait until the disk has it.

    Args:
        path: made.
        head: from `header`.
        blocks: uint8, on the host, one for each entry.

    Returns:
        Its size and CRC-32.

    Raises:
        OSError: the disk is full or may not be written.
    """
    size, crc = 0, 0
    with open(path, "wb", buffering=0) as out:
        size, crc = _put(out, memoryview(head), size, crc)
        for block in blocks:
            size, crc = _put(out, memoryview(block.numpy().data), size, crc)
        os.fsync(out.fileno())
    return size, crc


def _put(out: Any, raw: memoryview, size: int, crc: int) -> tuple[int, int]:
    written = 0
    while written < len(raw):  # an unbuffered write may take a part
        written += out.write(raw[written:])
    return size + written, zlib.crc32(raw, crc)


@dataclass(frozen=True)
class _Stored:
    path: Path
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int


class Boxes:
    """The entries of a checkpoint's files; opened to read any rectangle out of them."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Read the headers alone.

        Raises:
            BadInput: a file is no safetensors file of a checkpoint.
        """
        self._found: dict[str, list[_Stored]] = {}
        self._maps: dict[Path, Any] = {}
        for path in paths:
            for key, stored in _headed(path):
                self._found.setdefault(key, []).append(stored)

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def read(self, key: str, piece: Piece, local: Tensor) -> None:
        """Fill a piece, whatever the pieces were when it was written; dtypes are converted.

        Args:
            key: `weights/NAME`.
            piece: what is wanted.
            local: filled, in any shape, on any device.

        Raises:
            BadInput: the files do not hold all of it.
        """
        flat = local.view(-1) if local.is_contiguous() else local.reshape(-1)
        filled = 0
        for part in parts(piece):
            view = part.of_local(flat)
            for stored in self._found.get(key, ()):
                filled += self._copy(stored, part.offsets, view)
        if filled != piece.count:
            raise BadInput(f"the checkpoint holds {filled} of {piece.count} elements of {key}", fix="remove that checkpoint")
        if not local.is_contiguous():
            local.copy_(flat.view(local.shape))

    def _copy(self, stored: _Stored, offsets: tuple[int, ...], view: Tensor) -> int:
        """The part of a rectangle that a stored one holds; returns its elements."""
        if len(stored.offsets) != view.ndim:
            raise BadInput(f"{stored.path}: holds a part of other dims than the parameter's", fix="remove that checkpoint")
        met = []
        for at, size, have, width in zip(offsets, view.shape, stored.offsets, stored.sizes, strict=True):
            lo, hi = max(at, have), min(at + size, have + width)
            if lo >= hi:
                return 0
            met.append((lo - have, lo - at, hi - lo))
        source = self._open(stored)
        for dim, (there, here, width) in enumerate(met):
            source, view = source.narrow(dim, there, width), view.narrow(dim, here, width)
        view.copy_(source)
        return view.numel()

    def _open(self, stored: _Stored) -> Tensor:
        if stored.path not in self._maps:
            # Copy on write: torch warns of memory that it may not write, although nothing writes here.
            self._maps[stored.path] = np.memmap(stored.path, dtype=np.uint8, mode="c")
        count = math.prod(stored.sizes) * stored.dtype.itemsize
        raw = torch.from_numpy(self._maps[stored.path][stored.begin : stored.begin + count])
        return raw.view(stored.dtype).view(stored.sizes)


def _headed(path: Path) -> Iterable[tuple[str, _Stored]]:
    """The entries of one file; nothing in it is believed before it is checked."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError("its header has no end")
            table = json.loads(file.read(length))
            total = os.fstat(file.fileno()).st_size - 8 - length
        found = []
        for name, entry in table.items():
            if name != "__metadata__":
                found.append(_entry(path, name, entry, 8 + length, total))
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadInput(f"{path}: is damaged ({type(error).__name__}: {error})", fix="remove that checkpoint") from None


def _entry(path: Path, name: str, entry: dict[str, Any], first: int, total: int) -> tuple[str, _Stored]:
    key, _, where = name.rpartition("@")
    offsets = tuple(int(word) for word in where.split(",")) if where else ()
    sizes = tuple(int(size) for size in entry["shape"])
    dtype, (begin, end) = _NAMED[entry["dtype"]], entry["data_offsets"]
    whole = len(offsets) == len(sizes) and end - begin == math.prod(sizes) * dtype.itemsize
    if not (whole and 0 <= begin <= end <= total and min((*offsets, *sizes, 0)) >= 0):
        raise ValueError(f"{name} does not lie inside the file")
    return key, _Stored(path, dtype, offsets, sizes, first + begin)
