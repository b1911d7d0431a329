"""Documents to samples of one length, and the order in which samples come.

Sample k of a run depends on the seed and on k alone: epoch k // n, and within it a keyed permutation of the n packed
samples (a Feistel network with cycle walking, Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002), which
needs no memory and no library whose random streams could change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fullstride.engine.data.corpus import Corpus
from fullstride.errors import BadInput

NOT_COUNTED = -100
"""Label of a token that is not predicted, as in torch's cross entropy."""
_MASK = (1 << 64) - 1
_ROUNDS = 6


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted(index: int, size: int, key: int) -> int:
    """Where a keyed permutation of `size` things sends `index`; one to one for every key."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mix(_mix(key + turn) ^ right) & low)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True)
class Packing:
    """A corpus cut into samples.

    Fine-tuning examples are never cut: they are put into samples whole, in order, as many as fit, the rest is padding; one
    longer than a sample loses its end. Anything else is one stream of tokens that is cut every `length`.
    """

    corpus: Corpus
    length: int
    documents: Literal["across", "separate"]
    seed: int
    bounds: npt.NDArray[np.int64] | None
    """[num_samples, 2]: first and last document of a sample, for whole packing; None for a stream."""
    num_samples: int

    def sample(self, k: int) -> dict[str, npt.NDArray[np.int64]]:
        """Sample k of the run: `input_ids`, `labels` and, for separate documents, `document_ids`, each [length] int64."""
        epoch, place = divmod(k, self.num_samples)
        return self.at(permuted(place, self.num_samples, _mix(self.seed & _MASK) ^ epoch))

    def at(self, place: int) -> dict[str, npt.NDArray[np.int64]]:
        """The packed sample at a place of the corpus, in file order."""
        ids = np.full(self.length, self.corpus.info.eos, dtype=np.int64)
        labels = np.full(self.length, NOT_COUNTED, dtype=np.int64)
        owners = np.full(self.length, -1, dtype=np.int64)
        filled = 0
        for low, high, document in self._pieces(place):
            end = filled + high - low
            ids[filled:end] = self.corpus.tokens[low:high]
            labels[filled:end] = ids[filled:end]
            if self.corpus.counted is not None:
                labels[filled:end][self.corpus.counted[low:high] == 0] = NOT_COUNTED
            owners[filled:end] = document
            filled = end
        if self.documents == "across":
            return {"input_ids": ids, "labels": labels}
        borders = np.flatnonzero(owners[1:] != owners[:-1]) + 1
        labels[borders] = NOT_COUNTED  # the first token of a document is not predicted from another one
        numbers = np.zeros(self.length, dtype=np.int64)
        numbers[borders] = 1
        return {"input_ids": ids, "labels": labels, "document_ids": np.cumsum(numbers)}

    def _pieces(self, place: int) -> list[tuple[int, int, int]]:
        """Token ranges [low, high) of a sample and the document each belongs to."""
        starts, total = self.corpus.starts, self.corpus.info.num_tokens
        if self.bounds is not None:
            first, last = (int(v) for v in self.bounds[place])
            ranges = [(int(starts[d]), self._end(d), d) for d in range(first, last + 1)]
            return [(low, min(high, low + self.length), d) for low, high, d in ranges]
        low = place * self.length
        high = min(low + self.length, total)
        pieces, document = [], int(np.searchsorted(starts, low, side="right")) - 1
        while low < high:
            end = min(high, self._end(document))
            pieces.append((low, end, document))
            low, document = end, document + 1
        return [piece for piece in pieces if piece[0] < piece[1]]

    def _end(self, document: int) -> int:
        starts = self.corpus.starts
        return int(starts[document + 1]) if document + 1 < len(starts) else self.corpus.info.num_tokens


def pack(corpus: Corpus, length: int, documents: Literal["across", "separate"], seed: int) -> Packing:
    """Cut a corpus into samples of `length` tokens.

    Raises:
        BadInput: the corpus does not fill one sample.
    """
    if corpus.info.whole:
        bounds = _whole_bounds(corpus, length)
        return Packing(corpus, length, documents, seed, bounds, len(bounds))
    count = corpus.info.num_tokens // length
    if count == 0:
        raise BadInput(
            f"data {corpus.info.source!r} holds {corpus.info.num_tokens} tokens, fewer than one sample of {length}",
            fix="give more data or a shorter sequence length",
        )
    return Packing(corpus, length, documents, seed, None, count)


def _whole_bounds(corpus: Corpus, length: int) -> npt.NDArray[np.int64]:
    sizes = np.diff(np.append(corpus.starts, corpus.info.num_tokens)).tolist()
    bounds, first, used = [], 0, 0
    for document, size in enumerate(sizes):
        taken = min(size, length)
        if used and used + taken > length:
            bounds.append((first, document - 1))
            first, used = document, 0
        used += taken
    bounds.append((first, len(sizes) - 1))
    return np.asarray(bounds, dtype=np.int64)
