"""Exceptions to Failures: what happened, on which rank, in one line that a person can act on."""

from __future__ import annotations

import re
import traceback

import msgspec
import torch

from fullstride.errors import DoesNotFit, EnvironmentFault, FullstrideError, TimedOut
from fullstride.rundir import Failure, FailureClass

_WANTED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB|TiB)")
_UNIT = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process has terminated")
_SLOW = ("Timed out waiting", "timed out", "Watchdog caught collective operation timeout")
_DETAIL = 4000


class NotFinite(FullstrideError):
    """The loss is no number any more."""

    exit_code = 6


def failure_of(error: BaseException, rank: int) -> Failure:
    """Classify what a rank met.

    Returns:
        `out_of_memory` with the request that failed, `not_finite`, `unavailable`, `environment`, `refused`, `hang`, or
        `crash`; rank -1 where this rank only lost its connection to another.
    """
    kind, message, fix = _classify(error)
    wanted = _WANTED.search(str(error))
    lost = kind == "crash" and any(text in str(error) for text in _LOST)
    return Failure(
        failure=kind,
        message="lost the connection to another rank" if lost else message,
        rank=-1 if lost else rank,
        detail="".join(traceback.format_exception(error))[-_DETAIL:],
        fix="look at the other ranks' logs" if lost else fix,
        wanted_bytes=int(float(wanted[1]) * _UNIT[wanted[2]]) if wanted and kind == "out_of_memory" else 0,
    )


def missing(failure: Failure, told: dict[int, str], world_size: int) -> Failure:
    """A hang as the fault of the rank that did not say it waits, where there is one: who waits is heard of, and speaks.

    Args:
        failure: of the rank that spoke first.
        told: what each rank that waited in vain said, by rank.
        world_size: all ranks.
    """
    silent = [rank for rank in range(world_size) if rank not in told]
    if len(silent) != 1:
        more = f" (not heard of: ranks {', '.join(map(str, silent))})" if silent else ""
        return msgspec.structs.replace(failure, message=failure.message + more)
    (rank,) = silent
    words = next((words for words in told.values() if f"(rank {rank})" in words), failure.message)
    who = f"rank {failure.rank} waited in vain: " if "(rank " not in words else ""
    return msgspec.structs.replace(failure, rank=rank, message=f"rank {rank} did not come; {who}{words}")


def _classify(error: BaseException) -> tuple[FailureClass, str, str]:
    line = (str(error).strip().splitlines() or [""])[0]
    named = f"{type(error).__name__}: {line}"
    if isinstance(error, NotFinite):
        return "not_finite", error.message, error.fix
    if isinstance(error, torch.OutOfMemoryError | MemoryError | DoesNotFit):
        return "out_of_memory", line or "the host's memory is used up", "use a smaller micro-batch or recompute"
    if isinstance(error, EnvironmentFault):
        return ("unavailable" if "compiler" in error.message else "environment"), error.message, error.fix
    if isinstance(error, TimedOut):
        return "hang", error.message, error.fix
    if isinstance(error, FullstrideError):
        return "refused", error.message, error.fix
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return "out_of_memory", line, "use a smaller micro-batch or recompute"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _SLOW):
        return "hang", named, "look for the rank that did not arrive"
    return "crash", named, "see the end of the traceback"
