"""A Document in a terminal: every block, in the width there is, without colour where there is no terminal.

Texts are put in as `rich` Text objects, never as markup, so that brackets in a user's names stay brackets.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table as Grid
from rich.text import Text as Line

from fullstride.report.document import AnyBlock, Chart, Code, Document, Heading, Matrix, Stats, Table, Text, Timeline
from fullstride.report.textcharts import chart_lines, timeline_lines
from fullstride.report.words import number, plain

TONES = {"plain": "", "quiet": "dim", "good": "green", "warn": "yellow", "bad": "red"}
"""Style of each tone; the words themselves say the same, for those who see no colour."""


def print_document(document: Document, console: Console | None = None) -> None:
    """Print to `console`, or to standard output; `NO_COLOR`, `COLUMNS` and pipes are heeded."""
    target = console or Console(highlight=False)
    _never_fail_on_letters(target)
    target.print(Line(plain(document.title), style="bold"))
    if document.subtitle:
        target.print(Line(plain(document.subtitle), style="dim"))
    for block in document.blocks:
        # Code must come out whole to be copied: the terminal may wrap it, we may not.
        target.print("", _block(block, target.width), sep="\n", soft_wrap=isinstance(block, Code))


def text_of(document: Document, width: int = 100) -> str:
    """The same as plain text, for a log or a test."""
    out = io.StringIO()
    print_document(document, Console(file=out, width=width, highlight=False, color_system=None, force_terminal=False))
    return out.getvalue()


def _never_fail_on_letters(console: Console) -> None:
    """A terminal whose encoding lacks a letter shows `?` for it."""
    encoding = (console.encoding or "").lower().replace("-", "")
    if not encoding.startswith("utf") and isinstance(console.file, io.TextIOWrapper):
        console.file.reconfigure(errors="replace")


def _block(block: AnyBlock, width: int) -> RenderableType:
    return _WRITERS[type(block)](block, width)


def _heading(block: Heading, _: int) -> RenderableType:
    if block.level == 3:
        return Line(plain(block.text), style="bold")
    return Rule(Line(plain(block.text), style="bold"), align="left", style="dim")


def _text(block: Text, _: int) -> RenderableType:
    return Line(plain(block.text), style=TONES[block.tone])


def _code(block: Code, width: int) -> RenderableType:
    """Printed without a frame, so that it can be copied."""
    body = plain(block.text) if width <= 40 else "\n".join(f"  {line}" for line in plain(block.text).splitlines())
    title = (f"{plain(block.title)}\n", "dim") if block.title else ""
    return Line.assemble(title, body)


def _stats(block: Stats, width: int) -> RenderableType:
    """As many figures beside each other as the width holds, each 24 columns or more."""
    per_row = max(1, min(len(block.items), width // 24))
    grid = Grid.grid(padding=(0, 2), expand=False)
    for _ in range(per_row):
        grid.add_column(max_width=max(12, width // per_row - 2))
    cells: list[RenderableType] = []
    for stat in block.items:
        value = Line(plain(stat.value), style=f"bold {TONES[stat.tone]}".strip())
        cells.append(Group(Line(plain(stat.label), style="dim"), value, Line(plain(stat.note), style="dim")))
    for start in range(0, len(cells), per_row):
        row = cells[start : start + per_row]
        grid.add_row(*row, *([""] * (per_row - len(row))))
    return grid


def _table(block: Table, width: int) -> RenderableType:
    if width < 72 and len(block.columns) > 4:
        return _cards(block)
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, column in enumerate(block.columns):
        short = max((len(row.cells[place]) for row in block.rows if place < len(row.cells)), default=0) <= 14
        grid.add_column(
            Line(plain(column.name)), justify=column.align, overflow="fold", no_wrap=short and column.align == "right"
        )
    for row in block.rows:
        cells = [Line(plain(cell)) for cell in row.cells][: len(block.columns)]
        grid.add_row(*cells, style=TONES[row.tone])
    return _titled(block.title, grid, block.note)


def _cards(block: Table) -> RenderableType:
    """A table too wide for a narrow terminal, a row at a time."""
    rows: list[RenderableType] = []
    for row in block.rows:
        head = Line(plain(row.cells[0]) if row.cells else "", style=f"bold {TONES[row.tone]}".strip())
        rest = [
            Line.assemble((f"  {plain(column.name)}: ", "dim"), plain(cell))
            for column, cell in zip(block.columns[1:], row.cells[1:], strict=False)
            if cell
        ]
        rows.append(Group(head, *rest))
    return _titled(block.title, Group(*rows), block.note)


def _titled(title: str, body: RenderableType, note: str) -> RenderableType:
    head = [Line(plain(title), style="bold")] if title else []
    foot = [Line(plain(note), style="dim")] if note else []
    return Group(*head, body, *foot)


def _chart(block: Chart, width: int) -> RenderableType:
    return _titled(block.title, Group(*chart_lines(block, width)), block.note)


def _timeline(block: Timeline, width: int) -> RenderableType:
    return _titled(block.title, Group(*timeline_lines(block, width)), block.note)


def _matrix(block: Matrix, width: int) -> RenderableType:
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    grid.add_column("")
    fitting = max(1, (width - 12) // 8)
    for name in block.columns[:fitting]:
        grid.add_column(Line(plain(name)), justify="right")
    for name, values in zip(block.rows, block.values, strict=False):
        grid.add_row(Line(plain(name), style="dim"), *[number(value, 3) for value in values[:fitting]])
    left_out = len(block.columns) - fitting
    note = f"{left_out} more columns do not fit this terminal" if left_out > 0 else ""
    title = f"{block.title}, {block.unit}" if block.unit else block.title
    return _titled(title, grid, "; ".join(part for part in (block.note, note) if part))


_WRITERS: dict[type[Any], Callable[[Any, int], RenderableType]] = {
    Heading: _heading,
    Text: _text,
    Code: _code,
    Stats: _stats,
    Table: _table,
    Chart: _chart,
    Timeline: _timeline,
    Matrix: _matrix,
}
