"""Complete schedules: what every rank does in one step, from the first forward to the optimizer.

Receives stand right before the computation that needs them, in the order of the sends, with one order for each pair of
ranks whatever the messages are; a message that overtakes none can wait in a ring of buffers. A message is as large as the
smaller micro-batch of its two stages. `reduce` stands where the gradients of a chunk are final. A rank has one
`optimizer`, last, after all its reduces, as chunk 0.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from fullstride.errors import RuleBroken
from fullstride.plan.schedule.action import Action, ActionKind
from fullstride.plan.schedule.orders import ORDERS, Order, Sizes
from fullstride.plan.schedule.placement import Placement, cuts, least_micro_batches, placement_of, stage_sizes

Message: TypeAlias = tuple[ActionKind, int, int, int]
"""(kind of the receive, stage that receives, lo, hi)."""

FINAL: tuple[ActionKind, ActionKind] = ("backward", "weight_grad")
"""What makes a gradient of weights."""

_GOES: dict[ActionKind, tuple[ActionKind, ActionKind, int]] = {
    "forward": ("send_forward", "recv_forward", 1),
    "backward": ("send_backward", "recv_backward", -1),
    "input_grad": ("send_backward", "recv_backward", -1),
}
"""Kind of computation: its send, the receive of what it needs, and the direction of the stage it sends to."""


def generate(
    schedule: str, pp: int, chunks: int, samples: int, micro_batch_per_stage: int | tuple[int, ...]
) -> tuple[Action, ...]:
    """The actions of one step, rank by rank, in order within each rank.

    Args:
        schedule: `gpipe`, `1f1b`, `interleaved`, `bfs`, `zb-h1`, `zb-v`; `none` for one rank.
        pp: ranks of the pipeline.
        chunks: stages on each rank.
        samples: samples of the step on this pipeline.
        micro_batch_per_stage: samples of a micro-batch on each of the pp x chunks stages, or one number for all; the last
            micro-batch may be smaller.

    Raises:
        RuleBroken: chunks or micro-batches that the schedule cannot work with, or sizes of neighbours without an integer
            factor.
    """
    placement = placement_of(schedule, pp, chunks)
    sizes = stage_sizes(placement, samples, micro_batch_per_stage)
    least, num = least_micro_batches(schedule, pp), -(-samples // max(sizes))
    if num < least:
        raise RuleBroken(
            f"{num} micro-batches, schedule {schedule} on {pp} ranks needs {least}", fix="use smaller micro-batches, or 1f1b"
        )
    return complete(ORDERS[schedule](placement, samples, sizes), placement, samples, sizes)


def complete(orders: list[Order], placement: Placement, samples: int, sizes: Sizes) -> tuple[Action, ...]:
    """Add sends, receives, reduces and the optimizer to what each rank computes.

    Args:
        orders: computations of each rank, in order.
        placement: where the stages stand.
        samples: samples of the step.
        sizes: samples of a micro-batch on each stage.
    """
    routes = _routes(placement, sizes)
    channels = _channels(orders, routes)
    place = {pair: {message: number for number, message in enumerate(sent)} for pair, sent in channels.items()}
    actions: list[Action] = []
    for rank, order in enumerate(orders):
        final = {chunk: number for number, (kind, chunk, _, _) in enumerate(order) if kind in FINAL}
        taken = [0] * placement.pp
        for number, (kind, chunk, lo, hi) in enumerate(order):
            goes, comes = routes.get((rank, chunk, kind), (None, None))
            if comes:
                source = comes.rank
                upto = 1 + max(place[source, rank][comes.kind, comes.stage, *part] for part in cuts(lo, hi, comes.size))
                for kind_got, stage, at, to in channels[source, rank][taken[source] : upto]:
                    got = placement.home(stage)[1]
                    actions.append(Action(rank=rank, chunk=got, kind=kind_got, lo=at, hi=to, peer=source))
                taken[source] = max(upto, taken[source])
            actions.append(Action(rank=rank, chunk=chunk, kind=kind, lo=lo, hi=hi))
            if goes:
                for at, to in cuts(lo, hi, goes.size):
                    actions.append(Action(rank=rank, chunk=chunk, kind=goes.send, lo=at, hi=to, peer=goes.rank))
            if final.get(chunk) == number:
                actions.append(Action(rank=rank, chunk=chunk, kind="reduce", lo=0, hi=samples))
        actions.append(Action(rank=rank, chunk=0, kind="optimizer", lo=0, hi=samples))
    return tuple(actions)


class _Border(NamedTuple):
    """Messages between a stage and a neighbour on another rank."""

    rank: int
    """The other one."""
    send: ActionKind
    kind: ActionKind
    """Of the receive."""
    stage: int
    """The one that receives."""
    size: int
    """Samples of a message."""


_Routes: TypeAlias = dict[tuple[int, int, ActionKind], tuple[_Border | None, _Border | None]]
"""(rank, chunk, computation): where its result goes, and where what it needs comes from; None within a rank."""


def _routes(placement: Placement, sizes: Sizes) -> _Routes:
    routes: _Routes = {}
    for stage in range(placement.num_stages):
        rank, chunk = placement.home(stage)
        for kind, (send, receive, step) in _GOES.items():
            ends: list[_Border | None] = []
            for other, receiver in ((stage + step, stage + step), (stage - step, stage)):
                there = 0 <= other < placement.num_stages and placement.home(other)[0] != rank
                size = min(sizes[stage], sizes[other]) if there else 0
                ends.append(_Border(placement.home(other)[0], send, receive, receiver, size) if there else None)
            routes[rank, chunk, kind] = ends[0], ends[1]
    return routes


def _channels(orders: list[Order], routes: _Routes) -> dict[tuple[int, int], list[Message]]:
    """What goes from each rank to each other, in the order of sending."""
    channels: dict[tuple[int, int], list[Message]] = {}
    for rank, order in enumerate(orders):
        for kind, chunk, lo, hi in order:
            goes, _ = routes.get((rank, chunk, kind), (None, None))
            if goes:
                sent = channels.setdefault((rank, goes.rank), [])
                sent += [(goes.kind, goes.stage, *part) for part in cuts(lo, hi, goes.size)]
    return channels
