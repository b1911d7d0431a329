"""Watching a training run from outside: its steps and held-out losses as rank 0 writes them down."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fullstride.events import Evaluation, Progress, StepEnd, read_events
from fullstride.report.progress import ProgressView
from fullstride.units import format_count

Told = StepEnd | Evaluation | Progress
TOLD_PHASES = {"checkpoint": "a checkpoint was not saved:", "resume": "goes on from"}
"""Signs of life that a person should read, and how they are introduced."""


class Tail:
    """Reads what is added to an event file, from its present end on."""

    last: StepEnd | None = None
    """The newest step that was read."""
    evaluation: Evaluation | None = None
    """The newest held-out loss that was read."""

    def __init__(self, path: Path) -> None:
        """Start behind what is there already (an earlier part of a resumed run)."""
        self._path = path
        self._start = path.stat().st_size if path.exists() else 0

    def read(self) -> list[Told]:
        """What was added since the last call; a line that is not whole yet waits for the next one."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._start)
            added = file.read()
        events = islice(read_events(self._path, self._start), added.count(b"\n"))
        told = [event for event in events if isinstance(event, Told) and _is_told(event)]
        self._start += added.rfind(b"\n") + 1
        for event in told:
            if isinstance(event, StepEnd):
                self.last = event
            elif isinstance(event, Evaluation):
                self.evaluation = event
        return told


def _is_told(event: Told) -> bool:
    return not isinstance(event, Progress) or (event.phase in TOLD_PHASES and bool(event.note))


def show(told: list[Told], view: ProgressView, num_steps: int) -> None:
    """Held-out losses and saves that failed as lines that stay, the newest step on the live line: time, loss, tokens/s."""
    for event in told:
        if isinstance(event, Progress):
            view.note(f"  {TOLD_PHASES[event.phase]} {event.note}")
        if isinstance(event, Evaluation):
            view.note(f"  after {event.step} steps: held-out loss {event.loss:.4f} over {format_count(event.tokens)} tokens")
    steps = [event for event in told if isinstance(event, StepEnd)]
    if not steps:
        return
    last = steps[-1]
    seconds = (last.time_ns - last.start_ns) / 1e9
    rate = f", {format_count(last.tokens / seconds)} tokens/s" if seconds > 0 else ""
    view.step(seconds, done=last.step + 1, of=num_steps, label=f"loss {last.loss:.4f}, lr {last.lr:.2e}{rate}")
