"""Checkpoints: written beside training, whole or absent, in no layout and so readable in any.

    checkpoints/step-00000100/          appears by one rename, once everything in it is on disk
      rank00000.safetensors ...         rectangles of weights/NAME, exp_avg/NAME, exp_avg_sq/NAME; rng/...
      manifest.json                     position, hashes, shapes, and size and CRC-32 of every other file

A rank writes the pieces that it holds (`engine/pieces.py`); what several hold alike one of them writes. Who reads asks for the
pieces of its own layout. "Latest" is derived (the highest step whose manifest is there), never stored.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from fullstride.engine.checkpoint_boxes import Boxes, Entry, entries, header, ordered, shares, uncovered, write_file
from fullstride.engine.checkpoint_folder import (
    MANIFEST,
    Manifest,
    Stored,
    TensorShape,
    check_files,
    clean,
    complete,
    partial_folder,
    publish,
    rank_file,
    read_manifest,
    remove,
    signed,
)
from fullstride.engine.checkpoint_frozen import fingerprints, unlike
from fullstride.engine.checkpoint_ranks import WAIT_SECONDS, Ranks, all_do, own_group
from fullstride.engine.checkpoint_staging import Staging, room_for, streamed
from fullstride.engine.init import seed_of
from fullstride.engine.moments import moment
from fullstride.engine.pieces import Piece
from fullstride.engine.precision import local
from fullstride.errors import BadInput, EnvironmentFault, FullstrideError, TimedOut
from fullstride.files import write_json
from fullstride.plan.plan import Plan
from fullstride.rundir import RunDir


class Savable(Protocol):
    """The part of a Run that checkpoints need."""

    plan: Plan
    step_index: int

    def state(self) -> dict[str, Tensor]:
        """Live tensors or DTensors under `weights/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME`."""
        ...

    def pieces(self) -> dict[str, Piece]:
        """Where their local elements lie in the unmodified model, by NAME."""
        ...

    def after_load(self, step_index: int) -> None:
        """Make everything derived from the state again."""
        ...


@dataclass(frozen=True)
class _Job:
    """One rank's part of a save: everything that the writing thread needs."""

    head: bytes
    blocks: Iterable[Tensor]
    manifest: Manifest


