"""A schedule in a file: a head line, then one action a line, rank by rank, in order within each rank.

    kind=schedule format=1 name=1f1b pp=2 chunks=1 placement=loop samples=4
    # rank 0
    0:forward c0 [0,2)
    0:send_forward c0 [0,2) -> 1

What follows `#` is not read. The peer of a receive stands after `->` too: it is the rank it comes from.
"""

from __future__ import annotations

from pathlib import Path

from fullstride.errors import BadInput
from fullstride.files import FORMAT, Value, read_bytes, write_bytes
from fullstride.plan.schedule.action import Action, parse_action
from fullstride.plan.schedule.placement import Placement

_EXAMPLE = "kind=schedule format=1 name=1f1b pp=2 chunks=1 placement=loop samples=4"


class Schedule(Value, frozen=True, kw_only=True):
    """A whole schedule."""

    name: str
    placement: Placement
    samples: int
    """Samples of the step on this pipeline."""
    actions: tuple[Action, ...]
    """Rank by rank, in order within each."""


def schedule_text(schedule: Schedule) -> str:
    """The schedule as text; `parse_schedule` of it is equal to `schedule`."""
    where = schedule.placement
    head = f"kind=schedule format={FORMAT} name={schedule.name} pp={where.pp} chunks={where.chunks}"
    lines = [f"{head} placement={where.style} samples={schedule.samples}"]
    rank = -1
    for action in schedule.actions:
        if action.rank != rank:
            rank = action.rank
            lines.append(f"# rank {rank}")
        lines.append(action.text())
    return "\n".join(lines) + "\n"


def parse_schedule(text: str, where: str) -> Schedule:
    """The schedule that `schedule_text` wrote, or a person; `checker.faults` says whether it can be run.

    Raises:
        BadInput: names `where`, the line and what is wrong with it.
    """
    head: tuple[str, Placement, int] | None = None
    actions = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        if head is None:
            head = _head(words, f"{where}: line {number}")
            continue
        try:
            actions.append(parse_action(words))
        except BadInput as error:
            raise BadInput(f"{where}: line {number}: {error.message}", fix=error.fix) from None
    if head is None:
        raise BadInput(f"{where}: is empty", fix=f"begin with {_EXAMPLE}")
    actions.sort(key=lambda action: action.rank)
    return Schedule(name=head[0], placement=head[1], samples=head[2], actions=tuple(actions))


def _head(line: str, where: str) -> tuple[str, Placement, int]:
    entries = dict(word.split("=", 1) for word in line.split() if "=" in word)
    if entries.get("kind") != "schedule" or len(entries) != len(line.split()):
        raise BadInput(f"{where}: {line!r} is no head of a schedule", fix=f"begin with {_EXAMPLE}")
    if entries.get("format") != str(FORMAT):
        raise BadInput(
            f"{where}: format is {entries.get('format')!r}, this version reads format {FORMAT}", fix="write it again"
        )
    unknown = set(entries) - {"kind", "format", "name", "pp", "chunks", "placement", "samples"}
    if unknown:
        raise BadInput(f"{where}: unknown entry {min(unknown)!r}", fix=f"begin with {_EXAMPLE}")
    style = entries.get("placement", "loop")
    if style not in ("loop", "v"):
        raise BadInput(f"{where}: placement is {style!r}", fix="use loop or v")
    pp, chunks, samples = (_count(entries, name, where) for name in ("pp", "chunks", "samples"))
    return entries.get("name", "custom"), Placement(pp=pp, chunks=chunks, style="v" if style == "v" else "loop"), samples


def _count(entries: dict[str, str], name: str, where: str) -> int:
    text = entries.get(name, "")
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise BadInput(f"{where}: {name} is {text!r}, expected a number from 1", fix=f"begin with {_EXAMPLE}")
    return int(text)


def read_schedule(path: Path | str) -> Schedule:
    """Read a schedule file.

    Raises:
        BadInput: no such file, or its content is no schedule.
        EnvironmentFault: it may not be read.
    """
    try:
        return parse_schedule(read_bytes(path).decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text ({error.reason})", fix="give a schedule file") from None


def write_schedule(schedule: Schedule, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a schedule file, whole.

    Raises:
        BadInput: the file is there already and `overwrite` is False.
        EnvironmentFault: the disk refuses.
    """
    if not overwrite and Path(path).exists():
        raise BadInput(f"{path}: is there already, and a user's file is never written over", fix="choose another name")
    write_bytes(path, schedule_text(schedule).encode())
