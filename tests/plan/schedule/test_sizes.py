import pytest
from msgspec.structs import replace

from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.plan.schedule.sizes import choose_micro_batches, proportional_micro_batches
from fullstride.plan.simulate import Durations, StageDurations, simulate_schedule

BODY = StageDurations(
    forward_seconds=1, input_grad_seconds=1, weight_grad_seconds=1, fixed_seconds=0.1, activation_bytes=10, working_bytes=5
)
HEAD = replace(BODY, working_bytes=100)
"""Logits: much memory, and only while they are computed."""


def two(**options):
    body = replace(BODY, fixed_seconds=2.0)  # a stage of many small kernels
    return choose_micro_batches("1f1b", 2, 1, 32, Durations(stages=(body, HEAD)), **options)


def test_the_stage_that_is_short_of_memory_gets_the_smaller_micro_batches():
    free = two()
    tight = two(limits=(1000.0, 260.0))

    assert free.best.sizes == (8, 8) and tight.best.sizes == (8, 2)
    assert tight.best.peak_bytes[1] < 260 < 0.75 * free.best.peak_bytes[1]
    assert tight.best.step_seconds < 1.03 * free.best.step_seconds
    assert tight.uniform is not None and tight.uniform.sizes == (2, 2)
    assert tight.best.step_seconds < 0.9 * tight.uniform.step_seconds


def test_all_combinations_are_tried_where_they_are_few_and_the_best_is_the_minimum():
    found = two(limits=(1000.0, 500.0))
    sizes = [1, 2, 4, 8, 16, 32]
    durations = Durations(stages=(replace(BODY, fixed_seconds=2.0), HEAD))
    every = [simulate_schedule("1f1b", 2, 1, 32, (one, other), durations) for one in sizes for other in sizes]
    fit = [
        timeline.step_seconds
        for timeline in every
        if timeline.ranks[0].peak_bytes <= 1000 and timeline.ranks[1].peak_bytes <= 500
    ]

    assert found.exhaustive and found.tried == 36
    assert found.best.step_seconds == pytest.approx(min(fit))


def test_larger_pipelines_are_searched_around_the_best_and_it_says_so():
    durations = Durations(stages=(BODY,) * 7 + (HEAD,))
    found = choose_micro_batches("1f1b", 8, 1, 32, durations, limits=(2000.0,) * 7 + (300.0,), most_tries=120)

    assert not found.exhaustive and found.tried <= 130
    assert found.best.excess_bytes == 0
    assert found.uniform is None or found.best.step_seconds <= found.uniform.step_seconds


def test_durations_may_depend_on_the_sizes():
    def durations(sizes):
        stages = tuple(replace(BODY, forward_seconds=1.0 + 1.0 / size, fixed_seconds=0.0) for size in sizes)
        return Durations(stages=stages)

    found = choose_micro_batches("1f1b", 2, 1, 64, durations, largest=8)

    assert max(found.best.sizes) <= 8
    assert found.best.sizes != (1, 1)


def test_the_rule_of_thumb_is_simulated_beside_it_and_never_better():
    slow = replace(BODY, forward_seconds=4, input_grad_seconds=4, weight_grad_seconds=4)
    found = choose_micro_batches("1f1b", 2, 1, 32, Durations(stages=(BODY, slow)))

    assert proportional_micro_batches(4, (3.0, 12.0)) == (2, 8)
    assert proportional_micro_batches(4, (1.0, 1.0)) == (4, 4)
    assert found.proportional is not None
    assert found.best.step_seconds <= found.proportional.step_seconds


def test_a_schedule_that_needs_more_micro_batches_limits_the_sizes():
    found = choose_micro_batches("interleaved", 2, 2, 8, Durations(stages=(BODY,) * 4))

    assert max(found.best.sizes) <= 4
    with pytest.raises(RuleBroken, match="too few"):
        choose_micro_batches("interleaved", 4, 2, 3, Durations(stages=(BODY,) * 8))


def test_what_fits_nowhere_says_by_how_much():
    with pytest.raises(DoesNotFit, match="exceed the limit by"):
        two(limits=(1000.0, 20.0))
    with pytest.raises(RuleBroken, match="1 memory limits for 2 ranks"):
        two(limits=(1000.0,))
