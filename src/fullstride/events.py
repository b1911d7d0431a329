"""What a run writes down as it goes: one JSON line an event, one file a rank.

Times are monotonic nanoseconds of the rank that wrote them; `RunStart` carries the wall clock and the measured offset to
rank 0, so that a reader can lay the ranks over each other. The writer buffers and never waits for the disk inside a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import msgspec

from fullstride.errors import BadInput
from fullstride.files import Value

Phase: TypeAlias = Literal["data", "h2d", "forward", "backward", "weight_grad", "comm", "optimizer", "offload", "checkpoint"]
"""What a stretch of a step is spent on."""

Clock: TypeAlias = Literal["host", "device"]


class Event(Value, frozen=True, kw_only=True, tag_field="event"):
    """The base of all events."""

    time_ns: int
    """Monotonic nanoseconds of this rank, at the end of what is described."""


class RunStart(Event, frozen=True, kw_only=True, tag="run_start"):
    """A Plan has been built and is about to step; a worker that alternates writes one for each build."""

    rank: int
    world_size: int
    host: str
    pid: int
    plan_hash: str
    work_hash: str
    label: str
    """Name of the plan within this RUN_DIR, as the build order gave it."""
    wall_clock: float
    """Seconds since the epoch at `time_ns`."""
    offset_ns: int
    """Add it to this rank's clock to get rank 0's."""
    build_seconds: float
    first_step: int


class StepEnd(Event, frozen=True, kw_only=True, tag="step_end"):
    """One optimizer update is done."""

    step: int
    start_ns: int
    samples: int
    """Samples of the whole world in this step."""
    tokens: int
    """Tokens that counted towards the loss, over the whole world."""
    loss: float
    """Mean per token over the world."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    skipped: bool = False
    order: str = ""
    """Name of the run order that asked for this step; empty in a plain training run."""


class Span(Event, frozen=True, kw_only=True, tag="span"):
    """A stretch of time inside a step."""

    step: int
    phase: Phase
    start_ns: int
    end_ns: int
    micro_batch: int = 0
    """In a pipeline, the first sample of what is computed."""
    stage: int = 0
    """In a pipeline, the stage that computes."""
    clock: Clock = "host"
    stream: int = 0
    """Device stream; 0 on the host clock."""
    kernel: str = ""
    """Class of the kernel on the device clock (`matmul`, `attention`, `collective`, `copy`, `elementwise`, `optimizer`)."""


class Memory(Event, frozen=True, kw_only=True, tag="memory"):
    """Memory in use at one moment, in bytes; on CPU `reserved` is the resident set and `device_used` equals it."""

    step: int
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    host_bytes: int


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """A sign of life, for whoever watches for hangs."""

    phase: str
    collective: int = 0
    """Number of the last collective that was started."""
    note: str = ""


class RunEnd(Event, frozen=True, kw_only=True, tag="run_end"):
    """The plan named in the last `RunStart` is released."""

    cause: Literal["done", "released", "signal", "error"]
    note: str = ""


class Evaluation(Event, frozen=True, kw_only=True, tag="evaluation"):
    """Loss on held-out data after `step` optimizer steps."""

    step: int
    loss: float
    """Mean per token."""
    tokens: int
    """Tokens that counted."""


AnyEvent: TypeAlias = RunStart | StepEnd | Span | Memory | Progress | Evaluation | RunEnd


def now_ns() -> int:
    """The clock that every event uses."""
    return time.monotonic_ns()


class EventWriter:
    """Appends events of one rank to `path`; buffered, flushed when `flush` is called (between steps, never inside one)."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; the folder is made if it is missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out: BinaryIO = open(path, "ab", buffering=1 << 20)  # noqa: SIM115  (closed by close())
        self._encoder = msgspec.json.Encoder()

    def write(self, event: Event) -> None:
        """Put one event in the buffer."""
        self._out.write(self._encoder.encode(event) + b"\n")

    def flush(self) -> None:
        """Hand the buffer to the operating system."""
        self._out.flush()

    def close(self) -> None:
        """Flush and close."""
        self._out.close()


def read_events(path: Path, start: int = 0) -> Iterator[AnyEvent]:
    """Events of one rank in order; a last line that a kill cut short is left out.

    Args:
        path: the rank's file.
        start: bytes to leave out at its head, which must end with a line.

    Raises:
        BadInput: a line inside the file is no event.
    """
    decoder = msgspec.json.Decoder(AnyEvent)
    with open(path, "rb") as lines:
        lines.seek(start)
        for number, line in enumerate(lines, 1):
            try:
                yield _decoded(line, decoder)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                if not line.endswith(b"\n"):
                    return
                raise BadInput(f"{path}: line {number}: {error}", fix="the file is damaged") from None


def _decoded(line: bytes, decoder: msgspec.json.Decoder[AnyEvent]) -> AnyEvent:
    """One event; JSON has no word for NaN or infinity, `null` stands for them where a float is due."""
    if b":null" not in line:
        return decoder.decode(line)
    raw = msgspec.json.decode(line)
    event: AnyEvent = msgspec.convert({key: math.nan if value is None else value for key, value in raw.items()}, AnyEvent)
    return event
