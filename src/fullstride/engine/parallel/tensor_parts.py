"""Products and sums over ranks in parts, so that the exchange of one part runs beside the product of another.

A part is a run of the sequence: with the sequence cut, the same run of what each rank holds, so that a gather's result is
multiplied as it comes and a product's result is summed as it is. Collectives run on a stream of their own from `start` to
`wait`; nothing here needs another one. Parts change which rows are multiplied together and nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from fullstride.engine.parallel.collectives import (
    Ranks,
    sequence_back,
    sequence_first,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    wait,
)


@dataclasses.dataclass(frozen=True)
class Border:
    """How the hidden state passes into a region and out of it."""

    ranks: Ranks
    sequence: bool
    """Outside regions each rank holds its part of the sequence alone."""
    parts: int = 1
    """In how many parts products at the border are made, each beside another's exchange."""

    def start_spread(self, part: torch.Tensor) -> torch.Tensor:
        """Begin to make what a region reads."""
        return start_gather(part, self.ranks) if self.sequence else part

    def spread(self, started: torch.Tensor) -> torch.Tensor:
        """[samples, seq, hidden] of what was begun."""
        return sequence_back(wait(started), self.ranks.size) if self.sequence else started

    def start_sum(self, term: torch.Tensor) -> torch.Tensor:
        """Begin to sum the ranks' terms [samples, seq, hidden]."""
        if self.sequence:
            return start_reduce_scatter(sequence_first(term, self.ranks.size), self.ranks)
        return start_all_reduce(term, self.ranks)

    # In parts.

    def runs(self, length: int) -> list[tuple[int, int]]:
        """The parts of a sequence of `length` outside the border: even, the longer ones first, none of them empty."""
        count = max(1, min(self.parts, length))
        each, rest = divmod(length, count)
        ends = [each * n + min(n, rest) for n in range(count + 1)]
        return list(itertools.pairwise(ends))

    def runs_inside(self, whole: torch.Tensor) -> list[tuple[int, int]]:
        """The parts of [samples, seq, ...] inside, counted outside."""
        return self.runs(whole.shape[1] // (self.ranks.size if self.sequence else 1))

    def rows(self, whole: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
        """One part of [samples, seq, width], as its sum is begun; a view of one sample."""
        if not self.sequence:
            return whole[:, lo:hi]
        ranks, samples = self.ranks.size, whole.shape[0]
        cut = whole.view(samples, ranks, whole.shape[1] // ranks, whole.shape[2])
        return cut[:, :, lo:hi].transpose(0, 1).flatten(0, 1)

    def start_gathers(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Begin to gather [samples, seq / ranks, width], one part behind the other."""
        return [start_gather(part[:, lo:hi], self.ranks) for lo, hi in self.runs(part.shape[1])]

    def start_part(self, rows: torch.Tensor) -> torch.Tensor:
        """Begin to sum one part's terms."""
        return start_reduce_scatter(rows, self.ranks) if self.sequence else start_all_reduce(rows, self.ranks)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """[samples, seq, width] of parts as they were gathered, or as they came from `rows`; the list lets go of them."""
        if not self.sequence:
            whole = torch.cat(parts, dim=1)
        elif len(parts) == 1:
            whole = sequence_back(parts[0], self.ranks.size)
        else:
            ranks = self.ranks.size
            apart = [part.view(ranks, part.shape[0] // ranks, *part.shape[1:]).transpose(0, 1) for part in parts]
            whole = torch.cat(apart, dim=2).flatten(1, 2)
        parts.clear()
        return whole


def finish(started: Sequence[torch.Tensor]) -> torch.Tensor:
    """[samples, seq outside, width] of sums that were begun."""
    done = [wait(each) for each in started]
    return done[0] if len(done) == 1 else torch.cat(done, dim=1)


def gathered_products(
    part: torch.Tensor, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], border: Border
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A region's input gathered, and its products, each part's beside the gather of the next.

    Args:
        part: [samples, seq / ranks, width].
        matrices: [outputs, width] each.
        biases: one each.
        border: with the sequence cut.

    Returns:
        [samples, seq, width], and [samples, seq, outputs] of each matrix.
    """
    rows: list[torch.Tensor] = []
    made: list[list[torch.Tensor]] = [[] for _ in matrices]
    for started in border.start_gathers(part):
        rows.append(wait(started))
        for found, matrix, bias in zip(made, matrices, biases, strict=True):
            found.append(torch.nn.functional.linear(rows[-1], matrix, bias))
    return border.joined(rows), [border.joined(found) for found in made]


def start_summed_products(
    lefts: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor], bias: torch.Tensor | None, border: Border
) -> list[torch.Tensor]:
    """Sums over the ranks of products' sums, begun part by part, each beside the product of the next.

    Args:
        lefts: [samples, seq, inputs] each.
        matrices: [outputs, inputs] each, of as many outputs.
        bias: added to this rank's term.
        border: which says over whom and in how many parts.
    """
    started = []
    for lo, hi in border.runs_inside(lefts[0]):
        term: torch.Tensor | None = None
        for left, matrix in zip(lefts, matrices, strict=True):
            rows = border.rows(left, lo, hi)
            if term is None:
                term = torch.nn.functional.linear(rows, matrix, bias)
            else:
                term = torch.baddbmm(term, rows, matrix.t().expand(rows.shape[0], *matrix.t().shape))
        assert term is not None
        started.append(border.start_part(term))
    return started
