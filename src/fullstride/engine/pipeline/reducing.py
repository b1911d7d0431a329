"""When the gradients of a rank's stages are reduced over data-parallel ranks: as they become final, unit by unit."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence

import torch

from fullstride.engine.anatomy import Unit
from fullstride.engine.deferred import Deferred
from fullstride.engine.init import parameters_by_unit
from fullstride.engine.parallel.carrier import Carrier, Holding
from fullstride.engine.pipeline.cut import Chunk
from fullstride.plan.schedule.action import ActionKind


class Reducing:
    """Tells a carrier when gradients are final.

    A carrier that can hold gradients back is told unit by unit: in the last backward, or the last weight gradient, of a
    chunk. Others have one last backward, which the rules grant them.
    """

    def __init__(self, carrier: Carrier, chunks: Sequence[Chunk], units: Sequence[Unit]) -> None:
        """Take the carrier, this rank's chunks, and its units in the order of execution."""
        self._carrier = carrier
        self._alone = len(chunks) == 1
        self._names = [_of(chunk, units) for chunk in chunks]
        self._owner = {
            id(param): unit.name for unit, own in zip(units, parameters_by_unit(tuple(units)), strict=True) for param in own
        }
        self._todo: list[list[str]] = []

    def begin(self) -> None:
        """A step begins."""
        self._todo = [list(names) for names in self._names]
        if isinstance(self._carrier, Holding):
            self._carrier.hold(True)

    @contextlib.contextmanager
    def around(self, kind: ActionKind, final: bool) -> Iterator[None]:
        """Stands around a backward or its input half; `final`: no gradient of this chunk comes after it."""
        carrier = self._carrier
        if not isinstance(carrier, Holding):
            with carrier.micro_batch(final):
                yield
        elif final and self._alone and kind == "backward":  # the carrier sees by itself which unit is done
            carrier.hold(False)
            with carrier.micro_batch(True):
                yield
            carrier.hold(True)
        else:
            yield

    def weights(self, chunk: int, deferred: Deferred, final: bool) -> None:
        """Compute the weight gradients that were put off, and reduce what thereby becomes final."""
        if not (final and isinstance(self._carrier, Holding)):
            deferred.run()
            return
        left = collections.Counter(self._owner[id(weight)] for weight in deferred.weights)

        def made(weight: torch.Tensor) -> None:
            name = self._owner[id(weight)]
            left[name] -= 1
            if not left[name]:
                self._reduce(chunk, [name])

        deferred.run(made)

    def reduce(self, chunk: int) -> None:
        """All gradients of a chunk are final; those of what belongs to no chunk alone are with the last one."""
        if isinstance(self._carrier, Holding):
            self._reduce(chunk, list(self._todo[chunk]))
            if not any(self._todo):
                self._carrier.reduce(["root"])
                self._carrier.hold(False)

    def _reduce(self, chunk: int, names: list[str]) -> None:
        assert isinstance(self._carrier, Holding)
        todo = self._todo[chunk]
        found = [name for name in names if name in todo]
        self._carrier.reduce(found)
        self._todo[chunk] = [name for name in todo if name not in found]


def _of(chunk: Chunk, units: Sequence[Unit]) -> list[str]:
    """Names of a chunk's units, in the order of backward."""
    own = {*chunk.blocks} | ({"embedding"} if chunk.first else set()) | ({"head"} if chunk.last else set())
    return [unit.name for unit in reversed(units) if unit.name in own]
