"""What ranks printed: where torchrun puts it, and the one file a rank that a RUN_DIR promises."""

from __future__ import annotations

import contextlib
from pathlib import Path

from fullstride.errors import FullstrideError
from fullstride.files import write_bytes
from fullstride.rundir import RunDir

LIMIT = 1 << 20
"""Bytes of one stream that are kept in the gathered log: the end of it."""


def launcher_log(run_dir: RunDir) -> Path:
    """What torchrun itself printed."""
    return run_dir.path / "logs" / "launcher.log"


def rank_files(run_dir: RunDir, rank: int) -> list[Path]:
    """Standard output and error of a rank in its latest start, as far as they are there."""
    folders = (run_dir.path / "logs").glob(f"*/attempt_*/{rank}")
    newest = max(folders, key=_changed, default=None)
    return [path for name in ("stdout.log", "stderr.log") if newest and (path := newest / name).is_file()]


def rank_text(run_dir: RunDir, rank: int, limit: int = 20_000) -> str:
    """The end of what a rank printed, errors last."""
    return "".join(_end(path, limit) for path in rank_files(run_dir, rank))


def launcher_text(run_dir: RunDir, limit: int = 20_000) -> str:
    """The end of what the launcher printed since its last start."""
    return _end(launcher_log(run_dir), limit).rpartition("\n--- ")[2]


def ranks_with_logs(run_dir: RunDir) -> list[int]:
    """Ranks that have printed files, in order."""
    return sorted({int(path.name) for path in (run_dir.path / "logs").glob("*/attempt_*/*") if path.name.isdigit()})


def gather_logs(run_dir: RunDir, num_ranks: int) -> None:
    """Write `logs/rankNNNNN.log` for each rank: what it printed in its latest start."""
    for rank in range(num_ranks):
        text = rank_text(run_dir, rank, LIMIT)
        if text:
            with contextlib.suppress(FullstrideError):  # a full disk must not hide what the run itself says
                write_bytes(run_dir.log(rank), text.encode())


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _end(path: Path, limit: int) -> str:
    try:
        with open(path, "rb") as text:
            text.seek(max(0, path.stat().st_size - limit))
            return text.read().decode(errors="replace")
    except OSError:
        return ""
