"""Starts a Job on this host, in a session of its own: Ctrl-C in the terminal reaches the launcher alone, which decides."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

from fullstride.cluster.children import tree
from fullstride.errors import EnvironmentFault
from fullstride.files import write_bytes
from fullstride.launch.command import shown
from fullstride.launch.job import Job
from fullstride.launch.logs import gather_logs, launcher_log
from fullstride.rundir import RunDir


class Process:
    """A started Job: the workers under their guard."""

    def __init__(self, job: Job, popen: subprocess.Popen[bytes]) -> None:
        """Take over a guard that was started for this job; `start` is the way to make one."""
        self.job = job
        self._popen = popen
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._popen.pid

    def poll(self) -> int | None:
        """Exit status (128 + n for signal n), or None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for the end; None if the time is over first."""
        try:
            return self._popen.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def processes(self) -> list[psutil.Process]:
        """Guard, torchrun, ranks and whatever they started, as far as they are alive."""
        return tree(self.pid)

    def terminate(self, grace_seconds: float = 10.0) -> int | None:
        """Ask the ranks to end (they may save), wait, then kill what remains. Returns the exit status."""
        if self.poll() is None:
            self._popen.terminate()
            self.wait(grace_seconds)
        self.kill()
        return self.poll()

    def kill(self) -> None:
        """End all of it at once."""
        for _ in range(3):  # again, for what was being started meanwhile
            alive = self.processes() if self.poll() is None else []
            if not alive:
                break
            # The guard last: as long as it lives, orphans are its children and are found.
            for process in [*alive[1:], alive[0]]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(alive[1:], timeout=5.0)
            self.wait(5.0)

    def close(self) -> None:
        """Kill what still runs and put the ranks' logs in their place; may be called again."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        if self._popen.stdin:
            with contextlib.suppress(OSError):
                self._popen.stdin.close()
        gather_logs(RunDir(root=self.job.run_dir), self.job.num_processes)


def start(job: Job) -> Process:
    """Start a job's workers; writes `command.txt`, prints nothing (see `logs/`).

    Raises:
        EnvironmentFault: the RUN_DIR cannot be written, or no process can be started.
    """
    run_dir = RunDir(root=job.run_dir)
    write_bytes(run_dir.command, shown(job).encode())
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | job.env
    log = launcher_log(run_dir)
    command = [sys.executable, "-m", "fullstride.launch.guard", "--", *job.command]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:
            out.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {shown(job)}".encode())
            out.flush()
            popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True)
    except OSError as error:
        where = error.filename or job.run_dir
        raise EnvironmentFault(f"{where}: {error.strerror}", fix="check the disk, permissions and process limits") from None
    return Process(job, popen)
