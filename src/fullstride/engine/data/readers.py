"""Files to examples: text, JSONL and Parquet, one file or a folder.

An example is a run of parts; each part says whether its tokens count towards the loss. Plain text is one counted part;
`prompt`/`completion` counts the completion; `messages` counts the assistant's turns.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fullstride.errors import BadInput, EnvironmentFault

STDLIB = "stdlib"
_FOREIGN = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
_PARQUET = {".parquet", ".pq"}
_JSONL = {".jsonl", ".ndjson"}
_KEYS = "`text`, or `prompt` and `completion`, or `messages`"


@dataclass(frozen=True)
class Part:
    """A stretch of text of one example."""

    text: str
    counted: bool = True
    """Whether predicting it counts towards the loss."""


@dataclass(frozen=True)
class Example:
    """One document or one conversation."""

    parts: tuple[Part, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    """Set instead of `parts` for a conversation, because its text depends on the tokenizer's template."""

    @property
    def whole(self) -> bool:
        """Whether it loses its meaning when it is cut (fine-tuning examples)."""
        return bool(self.messages) or any(not part.counted for part in self.parts)


def find_files(source: str) -> tuple[Path, ...]:
    """The files behind a data source, sorted, so that every rank and every run sees the same order.

    Args:
        source: `stdlib`, a file, or a folder (searched recursively; names that start with a dot are left out).

    Raises:
        BadInput: nothing there, or an empty folder.
    """
    if source == STDLIB:
        return _stdlib_files()
    root = Path(source)
    if root.is_file():
        return (root,)
    if not root.is_dir():
        raise BadInput(f"data {source!r}: no such file or folder", fix="check the path, or use `stdlib`")
    files = tuple(sorted(p for p in root.rglob("*") if p.is_file() and not _hidden(p.relative_to(root))))
    if not any(path.stat().st_size for path in files):
        raise BadInput(f"data folder {source!r} holds no file with content", fix="put text, .jsonl or .parquet files there")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _stdlib_files() -> tuple[Path, ...]:
    # Test folders are left out: some of their files are wrongly encoded on purpose.
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not _FOREIGN & set(path.relative_to(root).parts))
    found = tuple(sorted(files))
    if not found:
        raise EnvironmentFault(f"{root}: no sources of the standard library here", fix="give --data a file or folder")
    return found


def read_examples(path: Path) -> Iterator[Example]:
    """Examples of one file in its own order; by the file's suffix: Parquet, JSON lines, otherwise UTF-8 text.

    Raises:
        BadInput: not text, not JSON, or none of the known keys; names the file and the line or row.
        EnvironmentFault: the file may not be read.
    """
    try:
        if path.suffix in _PARQUET:
            yield from _parquet(path)
        elif path.suffix in _JSONL:
            yield from _jsonl(path)
        else:
            yield from _text(path)
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror or error}", fix="check permissions and the disk") from None


def _text(path: Path) -> Iterator[Example]:
    raw = path.read_bytes()
    if b"\0" in raw[: 1 << 16]:
        raise BadInput(f"{path}: is not text (it holds zero bytes)", fix="give text, .jsonl or .parquet files")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{path}: is not UTF-8 text (byte {error.start} is {raw[error.start]:#04x})"
        raise BadInput(message, fix="give text, .jsonl or .parquet files") from None
    if text:
        yield Example(parts=(Part(text),))


def _jsonl(path: Path) -> Iterator[Example]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BadInput(f"{path}: line {number} is not JSON ({error})", fix="one JSON object a line") from None
            yield example_of(row, f"{path}: line {number}")


def _parquet(path: Path) -> Iterator[Example]:
    import pyarrow.lib
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.lib.ArrowException as error:
        message = f"{path}: is not a Parquet file ({str(error).splitlines()[0]})"
        raise BadInput(message, fix="check that the file is complete") from None
    with table:
        names = set(table.schema_arrow.names)
        columns = next((c for c in (["text"], ["prompt", "completion"], ["messages"]) if names.issuperset(c)), None)
        if columns is None:
            raise BadInput(f"{path}: has columns {sorted(names)}, none of {_KEYS}", fix="rename the columns")
        row = 0
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            for values in batch.to_pylist():
                yield example_of(values, f"{path}: row {row}")
                row += 1


def example_of(row: Any, where: str) -> Example:
    """Turn one decoded row into an example.

    Raises:
        BadInput: the keys or their types are not known; names `where`.
    """
    if not isinstance(row, dict):
        raise BadInput(f"{where} holds a {type(row).__name__}, not an object", fix=f"use {_KEYS}")
    for keys, build in _FORMS.items():
        if all(key in row for key in keys):
            return build(row, where)
    raise BadInput(f"{where} has keys {sorted(map(str, row))}, none of {_KEYS}", fix="rename the keys")


def _string(row: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(row[key], str):
        raise BadInput(f"{where}: `{key}` is a {type(row[key]).__name__}, not a string", fix="give text")
    return str(row[key])


def _of_text(row: dict[str, Any], where: str) -> Example:
    return Example(parts=(Part(_string(row, "text", where)),))


def _of_completion(row: dict[str, Any], where: str) -> Example:
    return Example(parts=(Part(_string(row, "prompt", where), counted=False), Part(_string(row, "completion", where))))


def _of_messages(row: dict[str, Any], where: str) -> Example:
    turns = row["messages"]
    good = isinstance(turns, list) and bool(turns)
    good = good and all(isinstance(t, dict) and isinstance(t.get("role"), str) for t in turns)
    if not (good and all(isinstance(t.get("content"), str) for t in turns)):
        raise BadInput(f"{where}: `messages` is not a list of objects with `role` and `content`", fix="correct that row")
    return Example(messages=tuple({"role": t["role"], "content": t["content"]} for t in turns))


_FORMS: dict[tuple[str, ...], Callable[[dict[str, Any], str], Example]] = {
    ("text",): _of_text,
    ("prompt", "completion"): _of_completion,
    ("messages",): _of_messages,
}
