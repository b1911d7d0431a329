"""A checkpoint's folder: manifest, checks, and how it becomes visible and goes away."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from pathlib import Path

import msgspec

from fullstride.errors import BadInput, EnvironmentFault
from fullstride.files import FileValue, Value, digest, read_json
from fullstride.plan.plan import Recipe

MANIFEST = "manifest.json"
_FIX = "remove that checkpoint; the one before it is used then"


class Stored(Value, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    crc32: int


class TensorShape(Value, frozen=True, kw_only=True):
    """One tensor of the unmodified model's size."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(FileValue, frozen=True, kw_only=True, tag="checkpoint"):
    """Where a checkpoint stands in its run, and what its files must be."""

    step: int
    """Optimizer steps taken."""
    samples: int
    """Global samples consumed: where the data goes on."""
    world_size: int
    """Ranks that wrote it."""
    plan_hash: str
    work_hash: str
    recipe: Recipe
    versions: dict[str, str] = {}
    written: str
    """ISO 8601 with zone."""
    tensors: dict[str, TensorShape]
    """What the files hold together, by `KIND/NAME`; random numbers are not among it."""
    frozen: dict[str, int] = {}
    """Fingerprints of the weights that adapters were trained beside, which the files do not hold."""
    files: dict[str, Stored] = {}
    digest: str = ""
    """Of all the other entries."""


def rank_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank{rank:05d}.safetensors"


def signed(manifest: Manifest) -> Manifest:
    """The manifest with its own digest."""
    return msgspec.structs.replace(manifest, digest=digest(msgspec.structs.replace(manifest, digest="")))


def read_manifest(folder: Path) -> Manifest:
    """A checkpoint's manifest, checked against its own digest.

    Raises:
        BadInput: there is none, it is damaged, or it is of an earlier layout.
    """
    path = folder / MANIFEST
    if (folder / ".metadata").exists():
        raise BadInput(
            f"{folder}: was written by an earlier fullstride, through torch.distributed.checkpoint, which is not read any more",
            fix="finish that run with the version that began it, or start anew with another run directory",
        )
    manifest = read_json(path, Manifest)
    if signed(manifest).digest != manifest.digest:
        raise BadInput(f"{path}: is damaged (its digest differs from its content)", fix=_FIX)
    if min(manifest.step, manifest.samples, manifest.world_size - 1) < 0:
        said = f"step {manifest.step}, {manifest.samples} samples and {manifest.world_size} ranks"
        raise BadInput(f"{path}: {said} cannot be", fix=_FIX)
    return manifest


def complete(folder: Path) -> list[Path]:
    """Whole checkpoints in a folder, by step."""
    found = [path for path in folder.glob("step-*") if (path / MANIFEST).is_file() and path.name[5:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def partial_folder(target: Path) -> Path:
    """Where a checkpoint is written before it is visible."""
    return target.parent / f".{target.name}.partial"


def clean(folder: Path) -> None:
    """Remove folders that a kill left half-written or half-removed."""
    whole = set(complete(folder))
    for path in (*folder.glob(".step-*"), *folder.glob("step-*")):
        if path not in whole:
            shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, target: Path, keep: int) -> None:
    """Make a written checkpoint visible by one rename, then remove all but the newest `keep` (0: none is removed)."""
    _sync(folder)
    if target.exists():
        remove(target)
    folder.rename(target)
    _sync(target.parent)
    for old in complete(target.parent)[:-keep] if keep else ():
        remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint's folder; its manifest goes first, so that no half of it is ever taken for whole."""
    with contextlib.suppress(NotADirectoryError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def crc32(path: Path) -> int:
    """CRC-32 of a file, read in pieces."""
    value = 0
    with open(path, "rb") as content:
        while piece := content.read(1 << 22):
            value = zlib.crc32(piece, value)
    return value


def check_files(folder: Path, rank: int = 0, ranks: int = 1) -> BadInput | None:
    """Compare this rank's part of a checkpoint's files with its manifest.

    Returns:
        What is wrong with the first bad file; None if all is well.
    """
    path = folder / MANIFEST
    try:
        manifest = read_manifest(folder)
        for name in sorted(manifest.files)[rank::ranks]:
            path = folder / name
            if found := _check_file(path, name, manifest.files[name]):
                return found
    except (BadInput, EnvironmentFault) as error:
        return BadInput(error.message, fix=error.fix)
    except OSError as error:  # told to all ranks, none of which may wait for another
        return BadInput(f"{path}: cannot be read ({error.strerror or error})", fix="check permissions and the disk")
    return None


def _check_file(path: Path, name: str, wanted: Stored) -> BadInput | None:
    fix = _FIX
    if Path(name).name != name or not path.is_file():
        return BadInput(f"{path}: is missing", fix=fix)
    if path.stat().st_size != wanted.size:
        return BadInput(f"{path}: has {path.stat().st_size} bytes, the manifest says {wanted.size}", fix=fix)
    if crc32(path) != wanted.crc32:
        return BadInput(f"{path}: is damaged (its CRC-32 differs from the manifest's)", fix=fix)
    return None
