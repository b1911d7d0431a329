import math
import statistics

import pytest

from fullstride.measure.measurement import Interval, Round
from fullstride.measure.protocol import FULL, Noise, Protocol, Settings, Solo, Stop, Visit, is_steady, judge, not_finite, strays
from fullstride.measure.stats import half_width


def play(protocol, seconds_of, *, visit_seconds=1.0, now=0.0, void=""):
    """Run the protocol against made-up step times; returns the state, the verdict and the labels that were visited."""
    labels = []
    while True:
        action = protocol.next(now)
        if isinstance(action, Stop):
            return protocol, action, labels
        assert len(labels) < 100
        labels.append(action.label)
        seconds = seconds_of(action.index, action.label)
        protocol = protocol.after(Round(index=action.index, label=action.label, step_seconds=seconds, void=void), visit_seconds)
        now += visit_seconds


def steps(ratio, wobble=0.0):
    def seconds_of(index, label):
        base = 1.0 if label == "baseline" else 1.0 / ratio
        return tuple(base * (1 + wobble * math.sin(7 * index + k)) for k in range(5))

    return seconds_of


def test_a_clear_gain_takes_three_alternations():
    protocol, stop, labels = play(Protocol(settings=Settings(), deadline=1e9), steps(1.1, 0.001))
    assert stop.verdict == "better"
    assert labels == ["baseline", "candidate"] * 3
    assert protocol.alternations == 3
    assert protocol.ratio.low > 1.005


def test_a_screen_without_gain_ends_after_a_b_a():
    _, stop, labels = play(Protocol(settings=Settings(), deadline=1e9), steps(0.9))
    assert labels == ["baseline", "candidate", "baseline"]
    assert stop.verdict == "undetermined"
    assert "no gain" in stop.reason


def test_without_a_screen_a_loss_is_called_worse():
    _, stop, labels = play(Protocol(settings=Settings(screen=False), deadline=1e9), steps(0.9, 0.001))
    assert stop.verdict == "worse"
    assert len(labels) == 6


def test_noise_is_played_to_the_last_alternation():
    settings = Settings(screen=False, max_alternations=5)
    _, stop, labels = play(Protocol(settings=settings, deadline=1e9), steps(1.01, 0.05))
    assert stop.verdict == "undetermined"
    assert len(labels) == 10


def test_no_visit_is_begun_that_cannot_bring_a_claim_before_the_deadline():
    _, stop, labels = play(Protocol(settings=Settings(screen=False), deadline=5.5), steps(1.1, 0.001))
    assert stop.verdict == "undetermined"
    assert "time" in stop.reason
    assert len(labels) < 6
    _, stop, labels = play(Protocol(settings=Settings(screen=False), deadline=6.5), steps(1.1, 0.001))
    assert stop.verdict == "better"


def test_void_rounds_are_repeated_and_then_given_up():
    _, stop, labels = play(Protocol(settings=Settings(), deadline=1e9), steps(1.2), void="the loss of step 3 is nan")
    assert stop.verdict == "void"
    assert "nan" in stop.reason
    assert labels == ["baseline"] * 3


def test_the_full_form_is_the_articles():
    protocol, _, labels = play(Protocol(settings=FULL, deadline=0.0), steps(1.1, 0.001))
    visit = Protocol(settings=FULL, deadline=0.0).next(0.0)
    assert isinstance(visit, Visit)
    assert (visit.warmup_steps, visit.round_steps) == (300, 1000)
    assert labels == ["baseline", "candidate"] * 3, "the full form ignores the deadline"
    assert protocol.alternations == 3


def test_solo_stops_when_narrow_or_out_of_time_or_done():
    def rounds_of(solo, wobble, now=0.0):
        while isinstance(action := solo.next(now), Visit):
            times = steps(1.0, wobble)(action.index, "baseline")
            solo = solo.after(Round(index=action.index, label="plan", step_seconds=times))
            now += 1
        return len(solo.rounds), action.reason

    assert rounds_of(Solo(settings=Settings(), deadline=1e9), 0.0)[0] == 3
    assert rounds_of(Solo(settings=Settings(), deadline=1e9), 0.5)[0] == 10
    number, reason = rounds_of(Solo(settings=Settings(), deadline=1.5), 0.5)
    assert number == 2
    assert "time ended" in reason
    assert rounds_of(Solo(settings=FULL, deadline=0.0), 0.5)[0] == 3


