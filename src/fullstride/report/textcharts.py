"""Charts as lines of text: bars, sparklines, box plots and timelines in block characters."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size
from rich.text import Text as Line

from fullstride.report.document import Chart, Timeline, Trace
from fullstride.report.words import categories, finite, five_numbers, number, plain, signed, waterfall_totals

_COLOURS = ("blue", "yellow", "red", "cyan", "magenta", "green", "bright_magenta", "bright_blue", "bright_red", "white")
# Without colour the kinds must still differ: each has a letter of its own in stacked bars and timelines.
_LETTERS = "█▓▒░▞▚◼◆●○"
_QUIET = "·"
_SPARKS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉"
_LEAST_BAR = 8


def chart_lines(chart: Chart, width: int) -> list[Line]:
    """The chart in at most `width` columns."""
    draw: dict[str, Callable[[Chart, int], list[Line]]]
    draw = {"bar": _bar, "stacked": _stacked, "waterfall": _waterfall, "box": _box}
    lines = draw.get(chart.form, _spark)(chart, max(width, 24))
    return lines or [Line("no data", style="dim")]


def timeline_lines(timeline: Timeline, width: int) -> list[Line]:
    """A row for each lane; a column shows the kind that fills most of it."""
    bars = [bar for bar in timeline.bars if math.isfinite(bar.start + bar.end)]
    if not bars:
        return [Line("no data", style="dim")]
    lanes, kinds = list(dict.fromkeys(bar.lane for bar in bars)), list(dict.fromkeys(bar.kind for bar in bars))
    kinds.sort(key=lambda kind: kind == timeline.quiet)
    first, last = min(bar.start for bar in bars), max(bar.end for bar in bars)
    name_width = _name_width([*lanes], width)
    columns = max(_LEAST_BAR, width - name_width - 2)
    step = (last - first) / columns or 1.0
    lines = []
    for lane in lanes:
        filled: list[dict[str, float]] = [{} for _ in range(columns)]
        for bar in (bar for bar in bars if bar.lane == lane):
            for column in range(max(0, int((bar.start - first) / step)), min(columns, int((bar.end - first) / step) + 1)):
                begin = first + column * step
                cover = min(bar.end, begin + step) - max(bar.start, begin)
                filled[column][bar.kind] = filled[column].get(bar.kind, 0.0) + cover
        line = _name(lane, name_width)
        for cell in filled:
            kind = max(cell, key=lambda kind: cell[kind]) if cell else ""
            if kind in ("", timeline.quiet):
                line.append(_QUIET if kind else " ", style="dim" if kind else "")
            else:
                line.append(_letter(kinds.index(kind)), style=_colour(kinds.index(kind)))
        lines.append(line)
    ends = Line(f"{' ' * (name_width + 1)}{number(first, 3)} s to {number(last, 3)} s", style="dim")
    return [*lines, ends, _legend(kinds, timeline.quiet)]


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]


def _letter(place: int) -> str:
    return _LETTERS[place % len(_LETTERS)]


def _legend(names: list[str], quiet: str = "") -> Line:
    line = Line()
    for place, name in enumerate(names):
        faint = bool(quiet) and name == quiet
        line.append(f"{'   ' if place else ''}{_QUIET if faint else _letter(place)} ", style="dim" if faint else _colour(place))
        line.append(plain(name))
    return line


def _name_width(names: list[str], width: int) -> int:
    longest = max((cell_len(plain(name)) for name in names), default=0)
    return min(longest, max(8, width // 3), 36)


def _name(name: str, width: int) -> Line:
    text = plain(name).replace("\n", " ")
    shown = text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
    return Line(set_cell_size(shown, width) + " ", no_wrap=True, overflow="crop")


def _word(x: float | str) -> str:
    return x if isinstance(x, str) else number(x)


def _block_bar(share: float, columns: int) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * columns * 8)
    full, part = divmod(eighths, 8)
    return "█" * full + (_PARTS[part] if part else "")


def _bar(chart: Chart, width: int) -> list[Line]:
    several = len(chart.traces) > 1
    most = max([abs(value) for trace in chart.traces for value in finite(trace.y)], default=0.0) or 1.0
    names = [f"{_word(x)}{f', {trace.name}' if several else ''}" for trace in chart.traces for x in trace.x]
    name_width = _name_width(names, width)
    columns = max(_LEAST_BAR, width - name_width - 14)
    lines = []
    for place, trace in enumerate(chart.traces):
        for x, y in zip(trace.x, trace.y, strict=False):
            line = _name(f"{_word(x)}{f', {trace.name}' if several else ''}", name_width)
            share = abs(y) / most if y is not None and math.isfinite(y) else 0.0
            line.append(_block_bar(share, columns), style=_colour(place))
            line.append(f" {number(y)}")
            lines.append(line)
    return lines


def _stacked(chart: Chart, width: int) -> list[Line]:
    xs = categories(chart.traces)
    tables = [dict(zip(trace.x, trace.y, strict=False)) for trace in chart.traces]
    totals = {x: sum(max(value, 0.0) for value in finite(table.get(x) for table in tables)) for x in xs}
    most = max(totals.values(), default=0.0) or 1.0
    name_width = _name_width([_word(x) for x in xs], width)
    columns = max(_LEAST_BAR, width - name_width - 14)
    lines = []
    for x in xs:
        line, reached, drawn = _name(_word(x), name_width), 0.0, 0
        for place, table in enumerate(tables):
            reached += sum(max(value, 0.0) for value in finite([table.get(x)]))
            end = round(reached / most * columns)
            line.append(_letter(place) * (end - drawn), style=_colour(place))
            drawn = end
        line.append(f" {number(totals[x])}")
        lines.append(line)
    return [*lines, _legend([trace.name for trace in chart.traces])] if lines else []


def _waterfall(chart: Chart, width: int) -> list[Line]:
    if not chart.traces or not chart.traces[0].y:
        return []
    trace = chart.traces[0]
    bars = waterfall_totals(trace.y)
    most = max(end for bar in bars for end in bar) or 1.0
    name_width = _name_width([_word(x) for x in trace.x], width)
    columns = max(_LEAST_BAR, width - name_width - 12)
    lines = []
    for place, (x, (start, end)) in enumerate(zip(trace.x, bars, strict=False)):
        left, right = (max(0, round(side / most * columns)) for side in (min(start, end), max(start, end)))
        total = place in (0, len(bars) - 1)
        line = _name(_word(x), name_width)
        line.append(" " * left)
        glyph = "█" if total else "▒" if end <= start else "▓"
        line.append(glyph * max(1, right - left), style="bold" if total else "green" if end <= start else "red")
        line.append(f" {number(end - start, 3) if total else signed(end - start)}")
        lines.append(line)
    return lines


def _box(chart: Chart, width: int) -> list[Line]:
    fives = [(trace.name, five_numbers(trace.y), len(finite(trace.y))) for trace in chart.traces]
    ends = [value for _, five, _ in fives if five for value in (five[0], five[4])]
    if not ends:
        return []
    low, high = min(ends), max(ends)
    name_width = _name_width([name for name, _, _ in fives], width)
    columns = max(_LEAST_BAR, width - name_width - 3)
    span = (high - low) or 1.0
    lines = []
    for place, (name, five, count) in enumerate(fives):
        line = _name(name, name_width)
        if five is None:
            lines.append(line.append("no data", style="dim"))
            continue
        cells = [" "] * columns
        at = [round((value - low) / span * (columns - 1)) for value in five]
        cells[at[0] : at[4] + 1] = ["─"] * (at[4] - at[0] + 1)
        cells[at[1] : at[3] + 1] = ["█"] * (at[3] - at[1] + 1)
        cells[at[2]] = "│"
        line.append("".join(cells).rstrip(), style=_colour(place))
        middle, quartiles = number(five[2]), f"{number(five[1])} to {number(five[3])}"
        figures = f"median {middle}, middle half {quartiles}, {count} samples"
        lines += [line, Line(f"{' ' * (name_width + 1)}{figures}", style="dim")]
    return lines


def _spark(chart: Chart, width: int) -> list[Line]:
    name_width = _name_width([trace.name for trace in chart.traces], width)
    columns = max(_LEAST_BAR, min(60, width - name_width - 40))
    lines = []
    for place, trace in enumerate(chart.traces):
        values = finite(trace.y)
        line = _name(trace.name, name_width)
        if not values:
            lines.append(line.append("no data", style="dim"))
            continue
        line.append(_sparkline(trace, columns), style=_colour(place))
        line.append(f" {number(values[0])} to {number(values[-1])}", style="")
        line.append(f" (least {number(min(values))}, greatest {number(max(values))})", style="dim")
        lines.append(line)
    return lines


def _sparkline(trace: Trace, columns: int) -> str:
    """Means of as many equal stretches as there are columns; a gap is a space."""
    count = len(trace.y)
    columns = min(columns, count)
    stretches = [finite(trace.y[place * count // columns : (place + 1) * count // columns]) for place in range(columns)]
    means = [sum(stretch) / len(stretch) if stretch else None for stretch in stretches]
    low, high = min(finite(means)), max(finite(means))
    span = (high - low) or 1.0
    return "".join(" " if mean is None else _SPARKS[round((mean - low) / span * 7)] for mean in means)
