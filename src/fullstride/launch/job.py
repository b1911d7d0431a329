"""A process group to start: what would be run, before it is run."""

from __future__ import annotations

from fullstride.files import FileValue


class Job(FileValue, frozen=True, kw_only=True, tag="job"):
    """Everything a launcher needs."""

    run_dir: str
    num_processes: int
    """On this host."""
    num_nodes: int = 1
    command: tuple[str, ...]
    """Argument list; built by `command.py` alone."""
    env: dict[str, str] = {}
    """What is added to the environment."""
