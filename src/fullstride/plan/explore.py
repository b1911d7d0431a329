"""Through the wide space: all of it where it is small, else one choice at a time from every layout.

The bounded way: each layout starts from sharded states and the smallest micro-batch; in those that start best each choice
in turn takes its best value, until none improves (coordinate descent). Plans that do not fit are compared by memory, so
that a layout first comes to fit and then becomes fast. The best layouts are then polished by changing two choices at once.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import NamedTuple

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.axes import Degrees, Options, Pick, Wishes, all_degrees, build, legal, options_for
from fullstride.plan.plan import Plan
from fullstride.plan.price import Score, score

EXHAUSTIVE_PLANS = 800
"""Spaces up to this size are priced whole: half a second."""
OPENED = 16
"""Layouts that are improved at all, the fastest at their start first."""
POLISHED = 3
NEAR = 1.1
"""Layouts whose best plan is improved by two choices at once: so many, where they are so close to the best; and the one with
data parallelism alone, which this version runs."""
HOPELESS = 1.3
"""A layout so many times slower than the best one after its first round is not improved further."""
ROUNDS, POLISHES = 4, 2
_SHARD, _MICRO, _PIPELINE, _RECOMPUTE, _CAST, _LOSS, _COMPILE, _OPTIMIZER, _OVERLAP = range(9)
_ORDER = (_RECOMPUTE, _SHARD, _MICRO, _PIPELINE, _RECOMPUTE)
"""The choices that a descent goes through; the others are left to the polish."""

Key = tuple[bool, float]
WORST: Key = (True, float("inf"))


class Found(NamedTuple):
    """A plan that was priced."""

    plan: Plan
    score: Score
    degrees: Degrees

    @property
    def key(self) -> Key:
        """Plans that fit come first, by time; the others by memory."""
        fits = self.score.fits
        return not fits, self.score.seconds if fits else float(self.score.peak_bytes)


class Exploration(NamedTuple):
    """What an exploration priced."""

    found: list[Found]
    """Those whose memory was priced too; the others were too slow for that to matter."""
    num_priced: int
    size: int
    """Plans in the whole space."""
    num_layouts: int
    exhaustive: bool


class _Layout:
    """One layout's plans, priced once each."""

    def __init__(
        self, base: Plan, degrees: Degrees, options: Options, spec: ModelSpec, cluster: Cluster, wishes: Wishes
    ) -> None:
        self.base, self.degrees, self.options, self.wishes = base, degrees, options, wishes
        self.spec, self.cluster = spec, cluster
        self.priced: dict[Pick, Found | None] = {}
        self.num_priced = 0
        self.best: Pick | None = None

    def key(self, pick: Pick, bar: float = math.inf) -> Key:
        """The pick's place in the order; the worst where its choices do not go together, or where it is above the bar."""
        if pick not in self.priced:
            self.priced[pick] = self._price(pick, bar)
        found = self.priced[pick]
        return found.key if found else WORST

    def _price(self, pick: Pick, bar: float) -> Found | None:
        plan = build(self.base, self.degrees, self.options, pick, self.spec, self.cluster, self.wishes)
        # The space holds only what the rules allow; what a user put in is checked.
        if plan is None or (self.wishes and not legal(plan, self.spec, self.cluster)):
            return None
        self.num_priced += 1
        told = score(plan, self.spec, self.cluster, bar)
        return Found(plan, told, self.degrees) if told else None

    def try_all(self, picks: list[Pick], *, whole: bool = False) -> bool:
        """Price picks; whether one of them is better than the best so far.

        Unless `whole`, the memory of plans that are slower than the best so far is not asked for.
        """
        before = self.best
        for pick in picks:
            over, value = self.best_key()
            if self.key(pick, math.inf if whole or over else value) < (over, value):
                self.best = pick
        return self.best != before

    def best_key(self) -> Key:
        """Of the best plan so far."""
        return self.key(self.best) if self.best else WORST

    def round(self) -> bool:
        """Each choice in turn takes its best value; whether anything improved."""
        assert self.best is not None, "a round starts somewhere"
        improved = False
        for axis in _ORDER:
            values = range(len(self.options[axis]))
            if axis == _RECOMPUTE and not self.best_key()[0]:  # it fits: making more again would only take time
                values = range(self.best[axis])
            improved |= self.try_all([_with(self.best, axis, value) for value in values])
        return improved

    def polish(self) -> bool:
        """The choices that act on one another two at a time, the others one at a time; whether anything improved."""
        assert self.best is not None, "a polish starts somewhere"
        start = self.best
        alone = (_LOSS, _COMPILE, _OPTIMIZER, _OVERLAP)
        picks = [_with(start, axis, n) for axis in alone for n in range(len(self.options[axis]))]
        for one, other in combinations((_SHARD, _MICRO, _PIPELINE, _RECOMPUTE, _CAST), 2):
            for a in range(len(self.options[one])):
                picks += [_with(_with(start, one, a), other, b) for b in range(len(self.options[other]))]
        return self.try_all(picks)


