"""Stands between a launcher and its workers, so that none of them is left over, whoever is killed.

Run as `python -m fullstride.launch.guard -- COMMAND...`. It ends with the command's status (128 + n for signal n).

- Its standard input is a pipe that the launcher holds: when that closes, the launcher is gone, killed or not, and the
  workers are ended.
- It adopts orphans (Linux's child subreaper), because torchrun gives each rank a session of its own: ranks whose torchrun
  was killed are still found, and ended.
- SIGTERM goes to the ranks first, all at once, so that they can save together; a second one also to their launcher.
- If the guard itself is killed, the kernel sends SIGTERM to the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import psutil

from fullstride.cluster.children import end, tree

POLL_SECONDS = 0.05
GRACE_SECONDS = 20.0
"""For workers whose launcher is gone: time to end by themselves."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the other safeguards remain
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare


class Guard:
    """One command and what became of it."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the command; its standard input is empty."""
        self.terms = 0
        self.launcher = os.getppid()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The guard has one thread, so code between fork and exec is safe here.
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509
        )

    def _on_term(self, number: int, frame: object) -> None:
        self.terms += 1

    def watch(self) -> int:
        """Wait for the end of the command or of the launcher; leave nothing behind."""
        handled = 0
        while self.child.poll() is None:
            if self.terms > handled:
                handled += 1
                self._pass_on(first=handled == 1)
            if self._launcher_is_gone():
                self._pass_on(first=True)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.child.wait(timeout=GRACE_SECONDS)
                break
        end([process for process in tree(os.getpid())[1:] if process.is_running()], grace_seconds=1.0)
        code = self.child.wait()
        return 128 - code if code < 0 else code

    def _launcher_is_gone(self) -> bool:
        ready, _, _ = select.select([0], [], [], POLL_SECONDS)
        return (bool(ready) and os.read(0, 4096) == b"") or os.getppid() != self.launcher

    def _pass_on(self, *, first: bool) -> None:
        """SIGTERM to the ranks, or to the command itself if it has none yet or was asked before."""
        ranks: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks = psutil.Process(self.child.pid).children()
        if not (first and ranks):
            self.child.terminate()
            return
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()


def main(arguments: Sequence[str]) -> int:
    """Run `-- COMMAND...` under guard."""
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    assert command, "the guard is started with a command"
    try:
        return Guard(command).watch()
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
