"""Charts as figures of plotly: plain dictionaries, colours as names of the page's CSS variables.

A colour is written `var(--name)`, and the page's script puts in what that variable holds in the scheme in force, so that
one figure serves light and dark. Every text is escaped: plotly reads a little HTML in labels.
"""

from __future__ import annotations

import html
import math
import textwrap
from typing import Any

from fullstride.report.document import Chart, Timeline, Trace
from fullstride.report.words import categories, number, plain, signed, waterfall_totals

NUM_COLOURS = 10
CLEAR = "rgba(0,0,0,0)"
_LABEL_WIDTH = 20
_MANY_POINTS = 80

Figure = dict[str, Any]


def colour(place: int) -> str:
    """The colour of the trace at `place`."""
    return f"var(--c{place % NUM_COLOURS + 1})"


def figure_of(chart: Chart) -> Figure:
    """A chart as `{data, layout}` of plotly."""
    draw = {"waterfall": _waterfall, "box": _boxes, "stacked": _bars, "bar": _bars}.get(chart.form, _lines)
    figure: Figure = {"data": draw(chart), "layout": _layout(chart)}
    if chart.form == "waterfall":
        _room_for_labels(figure["layout"], chart)
    return figure


def timeline_figure(timeline: Timeline) -> Figure:
    """A timeline as bars that start where they start; the first lane is at the top."""
    lanes = list(dict.fromkeys(bar.lane for bar in timeline.bars))
    data = []
    for place, kind in enumerate(kinds_of(timeline)):
        bars = [bar for bar in timeline.bars if bar.kind == kind and math.isfinite(bar.start + bar.end)]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _text(kind),
                "y": [_label(bar.lane) for bar in bars],
                "base": [bar.start for bar in bars],
                "x": [bar.end - bar.start for bar in bars],
                "text": [_text(bar.name) for bar in bars],
                "textposition": "none",
                "hovertemplate": "%{text}<br>%{base:.4s}s, for %{x:.4s}s",
                "marker": {"color": kind_colour(timeline, place), "line": {"width": 0.5, "color": "var(--card)"}},
            }
        )
    layout = _base_layout(96 + 34 * max(len(lanes), 1))
    layout |= {"barmode": "overlay", "bargap": 0.25, "hovermode": "closest"}
    layout["xaxis"] = _axis("seconds")
    layout["yaxis"] = _axis("") | {"type": "category", "autorange": "reversed", "showgrid": False}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": [_label(lane) for lane in lanes]}
    return {"data": data, "layout": layout}


def kinds_of(timeline: Timeline) -> list[str]:
    """Kinds of a timeline's bars in the order they come, the quiet one last."""
    kinds = list(dict.fromkeys(bar.kind for bar in timeline.bars))
    return sorted(kinds, key=lambda kind: kind == timeline.quiet)


def kind_colour(timeline: Timeline, place: int) -> str:
    """The colour of the kind at `place`."""
    return "var(--line)" if kinds_of(timeline)[place] == timeline.quiet else colour(place)


def legend_of(chart: Chart) -> list[tuple[str, str]]:
    """Name and colour of each trace; empty when a legend would say nothing."""
    if chart.form in ("waterfall", "box") or len(chart.traces) < 2:
        return []
    return [(trace.name, colour(place)) for place, trace in enumerate(chart.traces)]


def _text(text: str) -> str:
    return html.escape(plain(text), quote=False)


def _label(text: str | float) -> str:
    words = textwrap.wrap(plain(text if isinstance(text, str) else number(text)), _LABEL_WIDTH) or [" "]
    lines = [*words[:2], words[2] + (" …" if len(words) > 3 else "")] if len(words) > 2 else words
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def _points(values: tuple[float | None, ...]) -> list[float | None]:
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _xs(chart: Chart, trace: Trace) -> list[float | str | None]:
    words = _is_categorical(chart)
    return [_label(x) if words or isinstance(x, str) else x if math.isfinite(x) else None for x in trace.x]


def _is_categorical(chart: Chart) -> bool:
    return chart.form in ("stacked", "waterfall") or any(isinstance(x, str) for trace in chart.traces for x in trace.x)


def _turned(chart: Chart, x: list[Any], y: list[Any]) -> dict[str, Any]:
    return {"x": y, "y": x, "orientation": "h"} if chart.horizontal else {"x": x, "y": y}


def _hover(chart: Chart) -> str:
    return "%{y}: %{x:.4~g}" if chart.horizontal else "%{x}: %{y:.4~g}"


def _interval(trace: Trace) -> dict[str, Any] | None:
    if not trace.low or len(trace.low) != len(trace.y) or len(trace.high) != len(trace.y):
        return None
    middle = [value if value is not None else math.nan for value in trace.y]
    up = [high - value for high, value in zip(trace.high, middle, strict=True)]
    down = [value - low for low, value in zip(trace.low, middle, strict=True)]
    bars = {"array": _points(tuple(up)), "arrayminus": _points(tuple(down)), "symmetric": False, "type": "data"}
    return bars | {"color": "var(--ink-2)", "thickness": 1.4, "width": 5, "visible": True}


