"""Checkpoints: written beside training through torch.distributed.checkpoint, whole or absent, readable in any layout.

    checkpoints/step-00000100/          appears by one rename, once everything in it is on disk
      .metadata  __0_0.distcp ...       torch.distributed.checkpoint: weights/NAME, exp_avg/NAME, exp_avg_sq/NAME, rng/...
      manifest.json                     position, hashes, and size and CRC-32 of every other file

"Latest" is derived (the highest step whose manifest is there), never stored.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from fullstride.engine.checkpoint_folder import (
    MANIFEST,
    Manifest,
    SafeReader,
    Stored,
    check_files,
    clean,
    complete,
    crc32,
    partial_folder,
    publish,
    remove,
)
from fullstride.engine.moments import moment
from fullstride.errors import BadInput, EnvironmentFault, FullstrideError, TimedOut
from fullstride.files import read_json, write_json
from fullstride.plan.plan import Plan
from fullstride.rundir import RunDir

WAIT_SECONDS = 3600.0
"""Longest wait for a save that is being written."""


class Savable(Protocol):
    """The part of a Run that checkpoints need."""

    plan: Plan
    step_index: int

    def state(self) -> dict[str, Tensor]:
        """Live tensors or DTensors under `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`."""
        ...

    def after_load(self, step_index: int) -> None:
        """Make everything derived from the state again."""
        ...


class Checkpointer:
    """Saves and loads one run's checkpoints; all ranks make the same calls.

    Attributes:
        stall_seconds: how long training stood still for the last save.
    """

    def __init__(self, folder: Path, *, keep: int = 3, group: dist.ProcessGroup | None = None) -> None:
        """Keep the newest `keep` checkpoints below `folder`.

        Args:
            folder: `RunDir.checkpoints`.
            keep: at least one.
            group: a gloo group of its own for the writing thread; None for one rank.
        """
        assert keep >= 1
        self.stall_seconds = 0.0
        self._folder, self._keep, self._ranks = folder, keep, _Ranks(group)
        self._thread: threading.Thread | None = None
        self._error: FullstrideError | None = None
        self._unexpected: BaseException | None = None

    def clean(self) -> None:
        """Remove what a killed run left half-written; called before training by all ranks."""
        if self._ranks.rank == 0:
            clean(self._folder)
        self._ranks.exchange(None)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, the same on every rank; None if there is none."""
        found = complete(self._folder)
        choice = self._ranks.exchange(str(found[-1]) if found else "")[0]
        return Path(choice) if choice else None

    def save(self, run: Savable, samples: int, versions: dict[str, str] | None = None) -> None:
        """Copy the state to the host and write it in the background; waits for a save that is still being written.

        Args:
            run: what is saved; may go on stepping once this returns.
            samples: global samples consumed so far.
            versions: of the software, for the manifest.
        """
        start = time.monotonic()
        self._join()
        staged, manifest = _stage(run, samples, versions or {}, self._ranks)
        target = self._folder / RunDir(root="").checkpoint(manifest.step).name
        self._thread = threading.Thread(target=self._write, args=(staged, manifest, target), name="checkpoint", daemon=True)
        self._thread.start()
        self.stall_seconds = time.monotonic() - start

    def problem(self) -> FullstrideError | None:
        """Why the last finished save failed, told once; None if it did not, or is still being written."""
        if self._thread and self._thread.is_alive():
            return None
        self._join()
        error, self._error = self._error, None
        return error

    def wait(self) -> None:
        """Wait until the save in progress is visible.

        Raises:
            EnvironmentFault: it failed (a full disk, say); the older checkpoints are as they were.
        """
        self._join()
        error, self._error = self._error, None
        if error:
            raise error

    def load(self, run: Savable, folder: Path) -> Manifest:
        """As `load_run`."""
        return _load(run, folder, self._ranks)

    def _join(self) -> None:
        if self._thread:
            self._thread.join(WAIT_SECONDS)
            if self._thread.is_alive():
                message = f"waited {WAIT_SECONDS:.0f} s for a checkpoint to be written to {self._folder}"
                raise TimedOut(message, fix="check that disk")
            self._thread = None
        if self._unexpected:
            raise self._unexpected

    def _write(self, staged: dict[str, Any], manifest: Manifest, target: Path) -> None:
        try:
            _write(staged, manifest, target, self._keep, self._ranks)
        except FullstrideError as error:
            self._error = error
        except BaseException as error:  # raised again in the training thread
            self._unexpected = error


def save_run(run: Savable, folder: Path, samples: int | None = None) -> None:
    """Write one checkpoint into `folder` and wait for it; all ranks call it.

    Raises:
        BadInput: there is something at `folder` already.
        EnvironmentFault: the disk is full or may not be written; nothing is left.
    """
    ranks = _Ranks(_own_group())
    there = BadInput(f"{folder}: exists already", fix="choose another folder") if folder.exists() else None
    ranks.agree(there)
    counted = run.step_index * run.plan.workload.samples_per_step if samples is None else samples
    staged, manifest = _stage(run, counted, {}, ranks)
    _write(staged, manifest, folder, 0, ranks)


def load_run(run: Savable, folder: Path) -> Manifest:
    """Check a checkpoint and read it into a run, in whatever layout it was written; all ranks call it.

    Raises:
        BadInput: a file is missing or damaged, or it belongs to another model; names the file or the parameter.
    """
    return _load(run, folder, _Ranks(_own_group()))


