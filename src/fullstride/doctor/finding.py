"""What a diagnosis says."""

from __future__ import annotations

from fullstride.files import FileValue, Value


class Evidence(Value, frozen=True, kw_only=True):
    """Where it was seen."""

    file: str
    lines: tuple[int, ...] = ()
    text: str = ""


class Finding(FileValue, frozen=True, kw_only=True, tag="finding"):
    """One thing that is wrong (or strange), with what it rests on."""

    code: str
    """Short stable name: `nccl.unknown-variable`."""
    what: str
    where: str
    """Rank, link, file or module."""
    confidence: float
    """0 to 1."""
    evidence: tuple[Evidence, ...]
    cause: str
    alternative: str
    """The best other cause."""
    action: str
    """What to do next."""
