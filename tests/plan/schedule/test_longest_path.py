"""The simulator against another way to the same answer: the longest path through the graph of what waits for what."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.schedule.schedules import generated, made_up, stage_sizes

from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.placement import placement_of
from fullstride.plan.simulate import Durations, StageDurations, simulate


def drawn_durations(seed, num_stages):
    """Uneven stages, as uneven layers make them."""
    rng = random.Random(seed)

    def some():
        return rng.choice([0.0, 0.5, 1.0, 2.0, 3.7])

    stages = [
        StageDurations(
            forward_seconds=some() + 0.1,
            input_grad_seconds=some(),
            weight_grad_seconds=some(),
            recompute_seconds=some(),
            fixed_seconds=some(),
            send_seconds=some(),
        )
        for _ in range(num_stages)
    ]
    return Durations(stages=tuple(stages), latency_seconds=some())


def longest(actions, durations, placement):
    """(end of the last computation, idle share) by recursion: an action starts when its rank and its data are ready."""
    ranks = [[action for action in actions if action.rank == rank] for rank in range(placement.pp)]
    sends = {}
    for own in ranks:
        for place, action in enumerate(own):
            if action.kind.startswith("send"):
                sends.setdefault((action.rank, action.peer), []).append(place)
    received = {}
    for own in ranks:
        for place, action in enumerate(own):
            if action.kind.startswith("recv"):
                number = sum(key[0] == action.peer and key[1] == action.rank for key in received)
                received[action.peer, action.rank, place] = number

    def seconds(action):
        stage = durations.stages[placement.stage(action.rank, action.chunk)]
        each = {
            "forward": stage.forward_seconds,
            "backward": stage.input_grad_seconds + stage.weight_grad_seconds + stage.recompute_seconds,
            "input_grad": stage.input_grad_seconds + stage.recompute_seconds,
            "weight_grad": stage.weight_grad_seconds,
        }
        return stage.fixed_seconds + each[action.kind] * (action.hi - action.lo) if action.kind in each else 0.0

    @cache
    def arrival(source, target, number):
        place = sends[source, target][number]
        action = ranks[source][place]
        begin = max(end(source, place - 1), arrival(source, target, number - 1) if number else 0.0)
        stage = placement.stage(source, action.chunk) - (action.kind == "send_backward")
        return begin + durations.latency_seconds + durations.stages[stage].send_seconds * (action.hi - action.lo)

    @cache
    def end(rank, place):
        if place < 0:
            return 0.0
        action, before = ranks[rank][place], end(rank, place - 1)
        if action.kind.startswith("recv"):
            return max(before, arrival(action.peer, rank, received[action.peer, rank, place]))
        return before + seconds(action)

    last = max(end(rank, len(own) - 1) for rank, own in enumerate(ranks))
    return last, sum(map(seconds, actions))


@settings(max_examples=80, deadline=None)
@given(generated(most_ranks=3), st.integers(0, 10**6))
def test_generated_schedules_on_uneven_stages(drawn, seed):
    schedule, pp, chunks, samples, sizes = drawn
    placement, durations = placement_of(schedule, pp, chunks), drawn_durations(seed, pp * chunks)
    actions = generate(schedule, pp, chunks, samples, sizes)
    timeline = simulate(actions, durations, placement, record=False)
    last, work = longest(actions, durations, placement)

    assert max(rank.end for rank in timeline.ranks) == pytest.approx(last)
    assert timeline.span_seconds == pytest.approx(last)  # the first forward starts at once
    assert timeline.bubble_share == pytest.approx(1 - work / (pp * last))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), pp=st.integers(2, 3), chunks=st.integers(1, 2), samples=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_schedules_in_no_particular_order(data, pp, chunks, samples, seed):
    sizes = data.draw(stage_sizes(pp * chunks, (1, 2, 4)))
    actions, placement = made_up(seed, pp, chunks, "v", samples, sizes, split=True)
    durations = drawn_durations(seed, pp * chunks)
    last, _ = longest(actions, durations, placement)

    assert max(rank.end for rank in simulate(actions, durations, placement).ranks) == pytest.approx(last)
