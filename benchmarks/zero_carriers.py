"""ZeRO by FSDP2 and on flat buffers (and DDP where it fits), in turns on the same model and machine.

    python benchmarks/zero_carriers.py                                               two GPUs: 8B at 8192
    python benchmarks/zero_carriers.py --torchtitan runs/peer                        the same between two runs of torchtitan
    python benchmarks/zero_carriers.py --stages 2 3 --reduction bf16 --rounds 5
    python benchmarks/zero_carriers.py --ranks 1 --model benchmarks/models/llama3-8b-half.json         one GPU: half of 8B
    python benchmarks/zero_carriers.py --model tiny --seq 64 --steps 2 --rounds 2    anywhere, to see that it runs

Every round builds each plan anew, warms it up and times some steps; what is printed is the mean of the rounds with the lowest
and the highest. Then two steps of each are profiled: copies are kernels that only move bytes, exposed communication is what
stands outside of computation, both on the rank with the longest step. A plan whose loss or gradient norm strays from the first
one's is named, and its figures are void. On a CPU figures say nothing of speed. Writes a dated record with `--record`.
"""

import argparse
import statistics
from pathlib import Path

from msgspec.structs import replace

import records
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import FullstrideError
from fullstride.model.source import load_spec
from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.plan import Batch, Compile, Loss, ModelRef, Overlap, Plan, Recipe, Recompute, Shard, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import check
from peer import peer
from rounds import in_turns


def plan_of(asked, cluster, carrier, stage):
    """The plan of one row."""
    layout, _ = layout_for(stage, asked.ranks)
    samples = asked.micro_batch * asked.accumulation
    if cluster.device.kind == "cpu":
        precision = FP32
    elif carrier == "ddp":
        precision = AUTOCAST
    else:
        narrow = "bf16" if asked.ranks == 1 else asked.reduction
        narrow = narrow if asked.accumulation == 1 else "fp32"
        precision = replace(weights_cast(asked.accumulation, carrier), reduction=asked.reduction, gradient=narrow)
    return Plan(
        model=ModelRef(source=asked.model),
        workload=Workload(sequence_length=asked.seq, samples_per_step=samples * asked.ranks, data=asked.data),
        recipe=Recipe(steps=10_000, warmup_steps=100),
        layout=layout,
        shard=Shard(carrier=carrier, stage=stage),
        batch=Batch(micro_batch=asked.micro_batch, accumulation=asked.accumulation),
        recompute=Recompute(mode=asked.recompute),
        overlap=Overlap(prefetch=asked.prefetch) if stage == 3 else Overlap(),
        precision=precision,
        loss=Loss(kind=asked.loss),
        compile=Compile(mode=asked.compile),
    )


def rows_of(asked, spec, cluster):
    """Plans by name; DDP only where it is expected to fit; one rank shares with nobody."""
    if asked.ranks == 1:
        return {"one rank": plan_of(asked, cluster, "none", 0)}
    found = {f"{c} zero {s}": plan_of(asked, cluster, c, s) for s in asked.stages for c in ("fsdp2", "flat")}
    ddp = plan_of(asked, cluster, "ddp", 0)
    if price(ddp, spec, cluster).fits:
        found["ddp"] = ddp
    for name, plan in found.items():
        for broken in check(plan, spec, cluster):
            raise SystemExit(f"{name}: {broken.message}")
    return found


def show(results, asked, peers):
    """A line a plan, and each over the mean of the peer's runs."""
    rates = [run["tokens_per_second_per_gpu"] for run in peers if "tokens_per_second_per_gpu" in run]
    heads = f"{'copies':>8} {'exposed':>8} {'optimizer':>9} {'peak':>9}"
    print(f"{'':14} {'step s':>8} {'low':>8} {'high':>8} {'tok/s/GPU':>10} {heads}")
    for name, row in results.items():
        if "failure" in row:
            print(f"{name:15} {row['failure'].splitlines()[0]}")
            continue
        mean, shares = row["step_seconds"], row["shares"]
        tokens = asked.micro_batch * asked.accumulation * asked.seq / mean
        copies, exposed, optimizer = (shares.get(key, 0.0) for key in ("copies", "exposed_comm", "optimizer"))
        figures = f"{mean:8.4f} {min(row['rounds']):8.4f} {max(row['rounds']):8.4f} {tokens:10.0f}"
        parts = f"{copies:5.1f} ms {exposed:5.1f} ms {optimizer:6.1f} ms {row['peak_bytes'] / 2**30:5.1f} GiB"
        ratio = f"   {tokens / statistics.mean(rates):.3f} of torchtitan" if rates else ""
        print(f"{name:14} {figures} {parts}{ratio}{'   VOID: ' + row['void'] if row['void'] else ''}")


def main():
    """Measure in turns, profile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[2], choices=(1, 2, 3))
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--reduction", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--prefetch", type=int, default=1, help="blocks gathered ahead at stage 3")
    parser.add_argument("--recompute", default="none", choices=("none", "norm_activation", "full"))
    parser.add_argument("--loss", default="chunked", choices=("model", "chunked"))
    parser.add_argument("--compile", choices=("off", "block"), help="block on a GPU, off on a CPU")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torchtitan", type=Path, help="run it before and after, with its files in this folder")
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    spec, cluster = load_spec(asked.model), probe_cluster(num_ranks=asked.ranks)
    asked.compile = asked.compile or ("off" if cluster.device.kind == "cpu" else "block")
    plans = rows_of(asked, spec, cluster)
    peers = [peer(asked.model, asked.ranks, asked.torchtitan, "before", asked.seq)] if asked.torchtitan else []
    results = in_turns(plans, asked)
    if asked.torchtitan:
        peers.append(peer(asked.model, asked.ranks, asked.torchtitan, "after", asked.seq))
    show(results, asked, peers)
    if asked.record:
        records.write("zero-carriers", cluster, vars(asked), plans=results, torchtitan=peers)


if __name__ == "__main__":
    try:
        main()
    except FullstrideError as error:
        raise SystemExit(str(error)) from None
