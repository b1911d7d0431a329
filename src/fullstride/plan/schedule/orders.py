"""In which order each rank computes, by schedule; sends and receives are added by `generators.complete`.

Sources: GPipe (Huang et al., 2019); 1F1B (Narayanan et al., 2019, 2021); interleaved (Narayanan et al., 2021); looped
breadth-first (Lamy-Poirier, 2023); ZB-H1 and ZB-V (Qi et al., 2023 and 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeAlias

from fullstride.plan.schedule.action import ActionKind
from fullstride.plan.schedule.placement import Placement, cuts

Work: TypeAlias = tuple[ActionKind, int, int, int]
"""(kind, chunk, lo, hi): one computation of a rank."""

Order: TypeAlias = list[Work]
Sizes: TypeAlias = tuple[int, ...]


def breadth_first(placement: Placement, samples: int, sizes: Sizes) -> list[Order]:
    """All forwards chunk by chunk, then all backwards from the last chunk; with one chunk this is GPipe."""
    orders = []
    for rank in range(placement.pp):
        parts = [cuts(0, samples, sizes[placement.stage(rank, chunk)]) for chunk in range(placement.chunks)]
        order: Order = [("forward", chunk, lo, hi) for chunk, part in enumerate(parts) for lo, hi in part]
        order += [("backward", chunk, lo, hi) for chunk, part in reversed(list(enumerate(parts))) for lo, hi in part]
        orders.append(order)
    return orders


def depths(sizes: Sizes) -> tuple[int, ...]:
    """Micro-batches that each stage forwards before its first backward, under one-forward-one-backward.

    With one size this is p - i. Else the first backward of a stage waits for `k` backwards of the next one, which by then
    has forwarded depth + k - 1 micro-batches; those samples must have been sent, and one micro-batch of the larger size
    more, so that neither waits for the other.
    """
    depth = [1]
    for own, after in zip(reversed(sizes[:-1]), reversed(sizes[1:]), strict=True):
        waited = depth[-1] + math.ceil(own / after) - 1
        depth.append(-(-waited * after // own) + math.ceil(after / own))
    return tuple(reversed(depth))


def one_forward_one_backward(placement: Placement, samples: int, sizes: Sizes) -> list[Order]:
    """1F1B: a warm-up as deep as the stages behind it, then backward and forward in turn."""
    orders = []
    for size, depth in zip(sizes, depths(sizes), strict=True):
        parts = cuts(0, samples, size)
        order: Order = [("forward", 0, *part) for part in parts[:depth]]
        for done, part in enumerate(parts):
            order.append(("backward", 0, *part))
            if depth + done < len(parts):
                order.append(("forward", 0, *parts[depth + done]))
        orders.append(order)
    return orders


def zero_bubble_h1(placement: Placement, samples: int, sizes: Sizes) -> list[Order]:
    """1F1B with the backward split; a stage puts off weight gradients as far as the memory of the fullest stage allows."""
    depth = depths(sizes)
    fullest = max(size * deep for size, deep in zip(sizes, depth, strict=True))
    orders = []
    for size, deep in zip(sizes, depth, strict=True):
        parts = cuts(0, samples, size)
        late = min((fullest - size * deep) // size, len(parts))
        order: Order = [("forward", 0, *part) for part in parts[:deep]]
        for done, part in enumerate(parts):
            order.append(("input_grad", 0, *part))
            if done >= late:
                order.append(("weight_grad", 0, *parts[done - late]))
            if deep + done < len(parts):
                order.append(("forward", 0, *parts[deep + done]))
        order += [("weight_grad", 0, *part) for part in parts[len(parts) - late :]]
        orders.append(order)
    return orders


Step: TypeAlias = tuple[ActionKind, int, int]
"""(kind, chunk, number of the micro-batch)."""


def rounds(num: int, pp: int) -> list[range]:
    """Micro-batches in rounds of at least one for each rank, as equal as they can be."""
    count = max(1, num // pp)
    ends = [place * num // count for place in range(count + 1)]
    return [range(lo, hi) for lo, hi in pairwise(ends)]


def _interleaved_rank(placement: Placement, rank: int, num: int) -> Iterator[Step]:
    parts = rounds(num, placement.pp)
    forward = [(chunk, number) for part in parts for chunk in range(placement.chunks) for number in part]
    back = [(chunk, number) for part in parts for chunk in reversed(range(placement.chunks)) for number in part]
    longest = max(len(part) for part in parts)
    warm = min(len(forward), 2 * (placement.pp - 1 - rank) + (placement.chunks - 1) * longest)
    for chunk, number in forward[:warm]:
        yield "forward", chunk, number
    for place, (chunk, number) in enumerate(back):
        if warm + place < len(forward):
            yield "forward", *forward[warm + place]
        yield "backward", chunk, number


def _zero_bubble_v_rank(placement: Placement, rank: int, num: int) -> Iterator[Step]:
    """The handcrafted order of Qi et al. (2024): chunk 0 goes down the ranks, chunk 1 comes back up.

    It is written for 2p - 1 micro-batches or more; with fewer, those that are not there are left out.
    """
    pp = placement.pp
    most = max(num, 2 * pp - 1)
    count: dict[tuple[ActionKind, int], int] = {}
    for kind, chunk in _v_pattern(pp, rank, most):
        number = count.get((kind, chunk), 0)
        count[kind, chunk] = number + 1
        if number < num:
            yield kind, chunk, number


def _v_pattern(pp: int, rank: int, num: int) -> Iterator[tuple[ActionKind, int]]:
    down, up, down_back, up_back, down_weight, up_weight = _V_STEPS
    yield from (down,) * (2 * (pp - rank) - 1)
    yield from (up, down) * rank
    yield from (up, up_back, up_weight) * (pp - rank)
    downs, ups, backs = 2 * pp - 1 - rank, pp, 0  # forwards down and up, backwards of what went down
    while ups < downs or downs < num:
        if downs < num:
            yield down
            downs += 1
        yield from (down_back, down_weight, up, up_back, up_weight)
        ups, backs = ups + 1, backs + 1
    yield from (down_back, up_back) * rank
    yield from (down_back, down_weight) * (pp - rank)
    yield from (up_weight,) * rank
    yield from (down_weight,) * (num - backs - (pp - rank))


_V_STEPS: tuple[tuple[ActionKind, int], ...] = (
    ("forward", 0),
    ("forward", 1),
    ("input_grad", 0),
    ("input_grad", 1),
    ("weight_grad", 0),
    ("weight_grad", 1),
)


def _whole(rank_steps: Callable[[Placement, int, int], Iterator[Step]]) -> Callable[[Placement, int, Sizes], list[Order]]:
    """A schedule made of whole micro-batches, each cut to the size of the stage that computes it.

    Where stages differ, the whole is the least common multiple of their sizes. The last stage does the pieces of one
    whole to the end, one after the other, since its backward waits for nobody.
    """

    def orders(placement: Placement, samples: int, sizes: Sizes) -> list[Order]:
        wholes = cuts(0, samples, math.lcm(*sizes))
        result = []
        for rank in range(placement.pp):
            order: Order = []
            for run in _runs(list(rank_steps(placement, rank, len(wholes))), placement, rank):
                _, chunk, number = run[0]
                for lo, hi in cuts(*wholes[number], sizes[placement.stage(rank, chunk)]):
                    order += [(kind, chunk, lo, hi) for kind, _, _ in run]
            result.append(order)
        return result

    return orders


def _runs(steps: list[Step], placement: Placement, rank: int) -> Iterator[list[Step]]:
    run: list[Step] = []
    for step in steps:
        last = placement.stage(rank, step[1]) == placement.num_stages - 1
        if run and not (last and step[1:] == run[0][1:]):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


interleaved = _whole(_interleaved_rank)
zero_bubble_v = _whole(_zero_bubble_v_rank)

ORDERS: dict[str, Callable[[Placement, int, Sizes], list[Order]]] = {
    "none": one_forward_one_backward,
    "gpipe": breadth_first,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "bfs": breadth_first,
    "zb-h1": zero_bubble_h1,
    "zb-v": zero_bubble_v,
}