class _Ranks:
    """Who takes part in saving and loading."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.count = dist.get_world_size(group) if group else 1

    def exchange(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        if not self.group:
            return [item]
        items = [None] * self.count
        dist.all_gather_object(items, item, group=self.group)
        return items

    def agree(self, error: BadInput | None) -> None:
        """Raise on every rank what one of them found."""
        told = [e for e in self.exchange((error.message, error.fix) if error else None) if e]
        if told:
            raise BadInput(told[0][0], fix=told[0][1])


_groups: list[dist.ProcessGroup] = []


def _own_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks, made once, for saves that a user's own loop asks for."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if not _groups:
        _groups.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS)))
    return _groups[0]


def _stage(run: Savable, samples: int, versions: dict[str, str], ranks: _Ranks) -> tuple[dict[str, Any], Manifest]:
    """A copy of the state on the host, and the manifest without its files."""
    moment("save", run.step_index)
    state = {**_owned(run.state(), ranks.rank, ranks.count), **_rng(ranks.rank)}
    staged = BlockingAsyncStager().stage(state)
    manifest = Manifest(
        step=run.step_index,
        samples=samples,
        world_size=ranks.count,
        plan_hash=run.plan.plan_hash,
        work_hash=run.plan.work_hash,
        recipe=run.plan.recipe,
        versions=versions,
        written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    moment("staged", run.step_index)
    return staged, manifest


def _write(staged: dict[str, Any], manifest: Manifest, target: Path, keep: int, ranks: _Ranks) -> None:
    """Write beside the target, then make it visible; leaves nothing behind when it fails."""
    folder = partial_folder(target)
    try:
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        with _alone_is_fine():
            save(staged, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
        moment("written", manifest.step)
        _finish(folder, target, manifest, keep, ranks)
    except (OSError, CheckpointException, EnvironmentFault) as error:
        if ranks.rank == 0:
            remove(folder)
        raise _save_error(target, error) from None


def _finish(folder: Path, target: Path, manifest: Manifest, keep: int, ranks: _Ranks) -> None:
    """Checksums of every rank's files go to rank 0, which writes the manifest and makes the folder visible."""
    own = sorted(folder.glob(f"__{ranks.rank}_*")) + ([folder / ".metadata"] if ranks.rank == 0 else [])
    parts = ranks.exchange({path.name: (path.stat().st_size, crc32(path)) for path in own})
    failure = ""
    if ranks.rank == 0:
        stored = {name: Stored(size=size, crc32=crc) for part in parts for name, (size, crc) in part.items()}
        try:
            write_json(folder / MANIFEST, msgspec.structs.replace(manifest, files=stored))
            moment("manifest", manifest.step)
            publish(folder, target, keep)
        except (OSError, EnvironmentFault) as error:
            failure = str(error)
    failure = ranks.exchange(failure)[0]
    if failure:
        raise EnvironmentFault(failure)
    moment("saved", manifest.step)


def _load(run: Savable, folder: Path, ranks: _Ranks) -> Manifest:
    ranks.agree(check_files(folder, ranks.rank, ranks.count))
    manifest = read_json(folder / MANIFEST, Manifest)
    state = run.state()
    stored = SafeReader(folder).read_metadata().state_dict_metadata
    ranks.agree(_mismatch(folder, state, stored))
    rng = {name: value for name, value in _rng(ranks.rank).items() if name in stored}
    wanted: dict[str, Any] = {**state, **rng}
    with _alone_is_fine():
        load(wanted, storage_reader=SafeReader(folder), process_group=ranks.group, no_dist=ranks.group is None)
    for name, value in rng.items():
        (torch.cuda.set_rng_state if name.startswith("rng/cuda/") else torch.set_rng_state)(value)
    run.after_load(manifest.step)
    return manifest


@contextlib.contextmanager
def _alone_is_fine() -> Iterator[None]:
    """One rank without a process group is a normal case here, about which torch warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _owned(state: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """What this rank writes: its shards, and its part of what all ranks hold alike, so that no copy is made for nothing."""
    plain = [name for name, value in state.items() if not isinstance(value, DTensor)]
    load = [0] * ranks
    owner = {}
    for name in sorted(plain, key=lambda n: (-state[n].numel(), n)):
        owner[name] = load.index(min(load))
        load[owner[name]] += state[name].numel()
    return {name: value for name, value in state.items() if owner.get(name, rank) == rank}


def _rng(rank: int) -> dict[str, Tensor]:
    states = {f"rng/cpu/{rank:05d}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states[f"rng/cuda/{rank:05d}"] = torch.cuda.get_rng_state()
    return states


def _mismatch(folder: Path, state: dict[str, Tensor], stored: dict[str, Any]) -> BadInput | None:
    """The first parameter by which a checkpoint and a model differ."""
    for name, value in state.items():
        size = getattr(stored.get(name), "size", None)
        if size != value.shape:
            has = "nothing" if size is None else f"shape {list(size)}"
            message = f"{folder}: holds {has} for {name}, the model has shape {list(value.shape)}"
            return BadInput(message, fix="use the plan and model that wrote it, or start anew with another run directory")
    extra = sorted(name for name in stored if name not in state and not name.startswith("rng/"))
    if extra:
        return BadInput(f"{folder}: holds {extra[0]}, which the model does not have", fix="use the model that wrote it")
    return None


def _save_error(target: Path, error: BaseException) -> EnvironmentFault:
    causes: Sequence[BaseException] = [error]
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()] or [error]
    cause = next((c for c in causes if isinstance(c, OSError | EnvironmentFault)), causes[0])
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause).splitlines()[0]
    return EnvironmentFault(f"{target}: not saved ({reason})", fix="free disk space; older checkpoints are as they were")
