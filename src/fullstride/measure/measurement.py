"""What was measured: rounds of step times, what they amount to, and how two plans compare."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value

Form: TypeAlias = Literal["short", "full"]
Verdict: TypeAlias = Literal["better", "worse", "no difference", "undetermined", "void"]
ShareName: TypeAlias = Literal[
    "data", "forward", "backward", "exposed_comm", "optimizer", "offload", "host_gap", "rest", "unattributed"
]


class Interval(Value, frozen=True, kw_only=True):
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float
    confidence: float
    """Such as 0.99."""


class Round(Value, frozen=True, kw_only=True):
    """Consecutive timed steps of one plan, warm-up left out."""

    index: int
    """Position in the alternation."""
    label: str
    """Name of the plan in the run: `baseline`, `candidate`."""
    step_seconds: tuple[float, ...]
    void: str = ""
    """Why this round does not count; empty if it does."""


class Health(Value, frozen=True, kw_only=True):
    """One health figure with its limit."""

    name: Literal["throughput stability", "memory volatility", "communication efficiency"]
    value: float | None
    """None when not applicable (one rank) or not known."""
    limit: float
    good: bool | None
    """None when there is no value."""
    samples: int
    """Steps it rests on."""
    note: str = ""
    """Says so when it needs more steps than were run."""


class Share(Value, frozen=True, kw_only=True):
    """A part of the mean step."""

    name: ShareName
    seconds: float


class MemoryUse(Value, frozen=True, kw_only=True):
    """Largest over the ranks, in bytes."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    static_bytes: int
    device_used_bytes: int = 0
    host_bytes: int = 0


class Measurement(FileValue, frozen=True, kw_only=True, tag="measurement"):
    """One plan, measured on one cluster."""

    plan_hash: str
    work_hash: str
    cluster: str
    """Digest of the Cluster."""
    device: str
    versions: dict[str, str]
    form: Form
    started: str
    """ISO 8601 with zone."""
    world_size: int
    warmup_steps: int
    rounds: tuple[Round, ...]
    step_seconds: Interval
    """Mean over the rounds that count, extremes dropped."""
    samples_per_step: int
    tokens_per_step: int
    tokens_per_second: float
    """Over all ranks."""
    mfu_full: float | None = None
    mfu_causal: float | None = None
    health: tuple[Health, ...] = ()
    shares: tuple[Share, ...] = ()
    exposed_comm_seconds: float | None = None
    memory: MemoryUse
    build_seconds: float = 0.0
    recompiles: int = 0
    """In the timed steps; steady state has none."""
    losses: tuple[float, ...] = ()
    """Of the first steps."""
    grad_norms: tuple[float, ...] = ()


class Comparison(FileValue, frozen=True, kw_only=True, tag="comparison"):
    """Is the second plan really faster than the first?"""

    base: Measurement
    other: Measurement
    ratio: Interval
    """Time of the base over time of the other: above 1 is faster."""
    interleaved: bool
    alternations: int
    threshold: float
    """What the lower end must exceed for a gain to be called."""
    verdict: Verdict
    reasons: tuple[str, ...] = ()
