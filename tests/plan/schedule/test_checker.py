import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.schedule.schedules import generated, made_up, stage_sizes

from fullstride.errors import RuleBroken
from fullstride.plan.schedule.action import Action, parse_action
from fullstride.plan.schedule.checker import faults, live_samples, require_runnable
from fullstride.plan.schedule.execution import least_buffers, stuck
from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.inflight import samples_in_flight
from fullstride.plan.schedule.placement import Placement, placement_of
from fullstride.plan.simulate import simulate, uniform_durations

TWO = Placement(pp=2)


def lines(text):
    return tuple(parse_action(line) for line in text.strip().splitlines())


def by_rank(actions, pp):
    return [[action for action in actions if action.rank == rank] for rank in range(pp)]


@settings(max_examples=150, deadline=None)
@given(generated())
def test_what_is_generated_can_be_run(drawn):
    schedule, pp, chunks, samples, sizes = drawn
    actions = generate(schedule, pp, chunks, samples, sizes)

    assert faults(actions, placement_of(schedule, pp, chunks), samples) == ()


@settings(max_examples=60, deadline=None)
@given(generated(uniform=True))
def test_what_is_generated_needs_few_buffers(drawn):
    schedule, pp, chunks, samples, sizes = drawn
    needed = least_buffers(by_rank(generate(schedule, pp, chunks, samples, sizes), pp))

    if chunks == 1:
        assert needed == 1
    elif schedule != "bfs":  # breadth-first sends a whole chunk before anything is received
        assert needed <= 2 * pp


