import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullstride.measure.measurement import Round
from fullstride.measure.stats import (
    clipped,
    half_width,
    interval_of_mean,
    length,
    mean_without_extremes,
    ratio_interval,
    student_quantile,
    trimmed_mean,
    union,
    unpaired_ratio,
    variation,
    without,
)

STRETCHES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [
        (0.99, 1, 63.657),
        (0.99, 2, 9.925),
        (0.99, 3, 5.841),
        (0.99, 5, 4.032),
        (0.95, 10, 2.228),
        (0.99, 30, 2.750),
        (0.95, 4, 2.776),
    ],
)
def test_student_quantiles_are_those_of_the_tables(confidence, freedom, quantile):
    assert student_quantile(confidence, freedom) == pytest.approx(quantile, abs=1e-3)


def test_trimmed_mean_drops_the_extremes():
    assert trimmed_mean([1, 1, 1, 1, 100]) == 1
    assert trimmed_mean([2.0, 4.0]) == 3.0
    assert trimmed_mean([*[1.0] * 18, 50.0, 0.0]) == 1.0
    assert mean_without_extremes([1.0, 2.0, 9.0]) == 2.0
    assert mean_without_extremes([1.0, 3.0]) == 2.0


def test_variation():
    assert variation([1.0]) == 0.0
    assert variation([9.0, 11.0]) == pytest.approx(0.1)


def test_interval_of_mean_covers_as_often_as_it_says():
    generator = random.Random(5)
    covered = sum(
        interval.low <= 10 <= interval.high
        for interval in (interval_of_mean([generator.gauss(10, 2) for _ in range(4)], 0.9) for _ in range(2000))
    )
    assert 0.88 < covered / 2000 < 0.92


def alternating(times, base="baseline"):
    return [Round(index=i, label=base if i % 2 == 0 else "candidate", step_seconds=(t,)) for i, t in enumerate(times)]


def test_a_linear_drift_does_not_look_like_a_gain():
    drifting = ratio_interval(alternating([math.exp(0.02 * i) for i in range(6)]), "baseline")
    assert drifting.value == pytest.approx(1.0)
    assert half_width(drifting) < 1e-9
    faster = ratio_interval(alternating([math.exp(0.02 * i) / (1.1 if i % 2 else 1) for i in range(6)]), "baseline")
    assert faster.value == pytest.approx(1.1)


def test_three_rounds_compare_the_middle_with_its_neighbours():
    interval = ratio_interval(alternating([1.0, 0.9, 1.02]), "baseline")
    assert interval.value == pytest.approx(math.sqrt(1.02) / 0.9)
    assert interval.low < 1 < interval.high


def test_too_few_rounds_say_nothing_and_void_rounds_do_not_count():
    two = alternating([1.0, 0.5])
    assert ratio_interval(two, "baseline").low < 0.01
    void = [*alternating([1.0, 0.9, 1.0, 0.9]), Round(index=4, label="candidate", step_seconds=(0.1,), void="not finite")]
    assert ratio_interval(void, "baseline").value == pytest.approx(1 / 0.9)
    assert ratio_interval([two[0]], "baseline").value == 1.0


def test_ratio_interval_covers_the_truth_as_often_as_it_says():
    generator = random.Random(3)
    truth, covered = 1.05, 0
    for _ in range(1000):
        times = [generator.gauss(1, 0.01) * 1.001**i / (truth if i % 2 else 1) for i in range(7)]
        interval = ratio_interval(alternating(times), "baseline", 0.9)
        covered += interval.low <= truth <= interval.high
    assert 870 < covered < 930


def test_unpaired_ratio():
    assert unpaired_ratio([2.0, 2.0], [1.0, 1.0]).value == pytest.approx(2.0)
    assert unpaired_ratio([2.0], [1.0]).low < 0.1
    noisy = unpaired_ratio([2.0, 2.1, 1.9], [1.0, 1.1, 0.9])
    assert noisy.low < noisy.value < noisy.high


@given(STRETCHES, STRETCHES)
def test_unions_and_cuts_agree_with_sets_of_points(first, second):
    def points(stretches):
        return {p for start, end in stretches for p in range(start, end)}

    a, b = union(first), union(second)
    assert points(a) == points(first)
    assert length(a) == len(points(first))
    assert all(x[1] < y[0] for x, y in itertools.pairwise(a))
    assert points(without(a, b)) == points(first) - points(second)
    assert length(without(a, b)) == len(points(first) - points(second))
    assert points(clipped(first, (10, 20))) == points(first) & set(range(10, 20))


def test_stalls_do_not_widen_the_interval_without_end():
    generator = random.Random(11)
    quiet = [generator.gauss(1, 0.01) / (1.05 if i % 2 else 1) for i in range(12)]
    for place in (4, 5):
        stalled = [t * (3 if i == place else 1) for i, t in enumerate(quiet)]
        interval = ratio_interval(alternating(stalled), "baseline")
        assert interval.low < 1.05 < interval.high
        assert half_width(interval) < 2 * half_width(ratio_interval(alternating(quiet), "baseline"))
        fewer = [t * (3 if i == place else 1) for i, t in enumerate(quiet[:10])]
        assert half_width(ratio_interval(alternating(fewer), "baseline")) > 0.5, "of five alternations nothing is dropped"
    fast = [t * (0.3 if i == 4 else 1) for i, t in enumerate(quiet)]
    assert half_width(ratio_interval(alternating(fast), "baseline")) < 0.05, "fast ones are dropped just so"


@pytest.mark.parametrize("stalls", [0.0, 0.06])
def test_with_outliers_dropped_the_interval_covers_as_often_as_it_says(stalls):
    generator = random.Random(7)
    truth, covered = 1.05, 0
    for _ in range(1000):
        times = [
            max(0.5, generator.gauss(1, 0.05)) * (2 if generator.random() < stalls else 1) / (truth if i % 2 else 1)
            for i in range(16)
        ]
        interval = ratio_interval(alternating(times), "baseline", 0.99)
        covered += interval.low <= truth <= interval.high
    assert covered >= 980
