from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fullstride.errors import RuleBroken
from fullstride.plan.schedule.action import Action
from fullstride.plan.schedule.bubble import bubble_share
from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.inflight import in_flight, samples_in_flight
from fullstride.plan.schedule.placement import placement_of
from fullstride.plan.simulate import Durations, StageDurations, simulate, simulate_schedule, uniform_durations

NEAR = pytest.approx
ALL = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("bfs", 1), ("bfs", 3), ("zb-h1", 1), ("zb-v", 2)]
RANKS, MICRO = st.integers(1, 6), st.integers(1, 24)


def run(schedule, pp, chunks, num, *, record=False, **seconds):
    return simulate_schedule(schedule, pp, chunks, num, 1, uniform_durations(pp * chunks, **seconds), record=record)


@settings(max_examples=60, deadline=None)
@given(pp=RANKS, num=MICRO)
def test_gpipe_and_1f1b_have_the_same_bubble(pp, num):
    wanted = NEAR((pp - 1) / (num + pp - 1))

    assert run("gpipe", pp, 1, num).bubble_share == wanted
    assert run("1f1b", pp, 1, num).bubble_share == wanted


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(2, 5), chunks=st.integers(2, 4), rounds=st.integers(1, 5))
def test_interleaving_and_breadth_first_divide_it_by_the_chunks(pp, chunks, rounds):
    num = pp * rounds
    wanted = NEAR((pp - 1) / (chunks * num + pp - 1))

    assert run("interleaved", pp, chunks, num).bubble_share == wanted
    assert run("bfs", pp, chunks, num).bubble_share == wanted


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(2, 6), more=st.integers(0, 20))
def test_zb_h1_idles_a_third_of_1f1b_and_zb_v_not_at_all(pp, more):
    num = 2 * pp - 1 + more
    plain, first, second = run("1f1b", pp, 1, num), run("zb-h1", pp, 1, num), run("zb-v", pp, 2, num)

    def idle(timeline):
        return timeline.bubble_share * timeline.span_seconds

    assert idle(first) == NEAR(idle(plain) / 3)
    assert second.own_bubble_share == NEAR(0, abs=1e-12)
    assert second.bubble_share == NEAR((pp - 1) / (6 * num + pp - 1))  # ranks start and end one after the other