@pytest.mark.parametrize(
    ("low", "high", "alternations", "verdict"),
    [
        (1.01, 1.2, 3, "better"),
        (1.01, 1.2, 2, "undetermined"),
        (1.004, 1.2, 3, "undetermined"),
        (0.8, 0.9, 3, "worse"),
        (0.99, 1.004, 3, "no difference"),
    ],
)
def test_judge(low, high, alternations, verdict):
    interval = Interval(value=(low + high) / 2, low=low, high=high, confidence=0.99)
    assert judge(interval, alternations, 0.005)[0] == verdict


def test_steadiness():
    assert not is_steady([])
    assert not is_steady([9.0])
    assert not is_steady([9.0, 1.0])
    assert is_steady([9.0, 1.0, 1.05])
    assert is_steady([1.02], known_seconds=1.0)
    assert not is_steady([1.5], known_seconds=1.0)


def test_numbers_that_are_wrong():
    assert not_finite([1.0, 2.0], [1.0]) == ""
    assert "step 1 is nan" in not_finite([1.0, math.nan], [1.0])
    assert "gradient norm of step 0 is inf" in not_finite([1.0], [math.inf])
    assert strays([5.0, 4.0], [1.0], [5.02, 4.01], [1.01]) == ""
    assert "loss of step 1" in strays([5.0, 4.0], [1.0], [5.0, 4.03], [1.0])
    assert "gradient norm of step 0" in strays([5.0], [1.0], [5.0], [1.03])
    assert strays([5.0] * 6, [], [*[5.0] * 5, 9.0], []) == "", "only the first five steps are on the same footing"


"""A/A and A/B by simulation: steps with a drift, a slow wander, outliers, and a level that differs between builds."""


def machine(seed, ratio, *, step_noise=0.01, build_noise=0.001, steps_of_round=20):
    import random

    generator = random.Random(seed)
    drift = generator.uniform(-0.002, 0.002)
    wander = 0.0

    def seconds_of(index, label):
        nonlocal wander
        wander = 0.7 * wander + generator.gauss(0, 0.0015)
        level = (1 + drift * index + wander + generator.gauss(0, build_noise)) / (1 if label == "baseline" else ratio)
        times, own = [], 0.0
        for _ in range(steps_of_round):
            own = 0.5 * own + generator.gauss(0, step_noise * math.sqrt(1 - 0.25))
            outlier = generator.expovariate(5) if generator.random() < 0.02 else 0.0
            times.append(level * (1 + own + outlier))
        return tuple(times)

    return seconds_of


@pytest.mark.parametrize("screen", [True, False])
def test_a_against_a_is_no_gain_in_at_least_95_of_100(screen):
    calls = 0
    for seed in range(600):
        protocol = Protocol(settings=Settings(screen=screen), deadline=1e9)
        calls += play(protocol, machine(seed, 1.0))[1].verdict == "better"
    assert calls <= 0.05 * 600, f"{calls} of 600 A/A runs called a gain"


def test_three_percent_at_one_percent_noise_is_found():
    verdicts = [play(Protocol(settings=Settings(), deadline=1e9), machine(seed, 1.03))[1].verdict for seed in range(200)]
    assert verdicts.count("better") >= 0.8 * 200, {v: verdicts.count(v) for v in set(verdicts)}


"""Two CPU cores: rounds of two steps that vary by 8 % from round to round, one in ten a quarter slower."""

SHORT = {"round_steps": 2, "max_alternations": 5, "promising_alternations": 16}


def two_cores(seed, ratio):
    import random

    generator = random.Random(seed)

    def seconds_of(index, label):
        level = max(0.5, 1 + generator.gauss(0, 0.08)) * (1.25 if generator.random() < 0.1 else 1.0)
        level /= 1.0 if label == "baseline" else ratio
        return tuple(level * (1 + generator.gauss(0, 0.03)) for _ in range(2))

    return seconds_of


def noise_run(seconds_of, *, deadline=18.0, void=lambda index: ""):
    """An A/A run whose rounds take a second of the driver's clock each; where it built anew."""
    state, now, builds = Noise(settings=Settings(round_steps=2), deadline=deadline), 0.0, []
    while isinstance(action := state.next(now), Visit):
        builds += [len(state.rounds)] if state.wants_a_new_build else []
        times, now = seconds_of(action.index, "baseline"), now + 1
        state = state.after(Round(index=action.index, label="baseline", step_seconds=times, void=void(action.index)), 1.0)
    return state, action, builds


