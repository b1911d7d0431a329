"""How long training stands still for a checkpoint, and what the writing costs the steps beside it.

    python benchmarks/save_stall.py                                     two GPUs: 8B; needs 12 bytes a parameter of disk
    python benchmarks/save_stall.py --ranks 1 --model benchmarks/models/llama3-8b-half.json       one GPU: as many bytes a rank
    python benchmarks/save_stall.py --model tiny --seq 64 --ranks 2     anywhere, to see that it runs

Trains until the first checkpoint is whole, then stops without another. Steps are those without an evaluation or a save in them:
before the save, and while its files are written. Writes a dated record with `--record`.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

import records
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import FullstrideError
from fullstride.events import Span, StepEnd, read_events
from fullstride.launch.command import worker_command
from fullstride.launch.local import start
from fullstride.model.source import load_spec
from fullstride.plan.defaults import FP32, layout_for, weights_cast
from fullstride.plan.plan import Batch, Compile, Loss, ModelRef, Plan, Recipe, Workload
from fullstride.plan.rules import require
from fullstride.plan.toml import write_plan
from fullstride.rundir import RunDir


def plan_of(asked, cluster):
    """Flat buffers at stage 2; one rank shares with nobody."""
    layout, shard = layout_for(2, asked.ranks)
    carrier = asked.carrier if asked.ranks > 1 else "none"
    return Plan(
        model=ModelRef(source=asked.model),
        workload=Workload(sequence_length=asked.seq, samples_per_step=asked.ranks, data=asked.data),
        recipe=Recipe(steps=100_000, warmup_steps=100),
        layout=layout,
        shard=replace(shard, carrier=carrier),
        batch=Batch(micro_batch=1),
        precision=FP32 if cluster.device.kind == "cpu" else weights_cast(1, carrier),
        loss=Loss(kind="chunked"),
        compile=Compile(mode="off"),
    )


def first_save(run_dir, process, seconds):
    """Wait for the first whole checkpoint: its bytes, and when it was seen; 0 bytes if it was begun and is not whole yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for manifest in run_dir.checkpoints.glob("step-*/manifest.json"):
            return sum(path.stat().st_size for path in manifest.parent.iterdir()), time.time_ns()
        if process.poll() is not None:
            raise SystemExit(f"training ended with status {process.poll()} before its first checkpoint")
        time.sleep(0.1)
    seen = list(read_events(run_dir.events(0)))
    if any(saving(event) for event in seen):
        return 0, time.time_ns()
    steps = sum(isinstance(event, StepEnd) for event in seen)
    raise SystemExit(f"no checkpoint was begun within {seconds:.0f} s, after {steps} steps")


def saving(event):
    """Whether an event is the time for which training stood still for a save."""
    return isinstance(event, Span) and event.phase == "checkpoint"


def main():
    """Train, save once, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--carrier", default="flat", choices=("flat", "fsdp2"))
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--save-after", type=int, default=10, help="steps before the save")
    parser.add_argument("--timeout", type=float, default=400.0)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    spec, cluster = load_spec(asked.model), probe_cluster(num_ranks=asked.ranks)
    plan = plan_of(asked, cluster)
    require(plan, spec, cluster)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        run_dir = RunDir(root=folder)
        write_plan(plan, run_dir.plan)
        process = start(worker_command(run_dir, plan, train=True, save_every=asked.save_after))
        try:
            size, whole = first_save(run_dir, process, asked.timeout)
        finally:
            process.kill()
            process.close()
        events = [list(read_events(run_dir.events(rank))) for rank in range(asked.ranks)]
    saves = [next(event for event in rank if saving(event)) for rank in events]
    steps = [e for e in events[0] if isinstance(e, StepEnd)]
    before, after = split(steps, saves[0], whole)
    found = {
        "stall_seconds": max((span.end_ns - span.start_ns) / 1e9 for span in saves),
        "checkpoint_bytes": size,
        "step_seconds_before": before,
        "step_seconds_while_writing": after,
    }
    written = f"{size / 1e9:.1f} GB" if size else f"files not whole after {asked.timeout:.0f} s"
    print(f"{written}; training stood still for {found['stall_seconds']:.2f} s")
    print(f"step {before:.3f} s before, {after:.3f} s while the files were written" if after else f"step {before:.3f} s before")
    if asked.record:
        records.write("save-stall", cluster, vars(asked), plan=plan, **found)


def split(steps, save, whole):
    """Median seconds of steps before a save, and between it and the time when its files were whole; 0 for no such step."""
    times = [(step.time_ns, (step.time_ns - last.time_ns) / 1e9) for last, step in itertools.pairwise(steps)]
    before = [seconds for end, seconds in times if end <= save.start_ns][1:]
    after = [seconds for end, seconds in times if save.end_ns < end - seconds * 1e9 and end < whole]
    return statistics.median(before or [0.0]), statistics.median(after or [0.0])


if __name__ == "__main__":
    try:
        main()
    except FullstrideError as error:
        raise SystemExit(str(error)) from None
