"""A tuning run with figures as a real one has them, and the ways it can come out."""

import random

import msgspec

from fullstride.cluster.cluster import Cluster, Device, Figure, Host, Link, NodeGroup
from fullstride.measure.measurement import Comparison, Health, Interval, Measurement, MemoryUse, Round, Share
from fullstride.plan.estimate import Estimate, Moment, Row, Term
from fullstride.plan.plan import Batch, Compile, Data, Layout, Loss, ModelRef, Plan, Precision, Recompute, Shard, Workload
from fullstride.rundir import Failure
from fullstride.tune.trial import Ladder, Trial

GIB = 2**30
SHARES = {
    "forward": 0.27,
    "backward": 0.52,
    "optimizer": 0.045,
    "exposed_comm": 0.09,
    "data": 0.03,
    "host_gap": 0.025,
    "rest": 0.02,
}

BASE = Plan(
    model=ModelRef(source="llama3-1b", digest="00ff" * 4),
    workload=Workload(sequence_length=8192, samples_per_step=16),
    layout=Layout(dp_shard=2),
    shard=Shard(carrier="fsdp2", stage=3),
    batch=Batch(micro_batch=2, accumulation=4),
    precision=Precision(cast="autocast", block="bf16", head="bf16"),
)
COMPILED = msgspec.structs.replace(BASE, compile=Compile(mode="block"))
CHUNKED = msgspec.structs.replace(COMPILED, loss=Loss(kind="chunked"))
LARGER = msgspec.structs.replace(CHUNKED, batch=Batch(micro_batch=8, accumulation=1))
THREADED = msgspec.structs.replace(CHUNKED, data=Data(workers=4))
RECOMPUTED = msgspec.structs.replace(CHUNKED, recompute=Recompute(mode="full"))


def interval(value, half, confidence=0.99):
    return Interval(value=value, low=value * (1 - half), high=value * (1 + half), confidence=confidence)


def measurement(plan, seconds, gib, label, *, shares=SHARES, seed=0, void=""):
    draw = random.Random(seed)
    rounds = tuple(
        Round(
            index=place * 2,
            label=label,
            step_seconds=tuple(seconds * draw.lognormvariate(0, 0.008) for _ in range(24)),
            void=void if place == 1 else "",
        )
        for place in range(3)
    )
    figures = (
        Health(name="throughput stability", value=0.008, limit=0.05, good=True, samples=72, note="needs 1,000 steps, had 72"),
        Health(name="memory volatility", value=0.002, limit=0.08, good=True, samples=72),
        Health(name="communication efficiency", value=0.62, limit=0.75, good=False, samples=6),
    )
    return Measurement(
        plan_hash=plan.plan_hash,
        work_hash=plan.work_hash,
        cluster="c0ffee",
        device="NVIDIA H200",
        versions={"torch": "2.11.0", "cuda": "13.0", "nccl": "2.28.9", "fullstride": "0.1.0"},
        form="short",
        started="2026-02-03T10:00:00+00:00",
        world_size=2,
        warmup_steps=5,
        rounds=rounds,
        step_seconds=interval(seconds, 0.003),
        samples_per_step=16,
        tokens_per_step=131072,
        tokens_per_second=131072 / seconds,
        mfu_full=0.49 / seconds,
        mfu_causal=0.43 / seconds,
        health=figures,
        shares=tuple(Share(name=name, seconds=part * seconds) for name, part in shares.items()),
        exposed_comm_seconds=shares.get("exposed_comm", 0.0) * seconds,
        memory=MemoryUse(
            peak_allocated_bytes=int(gib * GIB),
            peak_reserved_bytes=int(gib * 1.06 * GIB),
            static_bytes=int(9.4 * GIB),
            device_used_bytes=int((gib * 1.06 + 1.1) * GIB),
            host_bytes=4 * GIB,
        ),
        losses=(11.76, 11.70, 11.55, 11.31, 11.02),
        grad_norms=(4.1, 3.9, 3.6, 3.1, 2.7),
    )


def estimate(plan, seconds, gib):
    parts = (
        ("weights", 2.3, "fp32, sharded over 2"),
        ("gradients", 2.3, "fp32, sharded over 2"),
        ("optimizer", 4.6, "exp_avg and exp_avg_sq, fp32"),
        ("gathered", 0.9, "two blocks in bf16"),
        ("activations", gib - 14.9, "34 s b h + 5 a s^2 b without the squares: flash attention"),
        ("logits", 3.9, "b s v in fp32"),
        ("temporary", 0.6, "workspace of matrix products"),
        ("buckets", 0.3, "reduce-scatter inputs"),
    )
    there = ("forward_end", "backward")
    rows = [
        Row(name=kind, kind=kind, bytes=int(size * GIB), source=source, confidence="modelled", moments=there)
        for kind, size, source in parts
    ]
    rows.append(Row(name="context", kind="context", bytes=GIB, source="measured once", confidence="assumed", moments=()))
    return Estimate(
        plan_hash=plan.plan_hash,
        rows=tuple(rows),
        terms=(
            Term(
                name="blocks", kind="compute", seconds=seconds, exposed_seconds=seconds, source="table", confidence="modelled"
            ),
        ),
        moments=(Moment(name="load", bytes=5 * GIB), Moment(name="backward", bytes=int(gib * GIB))),
        peak_allocated_bytes=int(gib * GIB),
        peak_device_bytes=int((gib + 2) * GIB),
        capacity_bytes=139 * GIB,
        step_seconds=seconds,
        tokens_per_second=131072 / seconds,
    )


