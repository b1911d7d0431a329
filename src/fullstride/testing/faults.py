"""Faults at named moments of a real run: kill, raise, run out of memory or hang on one rank at one step.

    FULLSTRIDE_FAULT=kill:step:5:1 python -m torch.distributed.run ... -m fullstride.testing.faulty_worker RUN_DIR --train

kills rank 1 as step 5 is about to run. Moments are those of `engine/moments.py`: step, save, staged, written, manifest,
saved (the last two on rank 0 and on all ranks).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch

from fullstride.engine.moments import LISTENERS, Moment
from fullstride.errors import UsageError
from fullstride.files import Value

VARIABLE = "FULLSTRIDE_FAULT"
Action: TypeAlias = Literal["kill", "raise", "out_of_memory", "hang"]


class Fault(Value, frozen=True, kw_only=True):
    """What happens, when, and to whom."""

    action: Action
    moment: Moment
    step: int
    rank: int

    def text(self) -> str:
        """As it stands in the environment: `kill:step:5:1`."""
        return f"{self.action}:{self.moment}:{self.step}:{self.rank}"


def parse_fault(text: str) -> Fault:
    """Read `action:moment:step:rank`.

    Raises:
        UsageError: it is not written so.
    """
    words = text.split(":")
    good = len(words) == 4 and words[0] in get_args(Action) and words[1] in get_args(Moment)
    if not (good and words[2].isdigit() and words[3].isdigit()):
        raise UsageError(f"{VARIABLE}={text!r} is no fault", fix="write action:moment:step:rank, such as kill:step:5:1")
    action: Action = words[0]  # type: ignore[assignment]  # checked above
    moment: Moment = words[1]  # type: ignore[assignment]
    return Fault(action=action, moment=moment, step=int(words[2]), rank=int(words[3]))


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise RuntimeError("a fault was asked for")


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. A fault was asked for.")


def _hang() -> None:
    time.sleep(3600)


_ACTIONS: dict[Action, Callable[[], None]] = {
    "kill": _kill,
    "raise": _raise,
    "out_of_memory": _out_of_memory,
    "hang": _hang,
}


def install(fault: Fault, rank: int) -> None:
    """Let a fault happen in this process, if it is meant for this rank."""
    if fault.rank != rank:
        return

    def listen(moment: Moment, step: int) -> None:
        if moment == fault.moment and step == fault.step:
            _ACTIONS[fault.action]()

    LISTENERS.append(listen)
