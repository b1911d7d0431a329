"""Time that passes only when told."""

from __future__ import annotations


class FakeClock:
    """Stands in for `time.monotonic` and `time.sleep`: call it for the time, `sleep` or `advance` to let it pass.

    Attributes:
        slept: every `sleep` so far, in seconds.
    """

    def __init__(self, start_seconds: float = 0.0) -> None:
        """Begin at `start_seconds`."""
        self.slept: list[float] = []
        self._now = start_seconds

    def __call__(self) -> float:
        """Seconds now."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass, as the code under test asks for it."""
        assert seconds >= 0
        self.slept.append(seconds)
        self._now += seconds

    def advance(self, seconds: float) -> None:
        """Let time pass, as the test wants it."""
        assert seconds >= 0
        self._now += seconds
