"""Frozen weights under adapters are in no checkpoint: a few numbers tell whether a run goes on beside the ones it began with.

They come from the model directory, or from the seed, again. Their fingerprint is a sum over all elements, so that it is the
same in every layout, of the bits of each rounded to bf16, so that it is the same in every dtype that they are held in.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.engine.checkpoint_boxes import shares
from fullstride.engine.checkpoint_ranks import Ranks
from fullstride.engine.precision import local
from fullstride.errors import BadInput

_AT_ONCE = 2**24
"""Elements: what is widened at a time."""
_FACTOR = 0x1E3779B97F4A7C15
_ALL = 2**64


def fingerprints(run: Any, ranks: Ranks) -> dict[str, int]:
    """Of every frozen parameter beside a run's adapters, by name; nothing without adapters. Called by all ranks.

    Args:
        run: with `frozen()`, if it has such parameters, and `pieces()`.
        ranks: of its run.
    """
    frozen: Mapping[str, Tensor] = run.frozen() if hasattr(run, "frozen") else {}
    pieces = {name: piece for name, piece in run.pieces().items() if name in frozen}
    chosen = shares(ranks.exchange(pieces))[ranks.rank]
    mine = {name: _fingerprint(local(frozen[name])) for name in sorted(chosen)}
    found: dict[str, int] = {}
    for some in ranks.exchange(mine):
        for name, value in some.items():
            found[name] = (found.get(name, 0) + value) % _ALL
    return {name: value % 2**63 for name, value in found.items()}


def _fingerprint(tensor: Tensor) -> int:
    total = 0
    for part in torch.split(tensor.reshape(-1), _AT_ONCE):
        bits = part.to(torch.bfloat16).view(torch.int16).long()
        total += int((bits * bits * _FACTOR + bits).sum())
    return total % _ALL


def unlike(folder: Path, here: Mapping[str, int], there: Mapping[str, int]) -> BadInput | None:
    """The first frozen parameter that is not the one which a checkpoint was trained beside."""
    name = next((name for name, value in here.items() if there.get(name) != value), "")
    if not name:
        return None
    return BadInput(
        f"{folder}: its adapters were trained beside other frozen weights than these: {name} differs",
        fix="start from the model directory (or, from scratch, on the kind of device) that the run began with",
    )
