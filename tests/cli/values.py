"""Small values that the tests of the verbs share."""

from fullstride.events import StepEnd
from fullstride.measure.measurement import Comparison, Interval, Measurement, MemoryUse, Round
from fullstride.plan.plan import Batch, Layout, ModelRef, Plan, Recipe, Shard, Workload


def make_plan(**changes):
    parts = {
        "model": ModelRef(source="tiny"),
        "workload": Workload(sequence_length=64, samples_per_step=4),
        "recipe": Recipe(steps=10),
        "layout": Layout(dp_replicate=2),
        "shard": Shard(carrier="ddp"),
        "batch": Batch(micro_batch=2),
    }
    return Plan(**{**parts, **changes})


def make_step(step, loss=3.0, start=0):
    return StepEnd(time_ns=start + 10**9, start_ns=start, step=step, samples=4, tokens=256, loss=loss, grad_norm=1.0, lr=1e-3)


def make_measurement(seconds=1.0):
    interval = Interval(value=seconds, low=seconds * 0.99, high=seconds * 1.01, confidence=0.99)
    return Measurement(
        plan_hash="p",
        work_hash="w",
        cluster="c",
        device="cpu",
        versions={"torch": "2"},
        form="short",
        started="2026-01-01T00:00:00+00:00",
        world_size=2,
        warmup_steps=2,
        rounds=tuple(Round(index=i, label="a", step_seconds=(seconds, seconds * 1.001, seconds)) for i in range(3)),
        step_seconds=interval,
        samples_per_step=4,
        tokens_per_step=256,
        tokens_per_second=256 / seconds,
        memory=MemoryUse(peak_allocated_bytes=10, peak_reserved_bytes=20, static_bytes=5),
    )


def make_comparison():
    return Comparison(
        base=make_measurement(1.0),
        other=make_measurement(0.8),
        ratio=Interval(value=1.25, low=1.2, high=1.3, confidence=0.99),
        interleaved=True,
        alternations=3,
        threshold=1.005,
        verdict="better",
    )
