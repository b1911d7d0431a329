"""Processes that must not outlive their time: run one under a deadline, end one with all that it started.

Elastic launchers give each rank a session of its own, so that a signal to a process group does not reach them: a tree is
ended by walking it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil


class Finished(NamedTuple):
    """How a child ended."""

    code: int | None
    """Exit status, negative for a signal; None if it was ended at its deadline."""
    output: str
    """The end of what it printed, both streams."""


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that are alive; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: Sequence[psutil.Process], *, grace_seconds: float = 5.0) -> None:
    """Ask processes to end, wait, then kill those that remain; what they start meanwhile is killed with them."""
    everyone = {process.pid: process for process in processes}
    for process in everyone.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(list(everyone.values()), timeout=grace_seconds)
    late = {child.pid: child for process in alive for child in tree(process.pid)} | {process.pid: process for process in alive}
    for process in late.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(late.values()), timeout=5.0)


def run_bounded(command: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end or to its deadline, and leave nothing of it behind.

    Output goes through a file, so that a full pipe cannot stop the child, nor a grandchild hold the wait.
    """
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(env or os.environ), start_new_session=True
        )
        code = _wait(child, time.monotonic() + timeout_seconds)
        out.seek(max(0, out.tell() - 8000))
        return Finished(code, out.read().decode(errors="replace"))


def _wait(child: subprocess.Popen[bytes], deadline: float) -> int | None:
    seen: dict[int, psutil.Process] = {}
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=0.2)
            seen |= {process.pid: process for process in tree(child.pid)}
        return None
    finally:
        # A grandchild whose parent died is found by having been seen before.
        left = {process.pid: process for process in tree(child.pid)} | seen
        end([process for process in left.values() if process.is_running()], grace_seconds=2.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1.0)
