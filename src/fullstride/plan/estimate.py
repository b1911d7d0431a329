"""What a Plan is predicted to cost: bytes as ledger rows, seconds as time terms. Totals are sums of what is listed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value

Confidence: TypeAlias = Literal["exact", "modelled", "assumed"]
RowKind: TypeAlias = Literal[
    "weights",
    "master",
    "gradients",
    "optimizer",
    "activations",
    "recompute",
    "logits",
    "gathered",
    "buckets",
    "communication",
    "temporary",
    "workspace",
    "context",
    "fragmentation",
    "host",
    "disk",
]
"""`workspace`: what matrix libraries keep for themselves inside torch's allocator; `host` and `disk` are not device memory."""
TermKind: TypeAlias = Literal[
    "compute", "attention", "memory_bound", "recompute", "loss", "comm", "optimizer", "host", "data", "bubble"
]
MomentName: TypeAlias = Literal[
    "load", "first_step", "forward_end", "loss", "backward", "backward_end", "optimizer", "checkpoint"
]
"""`forward_end`: logits and all activations stand; `loss`: the softmax's own backward; `backward`: the last block's, all
activations still there; `backward_end`: the first block's, all gradients there; `first_step`:
the fullest moment of a step before optimizer states that are made late exist; `checkpoint`: between steps."""


class Row(Value, frozen=True, kw_only=True):
    """One kind of bytes on the fullest rank of a stage."""

    name: str
    kind: RowKind
    bytes: int
    source: str
    """The formula, or the paper or code it is from."""
    confidence: Confidence
    moments: tuple[MomentName, ...]
    """When these bytes are there."""
    stage: int = 0


class Term(Value, frozen=True, kw_only=True):
    """One kind of seconds in a step."""

    name: str
    kind: TermKind
    seconds: float
    """Time of the work itself."""
    exposed_seconds: float
    """What it adds to the step: less than `seconds` when it runs beside something else."""
    source: str
    confidence: Confidence


class Moment(Value, frozen=True, kw_only=True):
    """The sum of the rows that are there at one moment."""

    name: MomentName
    bytes: int


class Estimate(FileValue, frozen=True, kw_only=True, tag="estimate"):
    """The prediction for one Plan on one Cluster."""

    plan_hash: str
    rows: tuple[Row, ...]
    terms: tuple[Term, ...]
    moments: tuple[Moment, ...]
    peak_allocated_bytes: int
    """Largest moment, without context and fragmentation: what torch's allocator reports."""
    peak_device_bytes: int
    """With context, communication buffers and fragmentation: what the device must have."""
    capacity_bytes: int
    """What the device has."""
    peak_reserved_bytes: int = 0
    """Largest moment with fragmentation: what torch's allocator has taken from the device; 0: not priced."""
    out_of_memory_probability: float | None = None
    """Chance that the device is too small, from this project's own measured errors (`plan.ledger.totals`); None: not priced."""
    host_bytes: int = 0
    """Pinned host memory of one rank."""
    disk_bytes: int = 0
    """Disk space of one rank."""
    step_seconds: float
    tokens_per_second: float
    """Over all ranks."""
    mfu_full: float | None = None
    """Attention counted whole; None when the device's peak is unknown."""
    mfu_causal: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.peak_device_bytes <= self.capacity_bytes


class Candidate(Value, frozen=True, kw_only=True):
    """A plan that the search considered, in short, and why it was not chosen."""

    summary: str
    """`zero 3, micro-batch 2 x 1, recompute none, compile`."""
    plan_hash: str
    step_seconds: float
    peak_device_bytes: int
    lost_by: str = ""
    """The one term that lost it, in words with numbers; empty for the winner."""
    runs: bool = True
    """Whether this version runs it; else it is priced only."""
