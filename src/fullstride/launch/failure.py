"""Why workers ended badly, told from what they left behind: a Failure value, never a guess without evidence."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec.structs import replace

from fullstride.errors import FullstrideError
from fullstride.files import read_json
from fullstride.launch.logs import launcher_text, rank_text, ranks_with_logs
from fullstride.plan.stages import num_stages, pipeline_place, place_of
from fullstride.plan.toml import read_plan
from fullstride.rundir import Failure, FailureClass, RunDir

_SIGNS: tuple[tuple[FailureClass, str, str], ...] = (
    ("out_of_memory", r"OutOfMemoryError|CUDA out of memory|NVML_SUCCESS == r INTERNAL ASSERT", "use less memory"),
    (
        "out_of_memory",
        r"DefaultCPUAllocator: can't allocate memory|^MemoryError|std::bad_alloc|Cannot allocate memory",
        "use less memory",
    ),
    ("environment", r"No space left on device|Disk quota exceeded", "free disk space"),
    (
        "unavailable",
        r"InvalidCxxCompiler|No working C\+\+ compiler|C\+\+ compiler .*not found",
        "install a C++ compiler, or compile.mode = off",
    ),
    ("not_finite", r"not finite|NonFinite", "lower the learning rate, or use a wider dtype"),
    (
        "hang",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms|Socket Timeout",
        "look at the rank that is behind",
    ),
)
"""Class, what its text looks like, and what to do; the first that is met counts."""
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?([KMG]iB|bytes)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ROOT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


def oom_kills() -> int | None:
    """Processes that this kernel has killed for want of memory since it started; None where it does not say."""
    for line in _text("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def classify(text: str, rank: int = -1) -> Failure | None:
    """The Failure that a traceback or log shows; None if it shows no known sign."""
    for failure, pattern, fix in _SIGNS:
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            line = _line_at(text, found.start())
            return Failure(
                failure=failure, message=line, rank=rank, detail=text[-4000:], fix=fix, wanted_bytes=wanted_bytes(text)
            )
    return None


def wanted_bytes(text: str) -> int:
    """The request that an allocator could not meet; 0 if the text does not say."""
    found = _WANTED.findall(text)
    return int(float(found[-1][0]) * _UNITS[found[-1][1]]) if found else 0


def failure_of(run_dir: RunDir, code: int, *, oom_kills_before: int | None = None) -> Failure:
    """Why the workers of a RUN_DIR ended with this status; in a pipeline, with the failed rank's stage.

    Their own word (`FAILED.json`) counts first; then the log of the rank that torchrun names as the first to fail; then
    the other ranks' logs; then the signal.

    Args:
        run_dir: what they left behind.
        code: exit status of the job, 128 + n for signal n.
        oom_kills_before: `oom_kills()` when they were started, to tell a kill for want of memory from another.
    """
    return with_stage(_failure_of(run_dir, code, oom_kills_before), run_dir)


def with_stage(failure: Failure, run_dir: RunDir) -> Failure:
    """The failure, with the pipeline stages of its rank in the message; as it is without a pipeline or a rank, and where every
    rank refuses.
    """
    if failure.failure == "refused":
        return failure
    try:
        plan = read_plan(run_dir.plan) if run_dir.plan.exists() else None
    except FullstrideError:
        return failure
    if plan is None or plan.layout.pp == 1 or not 0 <= failure.rank < plan.layout.world_size or "stage" in failure.message:
        return failure
    place = pipeline_place(plan.layout, failure.rank)
    own = [stage for stage in range(num_stages(plan)) if place_of(plan, stage)[0] == place]
    words = " and ".join(str(stage) for stage in own)
    told = f"rank {failure.rank} is stage {words} of {num_stages(plan)}"
    return replace(failure, message=f"{failure.message} ({told})")


def _failure_of(run_dir: RunDir, code: int, oom_kills_before: int | None) -> Failure:
    if run_dir.failed.exists():
        try:
            return read_json(run_dir.failed, Failure)
        except FullstrideError:
            pass  # damaged while it was written; the logs are still there
    launcher = launcher_text(run_dir)
    root = _ROOT.search(launcher)
    first, status = (int(root[1]), int(root[2])) if root else (-1, -code + 128 if code > 128 else code)
    ranks = ranks_with_logs(run_dir)
    # Beside a rank that was killed, the others only lost a peer: their logs say nothing of the cause.
    asked = [first] if status < 0 and first >= 0 else sorted(ranks, key=lambda rank: (rank != first, rank))
    found = [failure for rank in asked if (failure := classify(rank_text(run_dir, rank), rank))]
    if found:
        # A rank that waited in vain is the victim of one that has another word to say.
        return next((failure for failure in found if failure.failure != "hang"), found[0])
    if status < 0:
        return _killed(first, -status, oom_kills_before)
    return _crash(run_dir, first if first >= 0 else ranks[0] if ranks else -1, code, launcher)


def _killed(rank: int, number: int, before: int | None) -> Failure:
    who = f"rank {rank}" if rank >= 0 else "a worker"
    now = oom_kills()
    if number == 9 and before is not None and now is not None and now > before:
        return Failure(
            failure="out_of_memory",
            rank=rank,
            message=f"{who} was killed by the kernel for want of host memory",
            fix="use less memory",
        )
    if number == 9:
        fix = "if nobody did it, the machine may be short of memory: see the kernel's log"
        return Failure(failure="killed", rank=rank, message=f"{who} was killed (signal 9)", fix=fix)
    return Failure(failure="crash", rank=rank, message=f"{who} was ended by signal {number}")


def _crash(run_dir: RunDir, rank: int, code: int, launcher: str) -> Failure:
    text = rank_text(run_dir, rank) if rank >= 0 else launcher
    lines = [line for line in text.splitlines() if line.strip()]
    message = lines[-1].strip() if lines else f"the workers ended with status {code} and printed nothing"
    if code == 0:
        message = f"the workers ended before their work was done; last words: {message}"
    return Failure(failure="crash", rank=rank, message=message[:400], detail=text[-4000:], fix=f"see {run_dir.path / 'logs'}")


def hang(waited_for: str, seconds: float, run_dir: RunDir) -> Failure:
    """No answer in time: what was waited for, and the last words of each rank."""
    words = []
    for rank in ranks_with_logs(run_dir):
        lines = [line for line in rank_text(run_dir, rank, 4000).splitlines() if line.strip()]
        words.append(f"rank {rank}: {lines[-1] if lines else '(printed nothing)'}")
    message = f"waited {seconds:.0f} s for {waited_for}"
    return Failure(failure="hang", message=message, detail="\n".join(words), fix=f"see {run_dir.path / 'logs'}")


def _line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    stop = text.find("\n", position)
    return text[start : stop if stop >= 0 else None].strip()[:400]


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
