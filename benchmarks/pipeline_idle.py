"""How much of a pipeline is idle, measured beside simulated; and what a micro-batch size for each stage does to memory.

    python benchmarks/pipeline_idle.py                                    two GPUs: 8B at 4096, 8 micro-batches
    python benchmarks/pipeline_idle.py --model tiny --seq 64 --steps 2    anywhere, to see that it runs

Idle: 1 - the union of a rank's kernels but for communication, from the first forward of any rank to the last backward of any,
mean over ranks, in the profiled step (optimizer outside). The simulator sees the same plan on the machine as it was probed.
Then uniform micro-batches of two samples against one on the first stage and two on the second: step time in turns, peak of
each rank, losses. On a CPU figures say nothing of speed. Writes a dated record with `--record`.
"""

import argparse
import statistics
import tempfile

from msgspec.structs import replace

import records
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import FullstrideError
from fullstride.events import Memory, read_events
from fullstride.launch.session import WorkerSession
from fullstride.measure.collect import events_of_order, sizes_of_events, step_seconds
from fullstride.measure.pipeline import measured_timeline, pipeline_ranks
from fullstride.model.source import load_spec
from fullstride.plan.calibration import calibrated
from fullstride.plan.defaults import FP32, weights_cast
from fullstride.plan.pipeline import balanced_layers, plan_timeline
from fullstride.plan.plan import Batch, Compile, Layout, Loss, ModelRef, Pipeline, Plan, Recipe, Recompute, Workload
from fullstride.rundir import RunDir
from rounds import Failed, must


def plan_of(asked, spec, cluster, schedule, sizes=()):
    """The plan of one row, its blocks spread by cost."""
    chunks, size = (2 if schedule == "zb-v" else 1), max(sizes, default=asked.size)
    samples = asked.micro_batches * asked.size
    plan = Plan(
        model=ModelRef(source=asked.model),
        workload=Workload(sequence_length=asked.seq, samples_per_step=samples, data=asked.data),
        recipe=Recipe(steps=1000, warmup_steps=10),
        layout=Layout(pp=asked.ranks),
        pipeline=Pipeline(schedule=schedule, chunks=chunks, micro_batch_per_stage=sizes),
        batch=Batch(micro_batch=size, accumulation=samples // size),
        recompute=Recompute(mode=asked.recompute),
        precision=FP32 if cluster.device.kind == "cpu" else weights_cast(asked.micro_batches, "none"),
        loss=Loss(kind=asked.loss),
        compile=Compile(mode=asked.compile),
    )
    layers = asked.layers.get(schedule) or balanced_layers(plan, spec, cluster)
    return replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=tuple(layers)))


def idle(session, run_dir, plan, spec, cluster, asked):
    """Idle shares of one schedule, measured and simulated; or its failure."""
    try:
        return idle_shares(session, run_dir, plan, spec, cluster, asked)
    except Failed as error:
        return {"schedule": plan.pipeline.schedule, "plan": plan, "failure": str(error)}


def idle_shares(session, run_dir, plan, spec, cluster, asked):
    """The figures."""
    name = plan.pipeline.schedule
    built = must(session.build(name, plan))
    first = must(session.run(asked.warmup, f"{name}-warm"))
    starts = sizes_of_events(run_dir, plan.layout.world_size)
    must(session.run(asked.steps, f"{name}-timed"))
    events = events_of_order(run_dir, f"{name}-timed", plan.layout.world_size, starts)
    must(session.run(2, f"{name}-profiled", profile=True))
    measured, planned = measured_timeline(run_dir, plan), plan_timeline(plan, spec, cluster)
    assert measured is not None, "nothing was profiled"
    for rank in pipeline_ranks(plan):
        run_dir.trace(rank).unlink()  # the next schedule's spans stand alone
    return {
        "schedule": name,
        "plan": plan,
        "layers": list(plan.pipeline.layers_per_stage),
        "idle_measured": measured.bubble_share,
        "idle_simulated": planned.bubble_share,
        "idle_by_rank": [rank.idle_share for rank in measured.ranks],
        "step_seconds": statistics.mean(step_seconds(events)),
        "step_seconds_simulated": planned.step_seconds,
        "build_seconds": built.seconds,
        "first_steps_seconds": first.seconds,
        "peak_bytes": first.peak_allocated_bytes,
        "loss": next(iter(events.steps.values()))[-1].loss,
    }


