"""Reads the text of `nvidia-smi topo -m`: how the GPUs of a node are joined, in the tool's own words."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+\Z")


def parse_matrix(text: str) -> tuple[tuple[str, ...], ...]:
    """The square part between GPUs (`X`, `NV18`, `PIX`, `PXB`, `PHB`, `NODE`, `SYS`); empty if there is none."""
    lines = [_ESCAPE.sub("", line) for line in text.splitlines()]
    names: list[str] = []
    rows: dict[str, list[str]] = {}
    for line in lines:
        cells = line.split()
        if not names and cells and _GPU.match(cells[0]) and (len(cells) == 1 or not _is_link(cells[1])):
            names = [cell for cell in cells if _GPU.match(cell)]
        elif names and cells and cells[0] in names and len(cells) > len(names):
            rows[cells[0]] = cells[1 : 1 + len(names)]
    if not names or any(name not in rows for name in names):
        return ()
    return tuple(tuple(rows[name]) for name in names)


def num_nvlinks(matrix: tuple[tuple[str, ...], ...]) -> int:
    """NVLinks of the poorest pair; 0 if one pair has none, or there is no pair."""
    pairs = [cell for i, row in enumerate(matrix) for j, cell in enumerate(row) if i != j]
    counts = [int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in pairs]
    return min(counts, default=0)


def pick(matrix: tuple[tuple[str, ...], ...], indices: list[int]) -> tuple[tuple[str, ...], ...]:
    """The rows and columns of some GPUs, in that order; empty where an index is out of the matrix."""
    if any(index >= len(matrix) for index in indices):
        return ()
    return tuple(tuple(matrix[i][j] for j in indices) for i in indices)


def _is_link(cell: str) -> bool:
    return cell == "X" or bool(re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell))