@settings(max_examples=150, deadline=None)
@given(
    which=st.sampled_from(ALL),
    pp=RANKS,
    num=MICRO,
    forward=st.sampled_from([1.0, 2.0]),
    back=st.sampled_from([1.0, 1.5, 2.0]),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_closed_forms_of_the_bubble_agree_with_the_simulator(which, pp, num, forward, back, weight):
    schedule, chunks = which
    if schedule == "interleaved" and num < pp:
        return
    timeline = run(schedule, pp, chunks, num, forward=forward, input_grad=back, weight_grad=weight)
    whole = bubble_share(schedule, pp, chunks, num, forward, back, weight)
    own = bubble_share(schedule, pp, chunks, num, forward, back, weight, synchronised=False)

    if whole is not None:
        assert timeline.bubble_share == NEAR(whole, abs=1e-9)
    if own is not None and forward == back == weight:
        assert timeline.own_bubble_share == NEAR(own, abs=1e-9)


def test_no_closed_form_is_claimed_where_none_is_exact():
    assert bubble_share("zb-h1", 4, 1, 8, 1.0, 1.0, 1.5) is None
    assert bubble_share("zb-v", 4, 2, 6) is None
    assert bubble_share("interleaved", 4, 2, 6) is None


@settings(max_examples=150, deadline=None)
@given(which=st.sampled_from(ALL), pp=RANKS, num=MICRO)
def test_closed_forms_in_flight_agree_with_the_lists(which, pp, num):
    schedule, chunks = which
    if schedule == "interleaved" and num < pp:
        return
    timeline = run(schedule, pp, chunks, num)
    listed = samples_in_flight(schedule, pp, chunks, num, (1,) * (pp * chunks))

    for rank in range(pp):
        assert timeline.ranks[rank].peak_samples == listed[rank] == in_flight(schedule, pp, chunks, num, rank)
        assert timeline.ranks[rank].peak_bytes == sum(listed[rank])


@given(pp=st.integers(1, 8), num=MICRO, rank=st.integers(0, 7))
def test_1f1b_holds_as_many_as_stages_follow(pp, num, rank):
    assert in_flight("1f1b", pp, 1, num, rank % pp) == (min(num, pp - rank % pp),)


@given(pp=st.integers(2, 8), chunks=st.integers(2, 5), rounds=st.integers(2, 5))
def test_interleaving_multiplies_the_first_ranks_activations(pp, chunks, rounds):
    alive = sum(in_flight("interleaved", pp, chunks, pp * rounds, 0)) / chunks

    assert alive == NEAR(pp * (1 + (pp - 1) / (pp * chunks)))


def test_an_overlapped_send_costs_only_where_its_message_is_waited_for():
    hidden = run("1f1b", 2, 1, 16, send=0.25)
    durations = replace(uniform_durations(2, send=0.25), overlap=False)
    shown = simulate_schedule("1f1b", 2, 1, 16, 1, durations)

    assert hidden.span_seconds == NEAR(17 * 3 + 8 * 0.5)  # a round trip for every two micro-batches, the depth of rank 0
    assert shown.span_seconds > hidden.span_seconds
    assert run("gpipe", 2, 1, 16, send=0.25).span_seconds == NEAR(17 * 3 + 0.5)


def test_a_link_carries_one_message_at_a_time():
    slow = run("gpipe", 2, 1, 4, send=3.0)

    assert slow.span_seconds == NEAR((1 + 4 * 3) + 1 + 2 + 4 * 3 + 2)  # the last forward waits for four messages


def test_messages_have_a_latency_and_computations_a_fixed_part():
    stage = StageDurations(forward_seconds=1, input_grad_seconds=1, weight_grad_seconds=1, fixed_seconds=0.5)
    timeline = simulate_schedule("gpipe", 2, 1, 4, 4, Durations(stages=(stage, stage), latency_seconds=0.1))

    assert timeline.span_seconds == NEAR(2 * 4.5 + 2 * 8.5 + 2 * 0.1)


def test_reduces_run_beside_computation_and_the_optimizer_waits_for_all():
    stage = StageDurations(
        forward_seconds=1, input_grad_seconds=1, weight_grad_seconds=1, reduce_seconds=2, optimizer_seconds=0.5
    )
    both = Durations(stages=(stage, stage))
    timeline = simulate_schedule("1f1b", 2, 1, 4, 1, both, record=True)
    alone = simulate_schedule("1f1b", 2, 1, 4, 1, replace(both, synchronised=False), record=True)

    assert timeline.step_seconds == NEAR(timeline.span_seconds + 2.5)
    starts = [run.start for run in timeline.runs if run.action.kind == "optimizer"]
    assert starts == [starts[0]] * 2
    assert [run.start for run in alone.runs if run.action.kind == "optimizer"] == NEAR([starts[0], starts[0] - 2])


def test_memory_over_time_ends_where_it_began_and_counts_work_held_and_static_bytes():
    stage = StageDurations(
        forward_seconds=1,
        input_grad_seconds=1,
        weight_grad_seconds=1,
        activation_bytes=10,
        held_bytes=4,
        working_bytes=100,
        static_bytes=1000,
    )
    timeline = simulate_schedule("zb-h1", 2, 1, 6, 1, Durations(stages=(stage, stage)), record=True)

    for rank in timeline.ranks:
        assert rank.memory[-1][1] == NEAR(1000)
        assert [time for time, _ in rank.memory] == sorted(time for time, _ in rank.memory)
        assert rank.peak_bytes == max(size for _, size in rank.memory)
    assert timeline.ranks[0].peak_bytes == NEAR(1000 + 2 * 10 + 100)
    assert timeline.ranks[1].peak_bytes == NEAR(1000 + 10 + 4 + 100)  # one weight gradient is put off


def test_every_computation_is_recorded_once_and_ranks_do_one_thing_at_a_time():
    actions = generate("interleaved", 3, 2, 9, 1)
    timeline = simulate(actions, uniform_durations(6, send=0.1), placement_of("interleaved", 3, 2))
    computing = [one for one in timeline.runs if one.action.kind in ("forward", "backward")]

    assert sorted(one.action.text() for one in computing) == sorted(
        action.text() for action in actions if action.kind in ("forward", "backward")
    )
    for one, two in pairwise(computing):
        assert one.action.rank != two.action.rank or one.end <= two.start


def test_recording_changes_no_figure():
    bare, full = run("zb-v", 3, 2, 7, send=0.1), run("zb-v", 3, 2, 7, send=0.1, record=True)

    assert full.runs and full.waits
    assert bare == replace(full, runs=(), waits=(), ranks=tuple(replace(rank, memory=()) for rank in full.ranks))


def test_a_deadlock_is_an_error_not_a_hang():
    waits = Action(rank=0, chunk=0, kind="recv_backward", lo=0, hi=1, peer=1)

    with pytest.raises(RuleBroken, match=r"recv_backward c0 \[0,1\).*deadlock"):
        simulate([waits], uniform_durations(2), placement_of("1f1b", 2, 1))


def test_durations_must_be_those_of_the_stages():
    with pytest.raises(RuleBroken, match="durations of 3 stages"):
        simulate_schedule("1f1b", 2, 1, 4, 1, uniform_durations(3))


def test_recompute_is_part_of_backward_and_of_the_input_gradient():
    stage = StageDurations(forward_seconds=1, input_grad_seconds=1, weight_grad_seconds=1, recompute_seconds=1)
    durations = Durations(stages=(stage, stage))

    assert simulate_schedule("1f1b", 2, 1, 8, 1, durations).ranks[0].busy_seconds == NEAR(32)
    assert simulate_schedule("zb-h1", 2, 1, 8, 1, durations).ranks[0].busy_seconds == NEAR(32)