@settings(max_examples=100, deadline=None)
@given(data=st.data(), pp=st.integers(2, 3), chunks=st.integers(1, 2), samples=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_any_legal_order_passes_and_ends(data, pp, chunks, samples, seed):
    style = data.draw(st.sampled_from(["loop", "v"]))
    sizes = data.draw(stage_sizes(pp * chunks, (1, 2, 4)))
    actions, placement = made_up(seed, pp, chunks, style, samples, sizes, split=data.draw(st.booleans()))

    assert faults(actions, placement, samples) == ()
    timeline = simulate(actions, uniform_durations(pp * chunks), placement)
    assert sum(rank.busy_seconds for rank in timeline.ranks) == pytest.approx(3 * samples * pp * chunks)


def removed(actions, place):
    return actions[:place] + actions[place + 1 :]


def doubled(actions, place):
    return actions[: place + 1] + actions[place:]


def longer(actions, place):
    return (*actions[:place], replace(actions[place], hi=actions[place].hi + 1), *actions[place + 1 :])


def elsewhere(actions, place):
    peer = actions[place].peer
    assume(peer >= 0)
    return (*actions[:place], replace(actions[place], peer=(peer + 1) % 3), *actions[place + 1 :])


@settings(max_examples=200, deadline=None)
@given(generated(), st.sampled_from([removed, doubled, longer, elsewhere]), st.data())
def test_a_changed_action_is_found(drawn, change, data):
    schedule, pp, chunks, samples, sizes = drawn
    actions = generate(schedule, pp, chunks, samples, sizes)
    place = data.draw(st.integers(0, len(actions) - 1))
    found = faults(change(actions, place), placement_of(schedule, pp, chunks), samples)

    assume(change is not longer or actions[place].kind not in ("reduce", "optimizer"))
    assert found
    if change is not removed:
        touched = {actions[place].text(), *(action.text() for action in change(actions, place)[place : place + 2])}
        named = {action.text() for fault in found for action in fault.actions}
        assert named & touched


LATER = {
    "forward": ("backward", "input_grad", "send_forward"),
    "input_grad": ("weight_grad", "send_backward"),
    "backward": ("send_backward",),
    "recv_forward": ("forward",),
    "recv_backward": ("backward", "input_grad"),
}


@settings(max_examples=200, deadline=None)
@given(generated(), st.data())
def test_two_actions_that_need_each_other_cannot_change_places(drawn, data):
    schedule, pp, chunks, samples, sizes = drawn
    actions = list(generate(schedule, pp, chunks, samples, sizes))
    pairs = [
        (one, two)
        for one, first in enumerate(actions)
        for two in range(one + 1, min(one + 40, len(actions)))
        if (second := actions[two]).rank == first.rank
        and second.chunk == first.chunk
        and second.kind in LATER.get(first.kind, ())
        and max(first.lo, second.lo) < min(first.hi, second.hi)
    ]
    assume(pairs)
    one, two = data.draw(st.sampled_from(pairs))
    first, second = actions[one], actions[two]
    actions[one], actions[two] = second, first
    found = faults(actions, placement_of(schedule, pp, chunks), samples)

    assert any(set(fault.actions) == {first, second} for fault in found), (first.text(), second.text())


def test_messages_that_cross_are_named_as_a_pair():
    actions = list(generate("gpipe", 2, 1, 4, 2))
    places = [place for place, action in enumerate(actions) if action.kind == "send_forward"]
    one, two = places
    actions[one], actions[two] = actions[two], actions[one]
    found = faults(actions, TWO, 4)

    assert [fault.rule for fault in found] == ["sent", "paired"]
    assert [action.text() for action in found[0].actions] == ["0:forward c0 [2,4)", "0:send_forward c0 [2,4) -> 1"]
    assert [action.text() for action in found[1].actions] == ["0:send_forward c0 [2,4) -> 1", "1:recv_forward c0 [0,2) -> 0"]


def test_ranks_that_wait_for_each_other_are_named():
    # Rank 0 takes its second forward only after the gradient of the first; rank 1 wants both forwards before any backward.
    actions = lines("""
        0:forward c0 [0,1)
        0:send_forward c0 [0,1) -> 1
        0:recv_backward c0 [0,1) -> 1
        0:backward c0 [0,1)
        0:forward c0 [1,2)
        0:send_forward c0 [1,2) -> 1
        0:recv_backward c0 [1,2) -> 1
        0:backward c0 [1,2)
        0:reduce c0 [0,2)
        0:optimizer c0 [0,2)
        1:recv_forward c0 [0,1) -> 0
        1:forward c0 [0,1)
        1:recv_forward c0 [1,2) -> 0
        1:forward c0 [1,2)
        1:backward c0 [0,1)
        1:send_backward c0 [0,1) -> 0
        1:backward c0 [1,2)
        1:send_backward c0 [1,2) -> 0
        1:reduce c0 [0,2)
        1:optimizer c0 [0,2)
    """)
    (found,) = faults(actions, TWO, 2)

    assert found.rule == "deadlock"
    assert {action.text() for action in found.actions} == {"0:recv_backward c0 [0,1) -> 1", "1:recv_forward c0 [1,2) -> 0"}
    with pytest.raises(RuleBroken, match="each waits for something that comes after the other"):
        require_runnable(actions, TWO, 2)


def test_too_few_buffers_are_a_deadlock():
    actions = generate("1f1b", 3, 1, 15, (4, 1, 1))
    needed = least_buffers(by_rank(actions, 3))

    assert needed > 1
    assert faults(actions, Placement(pp=3), 15, buffers=needed) == ()
    (found,) = faults(actions, Placement(pp=3), 15, buffers=needed - 1)
    assert found.rule == "deadlock" and len(found.actions) == 2
    assert stuck(by_rank(actions, 3), None) == ()


@settings(max_examples=60, deadline=None)
@given(generated())
def test_a_stage_that_holds_too_much_is_named(drawn):
    schedule, pp, chunks, samples, sizes = drawn
    placement = placement_of(schedule, pp, chunks)
    actions = generate(schedule, pp, chunks, samples, sizes)
    most = live_samples(actions, placement)

    assert faults(actions, placement, samples, most_samples=most) == ()
    found = faults(actions, placement, samples, most_samples=(most[0] - 1, *most[1:]))
    assert [fault.rule for fault in found] == ["memory"]
    assert "stage 0" in found[0].message


@settings(max_examples=60, deadline=None)
@given(generated())
def test_the_fullest_moment_of_a_rank_is_that_of_its_list(drawn):
    schedule, pp, chunks, samples, sizes = drawn
    alive = live_samples(generate(schedule, pp, chunks, samples, sizes), placement_of(schedule, pp, chunks))
    placement = placement_of(schedule, pp, chunks)

    for rank, listed in enumerate(samples_in_flight(schedule, pp, chunks, samples, sizes)):
        for chunk, most in enumerate(listed):
            assert most <= alive[placement.stage(rank, chunk)] <= samples
        if chunks == 1:
            assert listed == (alive[rank],)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("2:forward c0 [0,1)", "no such stage"),
        ("0:forward c1 [0,1)", "no such stage"),
        ("0:forward c0 [0,9)", "samples must be in"),
        ("0:forward c0 [1,1)", "at least one"),
        ("0:send_forward c0 [0,1)", "the peer of a message"),
        ("0:send_forward c0 [0,1) -> 0", "the peer of a message"),
        ("0:forward c0 [0,1) -> 1", "only messages have a peer"),
    ],
)
def test_what_belongs_nowhere_is_refused(line, why):
    (found,) = faults(lines(line), TWO, 4)

    assert found.rule == "known" and why in found.message and found.actions == lines(line)


