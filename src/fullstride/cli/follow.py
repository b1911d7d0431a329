"""Watching a training run from outside: its steps as rank 0 writes them down."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from fullstride.events import AnyEvent, StepEnd
from fullstride.report.progress import ProgressView
from fullstride.units import format_count


class StepTail:
    """Reads the steps that are added to an event file, from its present end on."""

    def __init__(self, path: Path) -> None:
        """Start behind what is there already (an earlier part of a resumed run)."""
        self._path = path
        self._skip = path.stat().st_size if path.exists() else 0
        self._file: BinaryIO | None = None
        self._rest = b""
        self._decoder = msgspec.json.Decoder(AnyEvent)

    def read(self) -> list[StepEnd]:
        """The steps that were added since the last call; a line that is not whole yet waits for the next one."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = open(self._path, "rb")  # noqa: SIM115  (closed by close())
            self._file.seek(self._skip)
        lines = (self._rest + self._file.read()).split(b"\n")
        self._rest = lines.pop()
        events = [self._decoder.decode(line) for line in lines if line.startswith(b'{"event":"step_end"')]
        return [event for event in events if isinstance(event, StepEnd)]

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


def show_steps(steps: list[StepEnd], view: ProgressView, num_steps: int) -> None:
    """The newest step on the live line: place, time, loss, tokens per second."""
    if not steps:
        return
    last = steps[-1]
    seconds = (last.time_ns - last.start_ns) / 1e9
    rate = f", {format_count(last.tokens / seconds)} tokens/s" if seconds > 0 else ""
    view.step(seconds, done=last.step + 1, of=num_steps, label=f"loss {last.loss:.4f}, lr {last.lr:.2e}{rate}")
