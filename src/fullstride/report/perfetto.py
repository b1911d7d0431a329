"""A timeline in the trace-event format that Perfetto and Chrome open.

The format: "Trace Event Format" of the Chromium project; complete events (`ph: X`) in microseconds, with metadata events
(`ph: M`) that name process and threads.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fullstride.report.document import Timeline
from fullstride.report.words import plain


def trace_json(timeline: Timeline) -> bytes:
    """The timeline as one JSON object: a lane is a thread, a bar an event; bars without finite ends are left out."""
    lanes = {lane: place + 1 for place, lane in enumerate(dict.fromkeys(bar.lane for bar in timeline.bars))}
    events: list[dict[str, Any]] = [_name("process_name", 0, timeline.title)]
    for lane, place in lanes.items():
        events.append(_name("thread_name", place, lane))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": place, "args": {"sort_index": place}})
    for bar in timeline.bars:
        if not math.isfinite(bar.start + bar.end):
            continue
        event = {"ph": "X", "name": plain(bar.name), "cat": plain(bar.kind), "pid": 1, "tid": lanes[bar.lane]}
        events.append(event | {"ts": bar.start * 1e6, "dur": (bar.end - bar.start) * 1e6})
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _name(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": {"name": plain(name)}}
