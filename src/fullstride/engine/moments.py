"""Named moments of a run, for whoever wants to be told: tests that kill a rank at one of them, mostly.

Names: `step` (a step is about to run), `save` (the state is about to be copied), `staged` (it is copied, writing begins),
`written` (this rank's files are on disk), `manifest` (the manifest is, the folder is not renamed), `saved` (it is visible).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

Moment: TypeAlias = Literal["step", "save", "staged", "written", "manifest", "saved"]

LISTENERS: list[Callable[[Moment, int], None]] = []
"""Each is called with the moment's name and the step; empty in ordinary runs."""


def moment(name: Moment, step: int) -> None:
    """Tell the listeners that `name` is reached at `step`."""
    for listener in LISTENERS:
        listener(name, step)
