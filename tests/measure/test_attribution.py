import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullstride.events import Span, StepEnd
from fullstride.measure.attribution import attribute, fit_to_step
from fullstride.measure.measurement import Share


def step(start, end, number=0):
    return StepEnd(time_ns=end, step=number, start_ns=start, samples=1, tokens=1, loss=1.0, grad_norm=1.0, lr=1.0)


def span(phase, start, end, clock="device", kernel=""):
    return Span(time_ns=end, step=0, phase=phase, start_ns=start, end_ns=end, clock=clock, kernel=kernel)


def seconds(shares):
    return {share.name: round(share.seconds * 1e9) for share in shares}


def test_each_kind_keeps_what_those_before_it_left():
    spans = [
        span("data", 0, 10, "host"),
        span("forward", 10, 30),
        span("backward", 30, 50),
        span("comm", 40, 60, kernel="collective"),
        span("optimizer", 70, 80),
        span("forward", 5, 68, "host"),
    ]
    found = seconds(attribute(spans, [step(0, 100)]))
    assert found == {
        "data": 10, "forward": 20, "backward": 20, "exposed_comm": 10, "optimizer": 10, "host_gap": 8, "rest": 22,
    }  # fmt: skip


def test_on_a_cpu_the_hosts_phases_are_the_compute():
    spans = [span("forward", 0, 50, "host"), span("backward", 50, 90, "host"), span("comm", 80, 96, "host")]
    assert seconds(attribute(spans, [step(0, 100)])) == {"forward": 50, "backward": 40, "exposed_comm": 6, "rest": 4}


def test_the_mean_over_steps_and_what_nobody_explains():
    spans = [span("forward", 0, 10), span("forward", 100, 130)]
    assert seconds(attribute(spans, [step(0, 100), step(100, 200, 1)])) == {"forward": 20, "rest": 80}
    assert seconds(attribute([span("comm", 0, 10)], [step(0, 100)])) == {"unattributed": 100}
    assert attribute([], []) == ()


PHASES = st.sampled_from(["data", "forward", "backward", "comm", "optimizer", "offload", "h2d", "checkpoint"])


@given(st.lists(st.tuples(PHASES, st.integers(0, 300), st.integers(0, 60), st.sampled_from(["host", "device"])), max_size=12))
def test_shares_sum_to_the_step(drawn):
    spans = [span(phase, start, start + size, clock) for phase, start, size, clock in drawn]
    shares = attribute(spans, [step(20, 120), step(120, 260, 1)])
    assert sum(share.seconds for share in shares) == pytest.approx(120e-9)


def test_a_profiled_step_is_brought_to_the_timed_length():
    shares = [Share(name="forward", seconds=0.8), Share(name="host_gap", seconds=0.3), Share(name="rest", seconds=0.1)]
    fitted = {s.name: s.seconds for s in fit_to_step(shares, 1.0)}
    assert fitted["forward"] == 0.8
    assert fitted["host_gap"] == pytest.approx(0.1)
    assert sum(fitted.values()) == pytest.approx(1.0)
    squeezed = {s.name: s.seconds for s in fit_to_step(shares, 0.75)}
    assert squeezed == {"forward": pytest.approx(0.75)}
    assert [s.name for s in fit_to_step(shares, 0.5)] == ["unattributed"]
    here = {s.name: s.seconds for s in fit_to_step(shares, 0.9, on_host=True)}
    assert here == {s.name: pytest.approx(s.seconds * 0.9 / 1.2) for s in shares}
    assert [s.name for s in fit_to_step(shares, 0.75, on_host=True)] == ["unattributed"]
    longer = {s.name: s.seconds for s in fit_to_step(shares, 1.5)}
    assert longer["unattributed"] == pytest.approx(0.3)
    assert fit_to_step([], 1.0) == ()
