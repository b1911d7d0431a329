"""Talks to workers: orders go out as files, replies come back, and every way they can fail is a value.

Plans whose workers would be started alike (same number of ranks, same variables, same time-out of collectives) take turns
in one worker; any other plan gets a fresh one. After a failure the worker is ended, and the next build starts a new one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from fullstride.files import read_json, write_json
from fullstride.launch.command import worker_command, worker_env
from fullstride.launch.failure import failure_of, hang, oom_kills
from fullstride.launch.job import Job
from fullstride.launch.local import Process, start
from fullstride.plan.plan import Plan
from fullstride.plan.toml import write_plan
from fullstride.rundir import AsideOrder, BuildOrder, ExitOrder, Failure, ReleaseOrder, Reply, RunDir, RunOrder

START_SECONDS = 300.0
"""For a worker to come up: interpreter, torch, process group."""
BUILD_SECONDS = 600.0
FIRST_RUN_SECONDS = 900.0
"""For the first steps of a build, compilation included."""
RUN_SLACK = 20.0
"""Later steps may take this many times what steps of this build took before; more is a hang."""
LEAST_SECONDS = 120.0
RELEASE_SECONDS = 120.0
EXIT_SECONDS = 10.0


class WorkerSession:
    """A worker in a RUN_DIR, started when first needed; also a context manager."""

    def __init__(
        self,
        run_dir: RunDir | str | Path,
        plan: Plan,
        *,
        poll_seconds: float = 0.01,
        command: Callable[[RunDir, Plan], Job] = worker_command,
    ) -> None:
        """Prepare a session; starts nothing.

        Args:
            run_dir: where orders, events and logs lie.
            plan: the first plan; its ranks and variables are what the worker is started with.
            poll_seconds: between looks for a reply.
            command: what builds the job.
        """
        self.run_dir = run_dir if isinstance(run_dir, RunDir) else RunDir(root=str(run_dir))
        self.process: Process | None = None
        self.built = ""
        self._aside: set[str] = set()
        self._plan = plan
        self._poll_seconds, self._command = poll_seconds, command
        self._number = self._answer_old_orders()
        self._step_seconds: float | None = None
        self._kills: int | None = None

    def __enter__(self) -> WorkerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def build(self, name: str, plan: Plan, *, timeout_seconds: float = BUILD_SECONDS) -> Reply:
        """Build a plan under a name, or take it up again if it was set aside; starts or restarts the worker as needed.

        What is in hand is released before, and what is aside with it.

        Raises:
            EnvironmentFault: the RUN_DIR cannot be written.
        """
        write_plan(plan, self.run_dir.plan_named(name), overwrite=True)
        if self.process and not self._serves(plan):
            self.close()
        elif self.process and self.built:
            released = self.release()
            if not released.ok:
                self.close()
        self._plan = plan
        fresh = self.process is None
        if fresh:
            self._start(plan)
        self._step_seconds = None
        limit = timeout_seconds + (START_SECONDS if fresh else 0.0)
        reply = self._order(BuildOrder(number=self._next(), plan=name), f"plan {name} to be built", limit)
        self.built = name if reply.ok else ""
        self._aside.discard(name)
        return reply

    def run(self, steps: int, label: str, profile: bool = False, *, timeout_seconds: float | None = None) -> Reply:
        """Take steps with the plan that is built; the time-out follows from how long its steps took before."""
        order = RunOrder(number=self._next(), steps=steps, label=label, profile=profile)
        if timeout_seconds is None:
            usual = FIRST_RUN_SECONDS if self._step_seconds is None else RUN_SLACK * self._step_seconds * steps
            timeout_seconds = max(LEAST_SECONDS, usual)
        reply = self._order(order, f"{steps} steps of {self.built or 'no plan'} ({label})", timeout_seconds)
        if reply.ok and steps and not profile:
            self._step_seconds = reply.seconds / steps
        return reply

    def set_aside(self) -> Reply:
        """Set the plan that is built aside with all it holds, until it is built again under its name or released."""
        name = self.built
        reply = self._order(AsideOrder(number=self._next()), f"{name or 'nothing'} to be set aside", RELEASE_SECONDS)
        if reply.ok and name:
            self._aside.add(name)
        self.built = ""
        return reply

    def holds(self, name: str) -> bool:
        """Whether the plan of that name is aside in the worker that runs now."""
        return name in self._aside

    def release(self) -> Reply:
        """Let go of the plan that is built, and of what was set aside; the worker stays."""
        reply = self._order(ReleaseOrder(number=self._next()), f"{self.built or 'nothing'} to be released", RELEASE_SECONDS)
        self.built = ""
        self._aside.clear()
        return reply

    def close(self) -> None:
        """End the worker, politely at first; may be called again, and a later build starts a new one."""
        process, number = self.process, self._next()
        self.process, self.built = None, ""
        self._aside.clear()
        if process is None:
            return
        try:
            if process.poll() is None:
                order = ExitOrder(number=number)
                write_json(self.run_dir.order(order.number), order)
                self._let_it_end(process, order.number)
        finally:
            process.close()
            self._number = self._answer_old_orders()

    def _let_it_end(self, process: Process, number: int) -> None:
        """Wait for the end; once the exit is answered there is nothing left to lose, and taking torch down can be slow."""
        end = time.monotonic() + EXIT_SECONDS
        while time.monotonic() < end and not self.run_dir.reply(number).exists() and process.wait(0.05) is None:
            pass
        process.wait(1.0)

    def _serves(self, plan: Plan) -> bool:
        return _likeness(plan) == _likeness(self._plan) and self.process is not None and self.process.poll() is None

    def _next(self) -> int:
        """The number of the next order. Numbers leave no gaps: a worker takes the orders in turn from the first one."""
        self._number += int(self.process is not None)
        return self._number

    def _start(self, plan: Plan) -> None:
        for mark in (self.run_dir.failed, self.run_dir.done):
            mark.unlink(missing_ok=True)
        write_plan(plan, self.run_dir.plan, overwrite=True)
        self._answer_old_orders()
        self._kills = oom_kills()
        self.process = start(self._command(self.run_dir, plan))

    def _order(self, order: BuildOrder | RunOrder | AsideOrder | ReleaseOrder, what: str, limit: float) -> Reply:
        """Give an order and wait for its answer; a worker that failed is ended."""
        began = time.monotonic()
        if self.process is None:
            failure = Failure(failure="refused", message=f"{what}: no worker is running", fix="build a plan first")
            return Reply(number=order.number, ok=False, seconds=0.0, failure=failure)
        write_json(self.run_dir.order(order.number), order)
        try:
            reply = self._wait(order.number, what, limit, began)
        except BaseException:  # interrupted: leave no worker behind
            self._drop(order)
            raise
        if not reply.ok:
            self._drop(order, reply)
        return reply

    def _wait(self, number: int, what: str, limit: float, began: float) -> Reply:
        process, path = self.process, self.run_dir.reply(number)
        assert process is not None
        while True:
            ended = process.poll()  # before the look for a reply: what was written before the end is then seen
            if path.exists():
                return read_json(path, Reply)
            seconds = time.monotonic() - began
            if ended is not None:
                failure = failure_of(self.run_dir, ended, oom_kills_before=self._kills)
                return Reply(number=number, ok=False, seconds=seconds, failure=failure)
            if seconds > limit:
                return Reply(number=number, ok=False, seconds=seconds, failure=hang(what, limit, self.run_dir))
            time.sleep(self._poll_seconds)

    def _drop(self, order: BuildOrder | RunOrder | AsideOrder | ReleaseOrder, reply: Reply | None = None) -> None:
        """End the worker at once; its order is answered, so that the next worker does not take it up."""
        process, self.process, self.built = self.process, None, ""
        self._aside.clear()
        if process is not None:
            process.close()
        if not self.run_dir.reply(order.number).exists():
            failure = Failure(failure="killed", message="given up by the launcher")
            write_json(
                self.run_dir.reply(order.number), reply or Reply(number=order.number, ok=False, seconds=0.0, failure=failure)
            )

    def _answer_old_orders(self) -> int:
        """Answer what earlier workers left open, and return the largest number in use."""
        numbers = [int(path.stem) for path in self.run_dir.orders.glob("*.json") if re.fullmatch(r"\d+", path.stem)]
        for number in numbers:
            if not self.run_dir.reply(number).exists():
                failure = Failure(failure="killed", message="left open by an earlier worker")
                write_json(self.run_dir.reply(number), Reply(number=number, ok=False, seconds=0.0, failure=failure))
        return max(numbers, default=0)


def _likeness(plan: Plan) -> tuple[int, dict[str, str], float]:
    """What decides how a worker is started: plans alike in it can share one."""
    return plan.layout.world_size, worker_env(plan), plan.comm.timeout_seconds