def comparison(base, other, ratio, half=0.004, verdict="better", **more):
    return Comparison(
        base=base,
        other=other,
        ratio=interval(ratio, half),
        interleaved=True,
        alternations=3,
        threshold=1.005,
        verdict=verdict,
        **more,
    )


def trials():
    base = measurement(BASE, 1.62, 71.0, "baseline")
    compiled = measurement(COMPILED, 1.31, 58.0, "candidate", seed=1)
    chunked = measurement(CHUNKED, 1.22, 47.5, "candidate", seed=2)
    threaded = measurement(THREADED, 1.221, 47.5, "candidate", seed=3)
    compile_trial = comparison(base, compiled, 1.237)
    chunk_trial = comparison(compiled, chunked, 1.074)
    same = comparison(chunked, threaded, 0.999, 0.005, "no difference")
    full = Failure(failure="out_of_memory", message="wanted 7.8 GiB more than the 139 GiB there are", wanted_bytes=8 * GIB)
    return (
        Trial(
            index=1,
            lever="compile",
            change="compile off -> block",
            plan=COMPILED,
            predicted_ratio=1.18,
            estimate=estimate(COMPILED, 1.37, 55.2),
            outcome="kept",
            reason="the lower end of the interval is above the threshold",
            comparison=compile_trial,
            seconds=84,
        ),
        Trial(
            index=2,
            lever="chunked loss",
            change="loss model -> chunked, 4096 tokens a chunk",
            plan=CHUNKED,
            predicted_ratio=1.05,
            estimate=estimate(CHUNKED, 1.27, 46.0),
            outcome="kept",
            reason="the lower end of the interval is above the threshold",
            comparison=chunk_trial,
            seconds=61,
        ),
        Trial(
            index=3,
            lever="micro-batch",
            change="micro-batch 2 -> 8, accumulation 4 -> 1",
            plan=LARGER,
            predicted_ratio=1.04,
            estimate=estimate(LARGER, 1.19, 128.0),
            outcome="failed",
            reason="",
            failure=full,
            seconds=32,
        ),
        Trial(
            index=4,
            lever="data workers",
            change="data workers 0 -> 4",
            plan=THREADED,
            predicted_ratio=1.03,
            estimate=estimate(THREADED, 0.98, 46.0),
            outcome="undone",
            reason="no difference: 1 lies in the interval",
            comparison=same,
            seconds=55,
        ),
        Trial(
            index=5,
            lever="recompute",
            change="recompute none -> full",
            plan=RECOMPUTED,
            predicted_ratio=0.77,
            outcome="not tried",
            reason="memory is under the target of 65 % and it buys no larger micro-batch",
        ),
    )


def won():
    base = measurement(BASE, 1.61, 71.0, "baseline", seed=7)
    less = SHARES | {"exposed_comm": 0.11, "host_gap": 0.005, "data": 0.02}
    best = measurement(CHUNKED, 1.20, 47.5, "best", seed=8, shares=less)
    return Ladder(
        started="2026-02-03T10:00:00+00:00",
        budget_seconds=480,
        spent_seconds=402,
        baseline_plan=BASE,
        baseline_estimate=estimate(BASE, 1.70, 66.4),
        baseline=measurement(BASE, 1.62, 71.0, "baseline"),
        noise=0.003,
        trials=trials(),
        best_plan=CHUNKED,
        final=comparison(base, best, 1.342, 0.003),
        stopped="the best remaining prediction is under 2 %",
    )


def stands():
    undone = tuple(
        msgspec.structs.replace(trial, outcome="undone", reason="no difference") if trial.outcome == "kept" else trial
        for trial in trials()
    )
    return msgspec.structs.replace(won(), trials=undone, best_plan=BASE, final=None)


def interrupted():
    return msgspec.structs.replace(won(), final=None, stopped="interrupted", trials=trials()[:2])


def no_baseline():
    stopped = "the baseline ran out of memory"
    nothing = {"baseline": None, "baseline_estimate": None, "final": None, "trials": ()}
    return msgspec.structs.replace(won(), best_plan=BASE, stopped=stopped, **nothing)


def another_runs():
    """The baseline ran out of memory; a lever made it fit, so there is nothing to compare with."""
    first = msgspec.structs.replace(trials()[1], comparison=None, reason="runs where the baseline does not")
    return msgspec.structs.replace(won(), baseline=None, final=None, trials=(first,))


def cluster():
    def sheet(value, note="data sheet"):
        return Figure(value=value, source="datasheet", note=note)

    device = Device(
        kind="h200-sxm",
        name="NVIDIA H200",
        memory_bytes=sheet(139.8 * GIB),
        peak_flops={"bf16": sheet(989e12), "fp32": sheet(67e12)},
        memory_bandwidth=Figure(value=4.1e12, source="measured", note="copy of 1 GiB"),
    )
    host = Host(cpu_name="Xeon Platinum 8480C", num_cores=32, memory_bytes=256 * GIB, numa_nodes=2, has_compiler=False)
    link = Link(name="nvlink4", bandwidth=sheet(450e9), latency=Figure(value=6e-6, source="assumed"))
    group = NodeGroup(count=1, num_devices=2, device=device, host=host, link=link, topology=(("X", "NV18"), ("NV18", "X")))
    return Cluster(name="one node of 2 H200", groups=(group,), versions={"driver": "580.1"})
