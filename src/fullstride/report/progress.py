"""What is going on, while it goes on: one live line on a terminal, plain lines into a pipe or a log.

Everything goes to standard error, so that standard output stays free for the answer.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table as Grid
from rich.text import Text as Line

from fullstride.report.document import Tone
from fullstride.report.words import plain
from fullstride.units import format_seconds

_QUIET_SECONDS = 30.0
"""A pipe gets a sign of life this often while one thing goes on."""

_TONES: dict[Tone, str] = {"plain": "", "quiet": "dim", "good": "green", "warn": "yellow", "bad": "red"}


class ProgressView:
    """Progress of a long verb; use it as a context manager, and tell it what happens.

    Args:
        title: what is being done: `tune llama3-1b`.
        budget_seconds: time allowed, to show what is left; None where there is no limit.
        num_trials: how many trials there will be at most; None if that is not known.
        console: where to; standard error by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        title: str,
        *,
        budget_seconds: float | None = None,
        num_trials: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show nothing yet; `with` begins it."""
        self._title, self._budget, self._num_trials = plain(title), budget_seconds, num_trials
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._clock = clock
        self._began = self._since = self._said = clock()
        self._now, self._detail, self._step, self._share = "", "", "", math.nan
        self._done = 0
        self._live: Live | None = None
        self._spinner = Spinner("dots", style="cyan")

    def __enter__(self) -> ProgressView:
        """Begin."""
        self._began = self._since = self._said = self._clock()
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._shown, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        else:
            self._line(self._title)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End; the live line goes away, what was printed stays."""
        if self._live:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Something else begins: `probe the machine`, `measure the baseline`."""
        self._begin(text, "")

    def trial(self, lever: str, change: str, predicted_ratio: float | None = None) -> None:
        """A trial begins."""
        hope = f", predicted {predicted_ratio:.2f} x" if predicted_ratio and math.isfinite(predicted_ratio) else ""
        self._begin(lever, f"{change}{hope}")

    def step(self, step_seconds: float, *, done: int | None = None, of: int | None = None, label: str = "") -> None:
        """A step has been taken, or a round of them with this mean: shown live, and now and then in a log."""
        known = f"step {format_seconds(step_seconds)}" if math.isfinite(step_seconds) else ""
        place = f"{done} of {of}" if done is not None and of else f"{done} steps" if done is not None else ""
        self._share = done / of if done is not None and of else math.nan
        self._step = ", ".join(part for part in (plain(label), known, place) if part)
        if not self._live and self._clock() - self._said >= _QUIET_SECONDS:
            self._line(f"  {self._now}: {self._step}{self._left()}", style="dim")

    def verdict(self, lever: str, outcome: str, note: str = "", tone: Tone = "plain") -> None:
        """A trial has ended: a line that stays."""
        self._done += 1
        took = format_seconds(self._clock() - self._since)
        line = Line(f"{plain(outcome):>9}  ", style=_TONES[tone])
        line.append(plain(lever), style="bold")
        line.append(f"  {plain(note)}" if note else "")
        line.append(f"  ({took})", style="dim")
        self._print(line)

    def note(self, text: str, tone: Tone = "plain") -> None:
        """A line that stays."""
        self._print(Line(plain(text), style=_TONES[tone]))

    def _begin(self, now: str, detail: str) -> None:
        self._now, self._detail, self._step, self._share = plain(now), plain(detail), "", math.nan
        self._since = self._clock()
        if not self._live:
            self._line(f"  {self._now}{f': {self._detail}' if self._detail else ''}{self._left()}", style="dim")

    def _left(self) -> str:
        if self._budget is None:
            return ""
        left = self._budget - (self._clock() - self._began)
        return f" [{format_seconds(left)} left]" if left > 0 else " [time is up, finishing]"

    def _print(self, line: Line) -> None:
        self._said = self._clock()
        (self._live.console if self._live else self._console).print(line, soft_wrap=True)

    def _line(self, text: str, style: str = "") -> None:
        self._print(Line(text, style=style))

    def _shown(self) -> RenderableType:
        spent = self._clock() - self._began
        top = Line(no_wrap=True, overflow="ellipsis")
        top.append(self._title, style="bold")
        trials = (
            f"{self._done} of {self._num_trials} trials" if self._num_trials else f"{self._done} trials" if self._done else ""
        )
        times = f"{format_seconds(spent)} spent{self._left()}"
        top.append("  " + ", ".join(part for part in (trials, times) if part), style="dim")
        grid = Grid.grid(padding=(0, 1))
        now = Line(self._now, no_wrap=True, overflow="ellipsis")
        now.append(f"  {self._detail}" if self._detail else "", style="dim")
        grid.add_row(self._spinner, now)
        rows: list[RenderableType] = [top]
        if self._budget:
            rows.append(ProgressBar(total=self._budget, completed=min(spent, self._budget), width=min(40, self._console.width)))
        rows.append(grid)
        if self._step:
            rows.append(Line(f"  {self._step}", style="cyan", no_wrap=True, overflow="ellipsis"))
        return Group(*rows)
