"""Values that travel between rooms, and the files they travel in.

A `Value` is frozen, keyword-only and strictly typed. A `FileValue` is one that may stand at the top of a file: its first
two entries are `kind` and `format`, and a reader refuses a kind it did not ask for or a format it does not know.
Files are replaced whole or not at all: written beside the target, synced, renamed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from fullstride.errors import BadInput, EnvironmentFault

FORMAT = 1


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every value: immutable, compared by content, checked when read."""


class FileValue(Value, frozen=True, kw_only=True, tag_field="kind"):
    """A value that can stand alone in a file."""

    format: Literal[1] = 1
    """Version of the layout of this file; anything but 1 is refused."""


V = TypeVar("V", bound=Value)


def kind_of(value_type: type[Value]) -> str:
    """The word that stands under `kind` in files of this type."""
    return str(value_type.__struct_config__.tag)


def to_json(value: Value, *, indent: bool = True) -> bytes:
    """Encode a value as JSON, ending in a newline."""
    raw = msgspec.json.encode(value, order=None)
    return (msgspec.json.format(raw, indent=2) if indent else raw) + b"\n"


def digest(value: Any) -> str:
    """A short stable name for the content of a value: 16 hexadecimal digits of SHA-256 over its sorted JSON."""
    raw = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(raw).hexdigest()[:16]


def convert(raw: Any, value_type: type[V], where: str) -> V:
    """Turn decoded JSON or TOML into a value, or say which key is wrong.

    Raises:
        BadInput: names `where`, the key and the rule it breaks.
    """
    if not isinstance(raw, dict):
        raise BadInput(f"{where}: holds a {type(raw).__name__}, not a table", fix=f"give a {value_type.__name__} file")
    if issubclass(value_type, FileValue):
        _check_header(raw, value_type, where)
    try:
        return msgspec.convert(raw, value_type)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: {error}", fix="correct that entry") from None


def _check_header(raw: dict[str, Any], value_type: type[Value], where: str) -> None:
    kind, layout = raw.get("kind"), raw.get("format")
    wanted = kind_of(value_type)
    if kind != wanted:
        raise BadInput(f"{where}: kind is {kind!r}, expected {wanted!r}", fix=f"give a file of kind {wanted}")
    if layout != FORMAT:
        raise BadInput(
            f"{where}: format is {layout!r}, this version reads format {FORMAT}",
            fix="write it again with this version of fullstride",
        )


def from_json(raw: bytes, value_type: type[V], where: str) -> V:
    """Decode JSON into a value.

    Raises:
        BadInput: the text is no JSON, or not of that type.
    """
    try:
        decoded = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: is not JSON ({error})", fix="check that the file is complete") from None
    return convert(decoded, value_type, where)


def read_bytes(path: Path | str) -> bytes:
    """Read a user's file whole.

    Raises:
        BadInput: it does not exist or is a directory.
        EnvironmentFault: it may not be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file", fix="check the path") from None
    except IsADirectoryError:
        raise BadInput(f"{path}: is a directory, expected a file", fix="check the path") from None
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}", fix="check permissions and the disk") from None


def read_json(path: Path | str, value_type: type[V]) -> V:
    """Read one value from a JSON file; errors name the path (`BadInput`, `EnvironmentFault`)."""
    return from_json(read_bytes(path), value_type, str(path))


def write_bytes(path: Path | str, raw: bytes) -> None:
    """Replace a file whole: a reader sees the old content or the new, never a part.

    Raises:
        EnvironmentFault: the disk is full or may not be written; the old file is left as it was.
    """
    target = Path(path)
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise EnvironmentFault(f"{target}: {error.strerror}", fix="free disk space or choose another place") from None


def write_json(path: Path | str, value: Value) -> None:
    """Write one value to a JSON file, whole (`EnvironmentFault` when the disk refuses)."""
    write_bytes(path, to_json(value))
