import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullstride.tune.pace import Pace


def test_a_trial_takes_about_an_eighth_of_the_budget():
    pace = Pace(budget_seconds=480, step_seconds=0.3, build_seconds=4.0)
    assert 6 * pace.visit_seconds == pytest.approx(60, rel=0.1)
    assert pace.round_steps > 10
    assert pace.noise_steps == pace.round_steps, "on a machine that builds and steps fast, rounds are alike"
    assert pace.noise_seconds == 96
    assert pace.reserve_seconds < 480 / 6


def test_cheap_steps_make_rounds_at_least_half_as_long_as_builds():
    pace = Pace(budget_seconds=120, step_seconds=0.02, build_seconds=3.0)
    assert pace.round_steps * pace.step_seconds >= 1.4


def test_a_compiled_plan_needs_more_time_at_first():
    pace = Pace(budget_seconds=240, step_seconds=1.0, build_seconds=1.0, compile_seconds=30.0)
    assert pace.screen_seconds(compiled=True) == pace.screen_seconds(compiled=False) + 30


@given(st.floats(30, 7200), st.floats(0.001, 60), st.floats(0.01, 100))
def test_every_pace_allows_a_claim(budget, step, build):
    pace = Pace(budget_seconds=budget, step_seconds=step, build_seconds=build)
    settings = pace.settings(0.01, screen=True, promising_alternations=pace.promising_alternations)
    assert settings.round_steps >= 2
    assert 3 <= settings.max_alternations <= 8
    assert settings.max_alternations <= settings.promising_alternations <= 16
    assert 2 <= pace.noise_settings().round_steps <= settings.round_steps
    assert pace.alternations_in(pace.reserve_seconds * 1.001) == 3
    assert pace.limit_seconds(settings.round_steps) >= 180
