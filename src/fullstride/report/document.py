"""A Document: what is shown to a person, before it is decided how (terminal, HTML, JSON)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value

Tone: TypeAlias = Literal["plain", "quiet", "good", "warn", "bad"]


class Block(Value, frozen=True, kw_only=True, tag_field="block"):
    """The base of the parts of a Document."""


class Heading(Block, frozen=True, kw_only=True, tag="heading"):
    """A section starts."""

    text: str
    level: Literal[1, 2, 3] = 2


class Text(Block, frozen=True, kw_only=True, tag="text"):
    """A paragraph; plain text, no markup."""

    text: str
    tone: Tone = "plain"


class Code(Block, frozen=True, kw_only=True, tag="code"):
    """Something to copy: a command, a file."""

    text: str
    title: str = ""
    language: str = ""


class Stat(Value, frozen=True, kw_only=True):
    """One figure in large print."""

    label: str
    value: str
    note: str = ""
    tone: Tone = "plain"


class Stats(Block, frozen=True, kw_only=True, tag="stats"):
    """A row of figures."""

    items: tuple[Stat, ...]


class Column(Value, frozen=True, kw_only=True):
    """A table's column."""

    name: str
    align: Literal["left", "right"] = "left"


class TableRow(Value, frozen=True, kw_only=True):
    """A table's row."""

    cells: tuple[str, ...]
    tone: Tone = "plain"


class Table(Block, frozen=True, kw_only=True, tag="table"):
    """Rows and columns, already formatted."""

    title: str = ""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    note: str = ""


class Trace(Value, frozen=True, kw_only=True):
    """One line, set of bars, or distribution of a chart."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    """None (or a number that is not finite) for a gap."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    """Ends of intervals about `y`, if there are any."""


class Chart(Block, frozen=True, kw_only=True, tag="chart"):
    """A chart.

    `line`, `bar`, `scatter` draw y over x; `stacked` stacks the traces for each x; `waterfall` takes one trace of
    differences, first and last being totals; `box` draws each trace's y as a distribution. `x_label` and `y_label` belong
    to the traces' x and y, also where `horizontal` draws y from left to right.
    """

    title: str
    form: Literal["line", "bar", "scatter", "stacked", "waterfall", "box"]
    traces: tuple[Trace, ...]
    x_label: str = ""
    y_label: str = ""
    horizontal: bool = False
    note: str = ""


class Bar(Value, frozen=True, kw_only=True):
    """A stretch on a timeline, in seconds."""

    lane: str
    name: str
    kind: str
    start: float
    end: float


class Timeline(Block, frozen=True, kw_only=True, tag="timeline"):
    """Bars on lanes."""

    title: str
    bars: tuple[Bar, ...]
    note: str = ""
    quiet: str = ""
    """A kind of bar that is drawn faintly, such as waiting; empty for none."""


class Matrix(Block, frozen=True, kw_only=True, tag="matrix"):
    """A grid of numbers, such as link bandwidths; NaN for no value."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    unit: str = ""
    note: str = ""


AnyBlock: TypeAlias = Heading | Text | Code | Stats | Table | Chart | Timeline | Matrix


class Document(FileValue, frozen=True, kw_only=True, tag="document"):
    """Something to read."""

    title: str
    subtitle: str = ""
    blocks: tuple[AnyBlock, ...]
