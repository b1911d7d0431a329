"""The one JSON object that a verb prints under `--json`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

import msgspec

from fullstride.files import FORMAT, FileValue, Value, kind_of


def envelope(data: Any, *, kind: str = "", warnings: Sequence[str] = ()) -> bytes:
    """`{kind, format, data, warnings}` as UTF-8 JSON, ending in a newline.

    Args:
        data: a value, or anything JSON can hold; numbers that are not finite become null.
        kind: what `data` is; taken from the value when it is one that stands in files.
        warnings: what the user should know; empty for nothing.
    """
    word = kind or (kind_of(type(data)) if isinstance(data, FileValue) else type(data).__name__.lower())
    whole = {"kind": word, "format": FORMAT, "data": data, "warnings": list(warnings)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def print_json(data: Any, *, kind: str = "", warnings: Sequence[str] = (), out: BinaryIO | None = None) -> None:
    """Write the envelope to standard output (or `out`), as bytes, so that no terminal setting changes it."""
    target = out or sys.stdout.buffer
    target.write(envelope(data, kind=kind, warnings=warnings))
    target.flush()


def error_data(message: str, fix: str, exit_code: int) -> Value:
    """What stands under `data` when a verb failed: the envelope's kind is then `error`."""
    return ErrorData(message=message, fix=fix, exit_code=exit_code)


class ErrorData(Value, frozen=True, kw_only=True):
    """A failure of a verb, for a program that reads its output."""

    message: str
    fix: str
    exit_code: int
