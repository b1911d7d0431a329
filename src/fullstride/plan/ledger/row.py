"""One row of the ledger, and the moments that rows are there at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import MomentName, Row, RowKind
from fullstride.plan.ledger.local import Local

RowMaker: TypeAlias = Callable[[Local, Cluster], tuple[Row, ...]]

ALL: tuple[MomentName, ...] = (
    "load",
    "first_step",
    "forward_end",
    "loss",
    "backward",
    "backward_end",
    "optimizer",
    "checkpoint",
)
"""The moments that are told apart."""
LATE: tuple[MomentName, ...] = ("forward_end", "loss", "backward", "backward_end", "optimizer", "checkpoint")
"""For what is made late in the first step and stays."""
STANDING: tuple[MomentName, ...] = ("forward_end", "loss", "backward")
"""While all activations stand."""
LAST: tuple[MomentName, ...] = ("backward_end", "optimizer")


def row(name: str, kind: RowKind, size: float, source: str, moments: tuple[MomentName, ...], *, exact: bool = False) -> Row:
    """A Row of whole bytes; `modelled` unless its formula counts every tensor."""
    return Row(
        name=name, kind=kind, bytes=round(size), source=source, confidence="exact" if exact else "modelled", moments=moments
    )


def assumed(name: str, kind: RowKind, size: float, source: str) -> Row:
    """A Row that stands always, and whose size nobody derived."""
    return Row(name=name, kind=kind, bytes=round(size), source=source, confidence="assumed", moments=ALL)
