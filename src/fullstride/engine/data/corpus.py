"""The token cache: a corpus tokenised once, kept as plain arrays that every rank maps into memory.

    CACHE/KEY/tokens.bin      ids of all documents one after the other, little-endian, 2 or 4 bytes each
    CACHE/KEY/counted.bin     one byte a token, only where some tokens do not count
    CACHE/KEY/starts.bin      int64: first token of each document
    CACHE/KEY/corpus.json     how to read them; the folder appears by one rename, so it is whole or absent

KEY is a digest of the files' names, sizes and times and of the tokenizer.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullstride.engine.data.readers import find_files, read_examples
from fullstride.engine.data.tokenise import Tokenizer, encode_example, load_tokenizer
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.files import FileValue, digest, read_json, write_json

LAYOUT = 1
"""Counted up when the meaning of the arrays changes."""


class CorpusInfo(FileValue, frozen=True, kw_only=True, tag="corpus"):
    """What the arrays of a cache hold."""

    source: str
    num_files: int
    num_documents: int
    num_tokens: int
    bytes_per_token: int
    largest_id: int
    eos: int
    masked: bool
    """Whether there is a `counted.bin`."""
    whole: bool
    """Whether documents are packed without being cut (fine-tuning data)."""


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus, mapped into memory."""

    info: CorpusInfo
    tokens: npt.NDArray[Any]
    """[num_tokens] uint16 or uint32."""
    counted: npt.NDArray[np.uint8] | None
    """[num_tokens], or None where all count."""
    starts: npt.NDArray[np.int64]
    """[num_documents]"""


def cache_key(source: str, files: Iterable[Path], tokenizer: Tokenizer) -> str:
    """Name of the cache folder of this content."""
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return digest([LAYOUT, source == "stdlib", stats, tokenizer.identity])


def locate(source: str, tokenizer_source: str, cache: Path) -> Path:
    """Folder in which the cache of this content is or would be; reads no content.

    Raises:
        BadInput: data or tokenizer are not there.
    """
    return cache / cache_key(source, find_files(source), load_tokenizer(tokenizer_source))


def build_corpus(source: str, tokenizer_source: str, cache: Path) -> Path:
    """Tokenise `source` into the cache, unless it is there already; called by one rank of a host.

    Returns:
        The folder, whole.

    Raises:
        BadInput: data or tokenizer cannot be used.
        EnvironmentFault: the disk is full or may not be written; nothing half-made is left.
    """
    files, tokenizer = find_files(source), load_tokenizer(tokenizer_source)
    target = cache / cache_key(source, files, tokenizer)
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=cache, prefix=f".{target.name}."))
    except OSError as error:
        raise EnvironmentFault(f"{cache}: {error.strerror}", fix="free disk space or choose another place") from None
    try:
        write_json(building / "corpus.json", _write(source, files, tokenizer, building))
        building.rename(target)
    except OSError as error:
        if not target.is_dir():  # another process may have been quicker, which is as good
            raise EnvironmentFault(f"{target}: {error.strerror}", fix="free disk space or choose another place") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _write(source: str, files: tuple[Path, ...], tokenizer: Tokenizer, folder: Path) -> CorpusInfo:
    width = 2 if tokenizer.vocabulary <= 1 << 16 else 4
    starts, total, largest, masked, whole = [], 0, 0, False, False
    with open(folder / "tokens.bin", "wb") as tokens_out, open(folder / "counted.bin", "wb") as counted_out:
        for path in files:
            for example in read_examples(path):
                ids, counted = encode_example(example, tokenizer)
                starts.append(total)
                total += len(ids)
                largest = max(largest, int(ids.max()))
                masked = masked or not counted.all()
                whole = whole or example.whole
                tokens_out.write(ids.astype(f"<u{width}").tobytes())
                counted_out.write(counted.astype(np.uint8).tobytes())
        for out in (tokens_out, counted_out):
            out.flush()
            os.fsync(out.fileno())
    if not starts:
        raise BadInput(f"data {source!r} holds no text", fix="give files with content")
    if not masked:
        (folder / "counted.bin").unlink()
    (folder / "starts.bin").write_bytes(np.asarray(starts, dtype="<i8").tobytes())
    return CorpusInfo(
        source=source,
        num_files=len(files),
        num_documents=len(starts),
        num_tokens=total,
        bytes_per_token=width,
        largest_id=largest,
        eos=tokenizer.eos,
        masked=masked,
        whole=whole,
    )


def open_corpus(folder: Path) -> Corpus:
    """Map a cache folder into memory.

    Raises:
        BadInput: its files do not have the sizes that `corpus.json` says.
    """
    info = read_json(folder / "corpus.json", CorpusInfo)
    assert sys.byteorder == "little", "token caches are little-endian"
    tokens = _mapped(folder / "tokens.bin", f"<u{info.bytes_per_token}", info.num_tokens)
    counted = _mapped(folder / "counted.bin", "u1", info.num_tokens) if info.masked else None
    return Corpus(info, tokens, counted, _mapped(folder / "starts.bin", "<i8", info.num_documents))


def _mapped(path: Path, dtype: str, length: int) -> npt.NDArray[Any]:
    size = path.stat().st_size if path.is_file() else -1
    if size != length * np.dtype(dtype).itemsize:
        raise BadInput(f"{path}: is damaged ({size} bytes)", fix=f"remove {path.parent}; it is made again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))


def check_vocabulary(corpus: Corpus, vocabulary: int) -> None:
    """Refuse a corpus with ids that the model's embedding does not have.

    Raises:
        BadInput: names the largest id and the model's vocabulary.
    """
    if corpus.info.largest_id >= vocabulary:
        raise BadInput(
            f"the data holds token {corpus.info.largest_id}, the model's vocabulary has {vocabulary} (0 to {vocabulary - 1})",
            fix="use the model's own tokenizer",
        )
