"""A Document as one HTML file that needs nothing else: no network, no fonts, no files beside it.

A content security policy in the page itself forbids every request. The chart library stands in the file once, and only
where there is a chart; each chart has its numbers beside it as a table, for readers without scripts or sight.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fullstride.report.document import (
    AnyBlock,
    Chart,
    Code,
    Document,
    Heading,
    Matrix,
    Stats,
    Table,
    Text,
    Timeline,
    Trace,
)
from fullstride.report.figures import figure_of, kind_colour, kinds_of, legend_of, timeline_figure
from fullstride.report.script import SCRIPT
from fullstride.report.style import STYLE
from fullstride.report.words import DASH, finite, five_numbers, number, plain

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_LONG_CELL = 28
_FEW_COLUMNS = 4
_LONG_DATA = 400
_STATS_PER_ROW = {1: 1, 2: 2, 3: 3, 5: 5, 6: 3, 9: 3, 10: 5}
"""Figures beside each other on a wide page, so that rows are full; 4 for other numbers."""
_MARK = (
    '<svg width="22" height="14" viewBox="0 0 22 14" aria-hidden="true"><path d="M1 13 6 7l4 3.5L21 1" fill="none" '
    'stroke="currentColor" stroke-width="2.2" stroke-linecap="round" stroke-linejoin="round"/></svg>'
)
_UNSAFE_IN_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_of(document: Document) -> str:
    """The whole page as text; write it as UTF-8."""
    drawn = any(isinstance(block, Chart | Timeline) for block in document.blocks)
    title = _esc(document.title)
    subtitle = f'<p class="subtitle">{_esc(document.subtitle)}</p>' if document.subtitle else ""
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>',
            f'<header class="page"><p class="brand">{_MARK}fullstride</p>',
            f"<h1>{title}</h1>{subtitle}{_contents(document)}</header>",
            f"<main>{_sections(document)}</main>",
            '<footer class="page">Made by fullstride. This file holds everything it shows and loads nothing.</footer>',
            f"<script>{_library()}</script>" if drawn else "",
            f"<script>{SCRIPT}</script>\n</body>\n</html>\n",
        )
    )


def _library() -> str:
    """plotly.js as the plotly package ships it (its only whole bundle; the widget's is larger)."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _esc(text: str) -> str:
    return html.escape(plain(text))


def _contents(document: Document) -> str:
    heads = [block.text for block in document.blocks if isinstance(block, Heading) and block.level == 2]
    if len(heads) < 3:
        return ""
    links = "".join(f'<a href="#s{place}">{_esc(text)}</a>' for place, text in enumerate(heads, 1))
    return f'<nav class="toc" aria-label="Contents">{links}</nav>'


def _sections(document: Document) -> str:
    parts = ['<section class="lead">']
    count = 0
    for block in document.blocks:
        if isinstance(block, Heading) and block.level == 2:
            count += 1
            parts.append(f'</section>\n<section id="s{count}">')
        parts.append(_block(block))
    return "\n".join((*parts, "</section>"))


def _block(block: AnyBlock) -> str:
    return _WRITERS[type(block)](block)


def _heading(block: Heading) -> str:
    level = max(block.level, 2)  # the page's title is its only first level
    return f"<h{level}>{_esc(block.text)}</h{level}>"


def _text(block: Text) -> str:
    return f'<p class="{block.tone}">{_esc(block.text)}</p>'


def _code(block: Code) -> str:
    body = _esc(block.text)
    if block.language == "toml":
        body = re.sub(r"(?m)^(#.*)$", r'<span class="comment">\1</span>', body)
        body = re.sub(r"(?m)^(\[[^\]\n]*\])", r'<span class="tomltable">\1</span>', body)
    name = _esc(block.title or block.language or "text")
    head = f'<div class="bar"><span>{name}</span><button type="button" hidden aria-label="Copy: {name}">Copy</button></div>'
    return f'<div class="card code">{head}<pre tabindex="0"><code>{body}</code></pre></div>'


def _stats(block: Stats) -> str:
    if not block.items:
        return ""
    items = []
    for stat in block.items:
        detail = f'<dd class="detail">{_esc(stat.note)}</dd>' if stat.note else ""
        items.append(f'<div><dt>{_esc(stat.label)}</dt><dd class="value {stat.tone}">{_esc(stat.value)}</dd>{detail}</div>')
    per_row = _STATS_PER_ROW.get(len(items), 4)
    return f'<dl class="stats" style="--n:{per_row}">{"".join(items)}</dl>'


def _table(block: Table) -> str:
    rights = [column.align == "right" for column in block.columns]
    longs = [
        any(place < len(row.cells) and len(row.cells[place]) > _LONG_CELL for row in block.rows) for place in range(len(rights))
    ]
    kinds = ["r" if right else "long" if long else "short" for right, long in zip(rights, longs, strict=True)]
    head = "".join(f'<th scope="col" class="{k}">{_esc(c.name)}</th>' for c, k in zip(block.columns, kinds, strict=True))
    rows = []
    for row in block.rows:
        cells = []
        padded = (*row.cells, *[""] * (len(kinds) - len(row.cells)))
        for place, (cell, kind) in enumerate(zip(padded, kinds, strict=False)):
            open_tag, close_tag = ('th scope="row"', "th") if place == 0 else ("td", "td")
            cells.append(f'<{open_tag} class="{kind}">{_esc(cell)}</{close_tag}>')
        rows.append(f'<tr class="{row.tone}">{"".join(cells)}</tr>')
    narrow = "long" not in kinds and len(kinds) <= _FEW_COLUMNS
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _framed("table narrow" if narrow else "table", block.title, table, block.note)


def _framed(kind: str, title: str, table: str, note: str) -> str:
    cap = f'<div class="cap">{_esc(title)}</div>' if title else ""
    label = _esc(title or "Table")
    foot = f'<p class="note">{_esc(note)}</p>' if note else ""
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">{table}</div>'
    return f'<div class="card {kind}">{cap}{scroll}{foot}</div>'


def _chart(block: Chart) -> str:
    if not finite(y for trace in block.traces for y in trace.y):
        return _no_data(block.title, block.note)
    return _figure(block.title, figure_of(block), legend_of(block), _chart_data(block), block.note)


def _no_data(title: str, note: str) -> str:
    foot = f'<p class="note">{_esc(note)}</p>' if note else ""
    return f'<figure class="card"><figcaption>{_esc(title)}</figcaption><p class="note">No data.</p>{foot}</figure>'


def _timeline(block: Timeline) -> str:
    if not block.bars:
        return _no_data(block.title, block.note)
    legend = [(kind, kind_colour(block, place)) for place, kind in enumerate(kinds_of(block))]
    rows = [(bar.lane, bar.name, bar.kind, number(bar.start), number(bar.end - bar.start)) for bar in block.bars]
    data = _data_table(("lane", "what", "kind", "start, s", "length, s"), rows)
    return _figure(block.title, timeline_figure(block), legend, data, block.note)


def _figure(title: str, figure: dict[str, Any], legend: list[tuple[str, str]], data: str, note: str) -> str:
    items = "".join(f'<li><i style="background:{shade}"></i>{_esc(name)}</li>' for name, shade in legend)
    key = f'<ul class="legend">{items}</ul>' if items else ""
    height = figure["layout"]["height"]
    plot = (
        f'<div class="plot" role="img" aria-label="{_esc(title)}" style="min-height:{height}px">'
        f'<p class="nojs">The chart needs JavaScript; its numbers are below.</p></div>'
    )
    foot = f'<p class="note">{_esc(note)}</p>' if note else ""
    raw = f'<script type="application/json" class="figure">{script_json(figure)}</script>'
    caption = f"<figcaption>{_esc(title)}</figcaption>"
    return f'<figure class="card">{caption}{key}{plot}{foot}{data}{raw}</figure>'


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever its texts hold; not-finite numbers become null."""
    text = msgspec.json.encode(value).decode()
    return re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE_IN_SCRIPT[match[0]], text)


def _chart_data(chart: Chart) -> str:
    if chart.form == "box":
        return _data_table(("", "samples", "least", "lower quartile", "median", "upper quartile", "greatest"), _box_rows(chart))
    rows = [(*((trace.name,) if len(chart.traces) > 1 else ()), *row) for trace in chart.traces for row in _trace_rows(trace)]
    heads = [*(("",) if len(chart.traces) > 1 else ()), chart.x_label or "x", chart.y_label or "y"]
    if any(trace.low for trace in chart.traces):
        heads += ["low", "high"]
        rows = [row + (DASH,) * (len(heads) - len(row)) for row in rows]
    return _data_table(tuple(heads), rows)


def _box_rows(chart: Chart) -> list[tuple[str, ...]]:
    rows = []
    for trace in chart.traces:
        five = five_numbers(trace.y)
        rows.append((trace.name, str(len(finite(trace.y))), *([number(value) for value in five] if five else [DASH] * 5)))
    return rows


def _trace_rows(trace: Trace) -> list[tuple[str, ...]]:
    rows = []
    for place, (x, y) in enumerate(zip(trace.x, trace.y, strict=False)):
        ends = [number(trace.low[place]), number(trace.high[place])] if place < min(len(trace.low), len(trace.high)) else []
        rows.append((x if isinstance(x, str) else number(x), number(y), *ends))
    return rows


def _data_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    shown = rows[:_LONG_DATA]
    head = "".join(f'<th scope="col">{_esc(name)}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{_esc(cell)}</td>" for cell in row) + "</tr>" for row in shown)
    more = f'<p class="note">The first {_LONG_DATA} of {len(rows)} rows.</p>' if len(rows) > len(shown) else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<details><summary>The numbers</summary><div class="scroll" tabindex="0">{table}</div>{more}</details>'


def _matrix(block: Matrix) -> str:
    known = finite(value for row in block.values for value in row)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    span = (high - low) or 1.0
    head = "<td class='none'></td>" + "".join(f'<th scope="col" class="r">{_esc(name)}</th>' for name in block.columns)
    rows = []
    for name, values in zip(block.rows, block.values, strict=False):
        cells = "".join(_matrix_cell(value, low, span) for value in values)
        rows.append(f'<tr><th scope="row">{_esc(name)}</th>{cells}</tr>')
    title = f"{block.title}, {block.unit}" if block.unit else block.title
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _framed("matrix", title, table, block.note)


def _matrix_cell(value: float | None, low: float, span: float) -> str:
    if value is None or not math.isfinite(value):
        return f'<td class="none">{DASH}</td>'
    return f'<td style="--v:{(value - low) / span:.3f}">{number(value, 3)}</td>'


_WRITERS: dict[type[Any], Callable[[Any], str]] = {
    Heading: _heading,
    Text: _text,
    Code: _code,
    Stats: _stats,
    Table: _table,
    Chart: _chart,
    Timeline: _timeline,
    Matrix: _matrix,
}
