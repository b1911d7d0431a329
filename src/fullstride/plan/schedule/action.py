"""One action of a pipeline: what the simulator prices and the executor runs.

Micro-batches are ranges of samples [lo, hi), so stages may cut the same samples differently.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, cast, get_args

from fullstride.errors import BadInput
from fullstride.files import Value

ActionKind: TypeAlias = Literal[
    "forward",
    "backward",
    "input_grad",
    "weight_grad",
    "send_forward",
    "recv_forward",
    "send_backward",
    "recv_backward",
    "reduce",
    "optimizer",
]

_TEXT = re.compile(r"(\d+):(\w+) c(\d+) \[(\d+),(\d+)\)(?: -> (\d+))?\Z")


class Action(Value, frozen=True, kw_only=True, gc=False):
    """What one rank does next."""

    rank: int
    chunk: int
    """Which of the rank's stages."""
    kind: ActionKind
    lo: int
    hi: int
    """Samples [lo, hi) of the step."""
    peer: int = -1
    """The other rank of a send or receive; -1 for none."""

    def text(self) -> str:
        """One line: `0:send_forward c0 [0,2) -> 1`."""
        peer = f" -> {self.peer}" if self.peer >= 0 else ""
        return f"{self.rank}:{self.kind} c{self.chunk} [{self.lo},{self.hi}){peer}"


def parse_action(line: str) -> Action:
    """The action that `Action.text` wrote.

    Raises:
        BadInput: the line has another form.
    """
    match = _TEXT.match(line.strip())
    if not match or match[2] not in get_args(ActionKind):
        raise BadInput(f"{line!r} is no pipeline action", fix="write it like 0:forward c0 [0,2)")
    return Action(
        rank=int(match[1]),
        kind=cast(ActionKind, match[2]),
        chunk=int(match[3]),
        lo=int(match[4]),
        hi=int(match[5]),
        peer=int(match[6]) if match[6] else -1,
    )
