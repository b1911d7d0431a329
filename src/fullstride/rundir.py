"""Where things lie in a RUN_DIR, and the orders by which a launcher talks to its worker.

    RUN_DIR/
      plan.toml cluster.json model.json versions.json command.txt
      events/rank00000.jsonl        what happened, one line an event
      trace/rank00000.jsonl.gz      device spans of the short profiled window
      orders/0001.json              an order, written whole by the driver
      orders/0001.reply.json        its answer, written whole by rank 0
      plans/NAME.toml               plans that orders name
      logs/rank00000.log            what the rank printed
      checkpoints/step-00000100/    keyed by the unmodified model's parameter names
      measurement.json findings.json
      DONE or FAILED.json

A worker is a process group that carries out the orders in turn. It steps one plan at a time; before another is built it is
released, or set aside with all it holds where there is memory for both. It ends at `exit`, when its parent is gone, or when
no order came for `idle_seconds`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value

WORKER_MODULE = "fullstride.engine.worker"
"""The one link from the rest of fullstride to the engine: a module name on a command line."""


class RunDir(Value, frozen=True, kw_only=True):
    """Paths inside one RUN_DIR; makes nothing."""

    root: str

    @property
    def path(self) -> Path:
        """The folder itself."""
        return Path(self.root)

    @property
    def plan(self) -> Path:
        """The plan that is run."""
        return self.path / "plan.toml"

    @property
    def cluster(self) -> Path:
        """The machine it runs on."""
        return self.path / "cluster.json"

    @property
    def model(self) -> Path:
        """The ModelSpec."""
        return self.path / "model.json"

    @property
    def versions(self) -> Path:
        """Versions of the software, written by the worker."""
        return self.path / "versions.json"

    @property
    def command(self) -> Path:
        """The exact command that was started."""
        return self.path / "command.txt"

    @property
    def orders(self) -> Path:
        """Folder of orders and replies."""
        return self.path / "orders"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def measurement(self) -> Path:
        """The Measurement, once there is one."""
        return self.path / "measurement.json"

    @property
    def done(self) -> Path:
        """Present when the run ended well."""
        return self.path / "DONE"

    @property
    def failed(self) -> Path:
        """Present when the run failed; holds a Failure."""
        return self.path / "FAILED.json"

    def plan_named(self, name: str) -> Path:
        """A plan that an order names."""
        return self.path / "plans" / f"{name}.toml"

    def events(self, rank: int) -> Path:
        """Event file of one rank."""
        return self.path / "events" / f"rank{rank:05d}.jsonl"

    def trace(self, rank: int) -> Path:
        """Device spans of one rank."""
        return self.path / "trace" / f"rank{rank:05d}.jsonl.gz"

    def log(self, rank: int) -> Path:
        """What one rank printed."""
        return self.path / "logs" / f"rank{rank:05d}.log"

    def order(self, number: int) -> Path:
        """An order's file."""
        return self.orders / f"{number:04d}.json"

    def reply(self, number: int) -> Path:
        """The answer to an order."""
        return self.orders / f"{number:04d}.reply.json"

    def checkpoint(self, step: int) -> Path:
        """A checkpoint's folder."""
        return self.checkpoints / f"step-{step:08d}"


FailureClass: TypeAlias = Literal[
    "out_of_memory", "crash", "hang", "not_finite", "refused", "unavailable", "environment", "killed"
]
"""How a trial or a run can fail. `unavailable`: the machine lacks what the plan needs (no C++ compiler, say)."""


class Failure(FileValue, frozen=True, kw_only=True, tag="failure"):
    """Why a run or a trial ended badly: a value, so that the tuner can learn from it."""

    failure: FailureClass
    message: str
    """One line for a person."""
    rank: int = -1
    """The first rank that failed; -1 if unknown."""
    detail: str = ""
    """The end of that rank's traceback or log."""
    fix: str = ""
    wanted_bytes: int = 0
    """For out of memory: the request that failed, 0 if unknown."""


class BuildOrder(FileValue, frozen=True, kw_only=True, tag="build"):
    """Build the plan in `plans/NAME.toml`, or take it up again as it was set aside; none may be in hand."""

    number: int
    plan: str
    """The NAME."""


class RunOrder(FileValue, frozen=True, kw_only=True, tag="run"):
    """Take `steps` optimizer steps with the plan that is built."""

    number: int
    steps: int
    label: str
    """Written into the events of these steps."""
    profile: bool = False
    """Profile these steps: reduce the device trace to Spans in `trace/`; such steps are not timed."""


class AsideOrder(FileValue, frozen=True, kw_only=True, tag="aside"):
    """Set the plan that is built aside with all it holds, under its name."""

    number: int


class ReleaseOrder(FileValue, frozen=True, kw_only=True, tag="release"):
    """Free model, optimizer and data of the plan that is built, and of what was set aside; keep the compile cache."""

    number: int


class ExitOrder(FileValue, frozen=True, kw_only=True, tag="exit"):
    """End the process group."""

    number: int


Order: TypeAlias = BuildOrder | RunOrder | AsideOrder | ReleaseOrder | ExitOrder


class Reply(FileValue, frozen=True, kw_only=True, tag="reply"):
    """The worker's answer, written by rank 0 when all ranks have carried the order out (or one of them failed)."""

    number: int
    ok: bool
    seconds: float
    """How long the order took."""
    failure: Failure | None = None
    peak_allocated_bytes: int = 0
    """Largest over the ranks since the build."""
    peak_reserved_bytes: int = 0
    static_bytes: int = 0
    """Allocated after the last step, largest over the ranks: weights, gradients, states, buffers."""
    recompiles: int = 0
    """Compilations during this order."""