class Checkpointer:
    """Saves and loads one run's checkpoints; all ranks make the same calls.

    Attributes:
        stall_seconds: how long training stood still for the last save.
        in_step: why saves are written while training stands still; empty if they are written beside it.
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
        self.in_step = ""
        self._folder, self._keep, self._ranks = folder, keep, Ranks(group)
        self._staging: Staging | None = None
        self._known: tuple[weakref.ref[Savable], _Shared] | None = None
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

    def reserve(self, run: Savable) -> str:
        """Allocate the memory for copies of a run's state, before training rather than within its first save.

        Returns:
            Why there will be no copies and saves are written while training stands still; empty if there will be.
        """
        shared = self._shared(run)
        if self._staging is None and not self.in_step:
            sizes = [entry.nbytes for entry in _entries(run, shared, self._ranks)]
            fits, said = room_for(sizes, self._ranks.exchange)
            if fits:
                self._staging = Staging(_device(run))
                self._staging.reserve(sizes)
            else:
                self.in_step = f"{said}: saves are written while training stands still"
        return self.in_step

    def save(self, run: Savable, samples: int, versions: dict[str, str] | None = None) -> None:
        """Copy the state to the host and write it in the background; waits for a save that is still being written.

        Where the host has no room for the copy, it is written before this returns.

        Args:
            run: what is saved; may go on stepping once this returns.
            samples: global samples consumed so far.
            versions: of the software, for the manifest.
        """
        start = time.monotonic()
        self._join()
        moment("save", run.step_index)
        self.reserve(run)
        shared = self._shared(run)
        found = _entries(run, shared, self._ranks)
        blocks = self._staging.copy(found) if self._staging else streamed(found)
        moment("staged", run.step_index)
        job = _Job(header(found), blocks, _manifest(run, samples, versions or {}, shared, self._ranks.count))
        target = self._folder / RunDir(root="").checkpoint(run.step_index).name
        if self._staging:
            self._thread = threading.Thread(target=self._write, args=(job, target), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(job, target)
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

    def _shared(self, run: Savable) -> _Shared:
        """Who writes what, agreed once for each run: its pieces do not move."""
        if self._known is None or self._known[0]() is not run:
            self._known = (weakref.ref(run), _share(run, self._ranks))
        return self._known[1]

    def _join(self) -> None:
        if self._thread:
            self._thread.join(WAIT_SECONDS)
            if self._thread.is_alive():
                message = f"waited {WAIT_SECONDS:.0f} s for a checkpoint to be written to {self._folder}"
                raise TimedOut(message, fix="check that disk")
            self._thread = None
        if self._unexpected:
            raise self._unexpected

    def _write(self, job: _Job, target: Path) -> None:
        try:
            _write(job, target, self._keep, self._ranks)
        except FullstrideError as error:
            self._error = error
        except BaseException as error:  # raised again in the training thread
            self._unexpected = error


def save_run(run: Savable, folder: Path, samples: int | None = None) -> None:
    """Write one checkpoint into `folder`, entry by entry, and wait for it; all ranks call it.

    Raises:
        BadInput: there is something at `folder` already.
        EnvironmentFault: the disk is full or may not be written; nothing is left.
    """
    ranks = Ranks(own_group())
    there = BadInput(f"{folder}: exists already", fix="choose another folder") if folder.exists() else None
    ranks.agree(there)
    counted = run.step_index * run.plan.workload.samples_per_step if samples is None else samples
    shared = _share(run, ranks)
    found = _entries(run, shared, ranks)
    _write(_Job(header(found), streamed(found), _manifest(run, counted, {}, shared, ranks.count)), folder, 0, ranks)


def load_run(run: Savable, folder: Path) -> Manifest:
    """Check a checkpoint and read it into a run, in whatever layout it was written; all ranks call it.

    Random numbers go on where they were if as many ranks read as wrote; else each rank begins anew from seed, step and rank.

    Raises:
        BadInput: a file is missing or damaged, or it belongs to another model; names the file or the parameter.
    """
    return _load(run, folder, Ranks(own_group()))


@dataclass(frozen=True)
class _Shared:
    """What all ranks agreed on about a run's pieces."""

    mine: frozenset[str]
    """Parameters of which this rank writes its piece."""
    tensors: dict[str, TensorShape]
    """What all ranks write together."""
    frozen: dict[str, int]
    """Fingerprints of what is not written (see checkpoint_frozen.py)."""


def _share(run: Savable, ranks: Ranks) -> _Shared:
    named = {key: str(value.dtype).removeprefix("torch.") for key, value in run.state().items()}
    pieces = {name: piece for name, piece in run.pieces().items() if f"weights/{name}" in named}
    everybody = ranks.exchange((pieces, named))
    chosen = shares([pieces for pieces, _ in everybody])
    bare = uncovered([pieces for pieces, _ in everybody], chosen)
    assert not bare, f"the ranks' pieces of {bare} do not make up the whole"
    tensors = {
        key: TensorShape(shape=pieces[_name(key)].shape, dtype=dtype)
        for pieces, named in everybody
        for key, dtype in named.items()
    }
    return _Shared(frozenset(chosen[ranks.rank]), tensors, fingerprints(run, ranks))


def _name(key: str) -> str:
    return key.split("/", 1)[1]


def _entries(run: Savable, shared: _Shared, ranks: Ranks) -> list[Entry]:
    """What this rank writes."""
    pieces = run.pieces()
    found: list[Entry] = []
    for key, value in run.state().items():
        if _name(key) in shared.mine:
            found += entries(key, pieces[_name(key)], local(value))
    return ordered([*found, *(Entry(key, (0,), value) for key, value in _rng(ranks.rank).items())])


def _manifest(run: Savable, samples: int, versions: dict[str, str], shared: _Shared, ranks: int) -> Manifest:
    """Without the files."""
    return Manifest(
        step=run.step_index,
        samples=samples,
        world_size=ranks,
        plan_hash=run.plan.plan_hash,
        work_hash=run.plan.work_hash,
        recipe=run.plan.recipe,
        versions=versions,
        written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        tensors=shared.tensors,
        frozen=shared.frozen,
    )


def _device(run: Savable) -> torch.device:
    return next((local(value).device for value in run.state().values()), torch.device("cpu"))