def test_an_empty_schedule_computes_nothing():
    rules = {fault.rule for fault in faults((), TWO, 4)}

    assert rules == {"covered", "fed", "sent", "ended"}


def test_gradients_reduced_too_early_and_steps_taken_too_early():
    actions = list(generate("1f1b", 1, 1, 2, 1))
    assert [action.kind for action in actions] == ["forward", "backward", "forward", "backward", "reduce", "optimizer"]
    early = [*actions[:2], actions[4], *actions[2:4], actions[5]]
    stepped = [*actions[:4], actions[5], actions[4]]

    (found,) = faults(early, Placement(pp=1), 2)
    assert [action.kind for action in found.actions] == ["reduce", "backward"]
    (found,) = faults(stepped, Placement(pp=1), 2)
    assert [action.kind for action in found.actions] == ["optimizer", "reduce"]


def test_a_backward_has_the_range_of_its_forward():
    actions = [action for action in generate("1f1b", 1, 1, 4, 2) if action.lo != 2 or action.kind != "backward"]
    halves = [Action(rank=0, chunk=0, kind="backward", lo=lo, hi=lo + 1) for lo in (2, 3)]
    found = faults([*actions[:-2], *halves, *actions[-2:]], Placement(pp=1), 4)

    assert {fault.rule for fault in found} == {"ordered"}
    assert all("one range" in fault.message for fault in found)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("best", 2, 1, 4, 1), "no schedule"),
        (("1f1b", 2, 2, 4, 1), "pipeline.chunks = 2"),
        (("zb-v", 2, 3, 4, 1), "pipeline.chunks = 3"),
        (("interleaved", 2, 1, 4, 1), "needs 2 or more"),
        (("interleaved", 4, 2, 6, 2), "3 micro-batches, schedule interleaved on 4 ranks needs 4"),
        (("none", 2, 1, 4, 1), "schedule none"),
        (("1f1b", 0, 1, 4, 1), "layout.pp = 0"),
        (("1f1b", 2, 1, 4, (1, 2, 1)), "3 micro-batch sizes for 2 stages"),
        (("1f1b", 2, 1, 4, (2, 3)), "no integer factor"),
        (("1f1b", 2, 1, 4, 0), "at least 1"),
        (("1f1b", 2, 1, 0, 1), "at least 1"),
    ],
)
def test_what_a_schedule_cannot_work_with_is_refused(arguments, why):
    with pytest.raises(RuleBroken, match=why) as met:
        generate(*arguments)
    assert met.value.fix