def test_the_noise_of_a_quiet_machine_is_known_after_six_rounds():
    state, stop, builds = noise_run(steps(1.0, 0.001))
    assert len(state.rounds) == 6
    assert half_width(state.ratio) < 0.02
    assert builds == [3], "over two builds"
    assert "half-width" in stop.reason
    late, stop, _ = noise_run(steps(1.0, 0.5), deadline=0.0)
    assert len(late.rounds) == 6, "fewer say nothing"
    assert "time ended" in stop.reason


def test_the_noise_of_a_restless_machine_takes_its_share_of_time_and_gets_narrower():
    widths = []
    for seed in range(20):
        state, stop, builds = noise_run(two_cores(seed, 1.0))
        assert len(state.rounds) == 18
        assert [r.label for r in state.sides] == ["a", "b"] * 9
        assert builds == [3, 6, 12]
        assert "time ended" in stop.reason
        short = noise_run(two_cores(seed, 1.0), deadline=0.0)[0]
        widths.append((half_width(state.ratio), half_width(short.ratio)))
    assert statistics.median(long for long, _ in widths) < 0.6 * statistics.median(short for _, short in widths)


def test_void_rounds_of_the_noise_run_are_repeated_and_then_given_up():
    state, stop, _ = noise_run(steps(1.0, 0.001), void=lambda index: "recompiled" if index == 2 else "")
    assert len(state.rounds) == 7
    assert [r.label for r in state.sides] == ["a", "b"] * 3
    assert stop.verdict == "undetermined"
    state, stop, _ = noise_run(steps(1.0, 0.001), void=lambda index: "recompiled")
    assert stop.verdict == "void"
    assert "recompiled" in stop.reason


def test_only_what_is_promising_is_played_longer():
    settings = Settings(screen=False, max_alternations=4, promising_alternations=9, threshold=0.02)
    wild = [0.3, -0.3, -0.3, 0.3] * 6
    for ratio, alternations in ((1.05, 9), (1.0, 4)):
        state, stop, _ = play(
            Protocol(settings=settings, deadline=1e9),
            lambda index, label, r=ratio: ((1 + wild[index]) / (1 if label == "baseline" else r),) * 2,
        )
        assert stop.verdict == "undetermined"
        assert (state.alternations, state.ratio.value > 1.02) == (alternations, alternations == 9)


@pytest.mark.parametrize(("ratio", "least", "most"), [(1.5, 90, 100), (1.0, 0, 5)])
def test_two_cores_find_a_large_gain_and_none_where_there_is_none(ratio, least, most):
    found = 0
    for seed in range(400):
        noise = half_width(noise_run(two_cores(seed + 10_000, 1.0))[0].ratio)
        settings = Settings(threshold=max(0.005, noise), **SHORT)
        found += play(Protocol(settings=settings, deadline=1e9), two_cores(seed, ratio))[1].verdict == "better"
    assert least <= found / 4 <= most


@pytest.mark.parametrize("make", [machine, two_cores])
def test_going_on_with_what_is_promising_makes_no_gain_of_nothing(make):
    """Without the machine's noise in the threshold, which is on the side of caution."""
    settings = Settings(max_alternations=8, promising_alternations=24)
    calls = sum(play(Protocol(settings=settings, deadline=1e9), make(seed, 1.0))[1].verdict == "better" for seed in range(400))
    assert calls <= 0.05 * 400, f"{calls} of 400 A/A runs called a gain"


def test_a_screen_asks_for_no_more_than_a_tenth_on_a_restless_machine():
    for ratio, number in ((1.2, 10), (1.05, 3)):
        settings = Settings(threshold=0.5, max_alternations=5)
        _, _, labels = play(Protocol(settings=settings, deadline=1e9), steps(ratio, 0.0001))
        assert len(labels) == min(number, 6), "what is narrow and short of the threshold is decided"


def test_a_gain_is_measured_on_for_its_interval_as_far_as_the_time_goes():
    settings = Settings(screen=False, better_alternations=6)
    protocol, stop, _ = play(Protocol(settings=settings, deadline=1e9), steps(1.1, 0.001))
    assert (stop.verdict, protocol.alternations) == ("better", 6)
    protocol, stop, _ = play(Protocol(settings=settings, deadline=8.5), steps(1.1, 0.001))
    assert (stop.verdict, protocol.alternations) == ("better", 4)
    protocol, stop, _ = play(Protocol(settings=settings, deadline=1e9), steps(0.9, 0.001))
    assert (stop.verdict, protocol.alternations) == ("worse", 3)
