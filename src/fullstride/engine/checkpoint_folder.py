"""A checkpoint's folder: manifest, checks, and how it becomes visible and goes away."""

from __future__ import annotations

import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from fullstride.errors import BadInput
from fullstride.files import FileValue, Value, read_json
from fullstride.plan.plan import Recipe

MANIFEST = "manifest.json"
_DCP = "torch.distributed.checkpoint."
# What the metadata of tensors is made of, torch 2.11 to 2.14. Anything else in that pickle is refused.
_ALLOWED = {
    (_DCP + "metadata", "Metadata"),
    (_DCP + "metadata", "MetadataIndex"),
    (_DCP + "metadata", "StorageMeta"),
    (_DCP + "metadata", "TensorProperties"),
    (_DCP + "metadata", "TensorStorageMetadata"),
    (_DCP + "metadata", "BytesStorageMetadata"),
    (_DCP + "metadata", "ChunkStorageMetadata"),
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
    (_DCP + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
} | {("torch", name) for name in ("float64", "float32", "float16", "bfloat16", "uint8", "int64", "int32", "bool")}


class Stored(Value, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    crc32: int


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
    files: dict[str, Stored] = {}


class SafeReader(FileSystemReader):
    """torch's reader, except that the metadata's pickle may name nothing but the parts of a tensor index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Check the pickle, then let torch read it.

        Raises:
            BadInput: it names anything else, or is no pickle.
        """
        path = Path(self.checkpoint_id) / ".metadata"
        try:
            with open(path, "rb") as content:
                _Checked(content, path).load()
        except BadInput:
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise BadInput(f"{path}: is damaged ({type(error).__name__})", fix="remove that checkpoint") from None
        return super().read_metadata(*args, **kwargs)


class _Checked(pickle.Unpickler):
    def __init__(self, content: Any, path: Path) -> None:
        super().__init__(content)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise BadInput(f"{self._path}: names {module}.{name}, which no checkpoint needs", fix="do not use this file")
        return super().find_class(module, name)


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
    fix = "remove that checkpoint; the one before it is used then"
    try:
        manifest = read_json(folder / MANIFEST, Manifest)
    except BadInput as error:
        return error
    for name in sorted(manifest.files)[rank::ranks]:
        path, wanted = folder / name, manifest.files[name]
        if Path(name).name != name or not path.is_file():
            return BadInput(f"{path}: is missing", fix=fix)
        if path.stat().st_size != wanted.size:
            return BadInput(f"{path}: has {path.stat().st_size} bytes, the manifest says {wanted.size}", fix=fix)
        if crc32(path) != wanted.crc32:
            return BadInput(f"{path}: is damaged (its CRC-32 differs from the manifest's)", fix=fix)
    return None