def sized(session, run_dir, plans, asked):
    """Step times in turns, peaks by rank and losses of plans that differ in their micro-batch sizes."""
    rows = [
        {"sizes": list(plan.pipeline.micro_batch_per_stage), "plan": plan, "rounds": [], "peak_bytes": []} for plan in plans
    ]
    for turn in range(asked.rounds):
        for number, (plan, row) in enumerate(zip(plans, rows, strict=True)):
            label = f"sizes-{number}-{turn}"
            must(session.build(f"sizes-{number}", plan))
            must(session.run(asked.warmup, f"{label}-warm"))
            starts = sizes_of_events(run_dir, plan.layout.world_size)
            must(session.run(asked.steps, label))
            events = events_of_order(run_dir, label, plan.layout.world_size, starts)
            row["rounds"].append(statistics.mean(step_seconds(events)))
            row["loss"] = next(iter(events.steps.values()))[-1].loss
            row["peak_bytes"].append([peak(run_dir, rank, starts[rank]) for rank in range(plan.layout.world_size)])
    for row in rows:
        row["step_seconds"] = statistics.mean(row["rounds"])
        row["peak_bytes"] = [max(values) for values in zip(*row["peak_bytes"], strict=True)]
    return rows


def peak(run_dir, rank, start):
    """Largest allocation that a rank has told of since `start`."""
    return max(event.peak_allocated_bytes for event in read_events(run_dir.events(rank), start) if isinstance(event, Memory))


def show(rows, sizes):
    """The answer in a few lines."""
    for row in rows:
        if "failure" in row:
            print(f"{row['schedule']:8} {row['failure'].splitlines()[0]}")
            continue
        parts = f"idle {row['idle_measured']:6.1%} measured, {row['idle_simulated']:6.1%} simulated"
        cost = f"step {row['step_seconds']:.3f} s, {row['peak_bytes'] / 2**30:.1f} GiB"
        print(f"{row['schedule']:8} {parts}; {cost}, blocks {row['layers']}")
    for row in sizes:
        peaks = ", ".join(f"{value / 2**30:.1f}" for value in row["peak_bytes"])
        print(f"sizes {row['sizes']}: step {row['step_seconds']:.3f} s, peaks {peaks} GiB, loss {row['loss']:.4f}")


def main():
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--size", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--schedules", default="1f1b,zb-h1,zb-v")
    parser.add_argument("--layers", default="", help="blocks by stage instead of by cost: 1f1b=17,15;zb-v=7,9,9,7")
    parser.add_argument("--recompute", default="none", choices=("none", "norm_activation", "full"))
    parser.add_argument("--loss", default="model", choices=("model", "chunked"))
    parser.add_argument("--compile", default="off", choices=("off", "block"))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each size; 0 to leave the sizes out")
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    words = [part.split("=") for part in asked.layers.split(";") if part]
    asked.layers = {name: [int(count) for count in counts.split(",")] for name, counts in words}
    spec = load_spec(asked.model)
    cluster = probe_cluster(num_ranks=asked.ranks)
    priced = calibrated(cluster, "none")
    plans = [plan_of(asked, spec, priced, name) for name in asked.schedules.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(root=folder)
        with WorkerSession(run_dir, plans[0]) as session:
            rows = [idle(session, run_dir, plan, spec, priced, asked) for plan in plans]
            sizes = []
            if asked.rounds:
                asked.size *= 2
                uniform, smaller = (2,) * asked.ranks, (1, *(2,) * (asked.ranks - 1))
                sizes = sized(session, run_dir, [plan_of(asked, spec, priced, "1f1b", s) for s in (uniform, smaller)], asked)
    show(rows, sizes)
    if asked.record:
        records.write("pipeline-idle", cluster, vars(asked), schedules=rows, sizes=sizes)


if __name__ == "__main__":
    try:
        main()
    except FullstrideError as error:
        raise SystemExit(str(error)) from None
