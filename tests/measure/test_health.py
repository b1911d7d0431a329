import msgspec
import pytest

from fullstride.measure.collect import measurement_of
from fullstride.measure.health import communication_efficiency, memory_volatility, throughput_stability, worsened
from fullstride.measure.measurement import MemoryUse, Round, Share


def test_throughput_stability():
    steady = throughput_stability([1.0] * 1000)
    assert steady.good
    assert steady.note == ""
    shaky = throughput_stability([0.9, 1.1])
    assert shaky.value == pytest.approx(0.1)
    assert shaky.good is False
    assert shaky.note == "needs 1000 steps, 2 were run"
    assert throughput_stability([1.0]).value is None


def test_memory_volatility_is_that_of_the_worst_rank():
    figure = memory_volatility({0: [100] * 1000, 1: [90, 110] * 500})
    assert figure.value == pytest.approx(0.1)
    assert figure.good is False
    assert memory_volatility({}).good is None


def test_resident_memory_is_shown_and_vetoes_nothing(plan, cluster):
    device = msgspec.structs.replace(cluster.device, kind="cpu")
    group = msgspec.structs.replace(cluster.groups[0], device=device)
    host = msgspec.structs.replace(cluster, groups=(group,))

    def run(where, wander):
        reserved = {0: [100, 100 + wander] * 500}
        return measured(plan, where, 0.01, reserved_bytes=reserved)

    assert "memory volatility is 16.7%" in worsened(run(cluster, 0), run(cluster, 40)).replace(" %", "%")
    assert worsened(run(host, 0), run(host, 40)) == ""
    figure = next(f for f in run(host, 40).health if f.name == "memory volatility")
    assert figure.value == pytest.approx(1 / 6)
    assert figure.good is None
    assert "not judged" in figure.note


def test_communication_efficiency():
    shares = [Share(name="forward", seconds=1.0), Share(name="exposed_comm", seconds=0.3), Share(name="rest", seconds=0.1)]
    figure = communication_efficiency(shares, 2)
    assert figure.value == pytest.approx(0.75)
    assert figure.good is False, "the limit itself is not over the limit"
    assert "300.00 ms exposed" in figure.note
    assert communication_efficiency(shares, 1).value is None
    assert communication_efficiency([], 2).value is None
    assert communication_efficiency(shares[:1], 2).value is None


def rounds(label, wobble):
    return [Round(index=i, label=label, step_seconds=(1 - wobble, 1 + wobble * (1 + i / 100))) for i in range(4)]


def measured(plan, cluster, wobble, shares=(), **more):
    return measurement_of(
        plan=plan,
        cluster=cluster,
        rounds=rounds("x", wobble),
        memory=MemoryUse(peak_allocated_bytes=1, peak_reserved_bytes=1, static_bytes=1),
        warmup_steps=1,
        form="short",
        started="now",
        shares=shares,
        **more,
    )


def test_a_figure_that_got_worse_vetoes_and_noise_does_not(plan, cluster):
    calm, shaky = measured(plan, cluster, 0.01), measured(plan, cluster, 0.2)
    assert "throughput stability" in worsened(calm, shaky)
    assert worsened(shaky, calm) == ""
    assert worsened(shaky, shaky) == ""
    one_round = msgspec.structs.replace(shaky, rounds=shaky.rounds[:1])
    assert worsened(calm, one_round) == "", "one round has no interval"


def test_communication_efficiency_never_vetoes_while_exposed_milliseconds_did_not_grow(plan, cluster):
    def with_exposed(exposed, rest):
        seconds = {"forward": 1 - exposed - rest, "exposed_comm": exposed, "rest": rest}
        return measured(plan, cluster, 0.01, [Share(name=name, seconds=value) for name, value in seconds.items()])

    assert worsened(with_exposed(0.10, 0.01), with_exposed(0.05, 0.05)) == ""
    assert "communication efficiency" in worsened(with_exposed(0.04, 0.001), with_exposed(0.05, 0.05))