def _write(job: _Job, target: Path, keep: int, ranks: Ranks) -> None:
    """Write beside the target, then make it visible; leaves nothing behind when it fails."""
    folder = partial_folder(target)

    def make_room() -> None:
        if ranks.rank == 0:
            remove(folder)
            folder.mkdir(parents=True)

    def write() -> tuple[str, Stored]:
        name = rank_file(ranks.rank)
        size, crc = write_file(folder / name, job.head, job.blocks)
        moment("written", job.manifest.step)
        return name, Stored(size=size, crc32=crc)

    def finish() -> None:
        if ranks.rank == 0:
            _hidden(folder, stored)
            write_json(folder / MANIFEST, signed(msgspec.structs.replace(job.manifest, files=stored)))
            moment("manifest", job.manifest.step)
            publish(folder, target, keep)

    try:
        all_do(make_room, ranks)
        stored = dict(all_do(write, ranks))
        all_do(finish, ranks)
    except EnvironmentFault as error:
        if ranks.rank == 0:
            remove(folder)
        fix = "free disk space; older checkpoints are as they were"
        raise EnvironmentFault(f"{target}: not saved ({error})", fix=fix) from None
    moment("saved", job.manifest.step)


def _hidden(folder: Path, stored: dict[str, Stored]) -> None:
    """Files that other hosts wrote and this one does not see."""
    for name, file in stored.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != file.size:
            raise EnvironmentFault(f"{name} was written, but rank 0 does not see it: all hosts must share the folder")


def _load(run: Savable, folder: Path, ranks: Ranks) -> Manifest:
    ranks.agree(check_files(folder, ranks.rank, ranks.count))
    manifest = read_manifest(folder)
    state, pieces = run.state(), run.pieces()
    shapes = {key: pieces[_name(key)].shape for key in state}
    everybody: dict[str, tuple[int, ...]] = {}
    for some in ranks.exchange(shapes):
        everybody |= some
    ranks.agree(_mismatch(folder, everybody, manifest.tensors))
    ranks.agree(unlike(folder, fingerprints(run, ranks), manifest.frozen))
    ranks.agree(_fill(state, pieces, folder, manifest, ranks))
    run.after_load(manifest.step)
    return manifest


def _fill(
    state: Mapping[str, Tensor], pieces: Mapping[str, Piece], folder: Path, manifest: Manifest, ranks: Ranks
) -> BadInput | None:
    """Read this rank's pieces and random numbers; returns what went wrong."""
    try:
        boxes = Boxes(folder / name for name in sorted(manifest.files))
        with torch.no_grad():
            for key, value in state.items():
                boxes.read(key, pieces[_name(key)], local(value))
        _restore_rng(boxes, manifest, ranks)
    except BadInput as error:
        return BadInput(f"{folder}: {error.message}", fix=error.fix)
    except OSError as error:
        return BadInput(f"{folder}: {error.strerror or error}", fix="check the disk")
    return None


def _rng(rank: int) -> dict[str, Tensor]:
    states = {f"rng/cpu/{rank:05d}": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states[f"rng/cuda/{rank:05d}"] = torch.cuda.get_rng_state()
    return states


def _restore_rng(boxes: Boxes, manifest: Manifest, ranks: Ranks) -> None:
    for key, value in _rng(ranks.rank).items():
        gpu = key.startswith("rng/cuda/")
        if manifest.world_size == ranks.count and key in boxes:
            boxes.read(key, Piece(name=key, shape=tuple(value.shape)), value)
            (torch.cuda.set_rng_state if gpu else torch.set_rng_state)(value)
        else:
            seed = seed_of(manifest.recipe.seed, f"step {manifest.step} rank {ranks.rank}")
            (torch.cuda.manual_seed if gpu else torch.default_generator.manual_seed)(seed)


def _mismatch(folder: Path, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorShape]) -> BadInput | None:
    """The first parameter by which a checkpoint and a model differ."""
    for key, shape in shapes.items():
        there = stored.get(key)
        if there is None or there.shape != shape:
            has = "nothing" if there is None else f"shape {list(there.shape)}"
            message = f"{folder}: holds {has} for {key}, the model has shape {list(shape)}"
            return BadInput(message, fix="use the plan and model that wrote it, or start anew with another run directory")
    extra = sorted(set(stored) - set(shapes))
    if extra:
        return BadInput(f"{folder}: holds {extra[0]}, which the model does not have", fix="use the model that wrote it")
    return None