def _with(pick: Pick, axis: int, value: int) -> Pick:
    return (*pick[:axis], value, *pick[axis + 1 :])


def explore(
    base: Plan,
    num_ranks: int,
    spec: ModelSpec,
    cluster: Cluster,
    wishes: Wishes,
    *,
    exhaustive: bool | None = None,
    offload: bool = False,
) -> Exploration:
    """Price the wide space, or its promising part where it is large; `exhaustive` decides which, None by its size."""
    layouts = [
        _Layout(base, each, options_for(base, each, spec, cluster, wishes, offload=offload), spec, cluster, wishes)
        for each in all_degrees(base, num_ranks, spec, cluster, wishes)
    ]
    size = sum(layout.options.size for layout in layouts)
    whole = size <= EXHAUSTIVE_PLANS if exhaustive is None else exhaustive
    if whole:
        for layout in layouts:
            layout.try_all(list(layout.options.picks()), whole=True)
    else:
        _descend(layouts)
    found = [item for layout in layouts for item in layout.priced.values() if item]
    return Exploration(
        found=found, num_priced=sum(item.num_priced for item in layouts), size=size, num_layouts=len(layouts), exhaustive=whole
    )


def first_that_fits(base: Plan, num_ranks: int, spec: ModelSpec, cluster: Cluster) -> Plan | None:
    """A plan of the least memory on so many ranks that fits, in the layout with the least model parallelism."""
    for degrees in all_degrees(base, num_ranks, spec, cluster, {}):
        layout = _Layout(base, degrees, options_for(base, degrees, spec, cluster, {}), spec, cluster, {})
        if _start(layout) and layout.best and (found := layout.priced[layout.best]):
            return found.plan
    return None


def _descend(layouts: list[_Layout]) -> None:
    """One round in the layouts that fit and start well, more in those that come near the best, pairs of choices in the best."""
    able = sorted((layout for layout in layouts if _start(layout)), key=_Layout.best_key)
    open_ones = [layout for place, layout in enumerate(able) if place < OPENED or layout.degrees.data_only]
    for layout in open_ones:
        layout.round()
    best = min((layout.best_key() for layout in open_ones), default=WORST)
    for layout in open_ones:
        for _ in range(ROUNDS):
            if layout.best_key() > (False, HOPELESS * best[1]) or not layout.round():
                break
    ranked = sorted(open_ones, key=_Layout.best_key)
    best = ranked[0].best_key() if ranked else WORST
    for place, layout in enumerate(ranked):
        near = place < POLISHED and layout.best_key() <= (False, NEAR * best[1])
        for _ in range(POLISHES if near or layout.degrees.data_only else 0):
            if not layout.polish():
                break


def _start(layout: _Layout) -> bool:
    """Take the first of each choice, else the least memory that the layout can do with; whether either fits."""
    if not all(layout.options):
        return False
    first = tuple(0 for _ in layout.options)
    layout.try_all([first])
    if layout.best is None or layout.key(layout.best)[0]:
        least = _with(first, _RECOMPUTE, len(layout.options.recomputes) - 1)
        thirds = [n for n, (_, _, shard) in enumerate(layout.options.shards) if shard.stage == 3]
        least = _with(least, _SHARD, thirds[0]) if thirds else least
        least = _with(least, _OPTIMIZER, len(layout.options.optimizers) - 1)
        # Of all schedules these two keep the fewest activations.
        thrifty = [n for n, pipe in enumerate(layout.options.pipelines) if pipe.schedule in ("none", "1f1b", "zb-v")]
        layout.try_all([_with(least, _PIPELINE, n) for n in thrifty or range(len(layout.options.pipelines))])
    return not layout.best_key()[0]