def _bars(chart: Chart) -> list[Figure]:
    data = []
    for place, trace in enumerate(chart.traces):
        bar: Figure = {"type": "bar", "name": _text(trace.name), **_turned(chart, _xs(chart, trace), _points(trace.y))}
        bar["marker"] = {"color": colour(place), "line": {"width": 1, "color": "var(--card)"}}
        bar["hovertemplate"] = _hover(chart)
        interval = _interval(trace)
        if interval and chart.form == "bar":
            bar["error_x" if chart.horizontal else "error_y"] = interval
        data.append(bar)
    return data


def _lines(chart: Chart) -> list[Figure]:
    data = []
    for place, trace in enumerate(chart.traces):
        few = len(trace.y) <= _MANY_POINTS
        mode = "markers" if chart.form == "scatter" else "lines+markers" if few else "lines"
        line: Figure = {"type": "scatter", "mode": mode, "name": _text(trace.name)}
        line |= {"x": _xs(chart, trace), "y": _points(trace.y), "hovertemplate": "%{y:.5~g}", "connectgaps": False}
        line |= {"line": {"color": colour(place), "width": 2}, "marker": {"color": colour(place), "size": 6}}
        interval = _interval(trace)
        if interval:
            line["error_y"] = interval
        data.append(line)
    return data


def _boxes(chart: Chart) -> list[Figure]:
    data = []
    for place, trace in enumerate(chart.traces):
        values = [value for value in _points(trace.y) if value is not None]
        box: Figure = {"type": "box", "name": _label(trace.name), ("x" if chart.horizontal else "y"): values}
        box |= {"orientation": "h" if chart.horizontal else "v", "boxpoints": "outliers", "line": {"width": 1.6}}
        if len(values) <= _MANY_POINTS:
            box |= {"boxpoints": "all", "jitter": 0.5, "pointpos": 0}
        box |= {"marker": {"color": colour(place), "size": 4, "opacity": 0.55}, "fillcolor": "var(--wash)"}
        box["line"]["color"] = colour(place)
        data.append(box)
    return data


def _waterfall(chart: Chart) -> list[Figure]:
    if not chart.traces:
        return []
    trace = chart.traces[0]
    values = [value or 0.0 for value in _points(trace.y)]
    bars = waterfall_totals(values)
    last = len(values) - 1
    texts = [number(value, 3) if place in (0, last) else signed(value) for place, value in enumerate(values)]
    # Names may repeat (a lever kept twice); a category axis would lay those bars over each other.
    xs = _unique([str(x) for x in _xs(chart, trace)])
    figure: Figure = {
        "type": "waterfall",
        "name": _text(trace.name),
        "measure": ["absolute", *["relative"] * (last - 1), *(["total"] if last > 0 else [])],
        **_turned(chart, list(xs), [*values[:-1], bars[-1][1]] if values else []),
        "text": texts,
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{y}: %{text}" if chart.horizontal else "%{x}: %{text}",
        "increasing": {"marker": {"color": "var(--bad-fill)"}},
        "decreasing": {"marker": {"color": "var(--good-fill)"}},
        "totals": {"marker": {"color": "var(--total-fill)"}},
        "connector": {"line": {"color": "var(--axis)", "width": 1, "dash": "dot"}},
        "textfont": {"color": "var(--ink)"},
    }
    return [figure]


def _unique(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result


def _room_for_labels(layout: Figure, chart: Chart) -> None:
    ends = [end for trace in chart.traces for bar in waterfall_totals(trace.y) for end in bar]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    layout["xaxis" if chart.horizontal else "yaxis"]["range"] = [low * 1.2, high * 1.2 or 1.0]


def _axis(title: str) -> Figure:
    axis: Figure = {"automargin": True, "gridcolor": "var(--grid)", "linecolor": "var(--axis)", "zerolinecolor": "var(--axis)"}
    axis |= {"tickfont": {"color": "var(--ink-2)"}, "ticks": "outside", "ticklen": 5, "tickcolor": CLEAR, "fixedrange": True}
    if title:
        axis["title"] = {"text": _text(title), "font": {"color": "var(--ink-2)", "size": 12}, "standoff": 10}
    return axis


def _base_layout(height: int) -> Figure:
    hover = {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}}
    return {
        "height": height,
        "autosize": True,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"color": "var(--ink)", "size": 13, "family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"},
        "showlegend": False,
        "hoverlabel": hover,
        "dragmode": False,
    }


def _layout(chart: Chart) -> Figure:
    count = len(chart.traces) if chart.form == "box" else len(categories(chart.traces))
    if chart.form == "bar":
        count *= max(1, (len(chart.traces) + 1) // 2)
    layout = _base_layout(min(900, 84 + 46 * max(count, 1)) if chart.horizontal else 340)
    across, upright = _axis(chart.x_label), _axis(chart.y_label)
    if _is_categorical(chart) or chart.form == "box":
        across |= {"type": "category", "showgrid": False}
    if chart.horizontal:
        across["autorange"] = "reversed"
        across, upright = upright, across
    layout |= {"xaxis": across, "yaxis": upright}
    layout["hovermode"] = "x unified" if chart.form == "line" else "closest"
    if chart.form in ("bar", "stacked"):
        layout |= {"barmode": "stack" if chart.form == "stacked" else "group", "bargap": 0.35}
    return layout
