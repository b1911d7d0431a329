"""Tensor parallelism with sequence parallelism on two GPUs, at a size whose activations one GPU could not hold.

    python benchmarks/tensor_parallel.py                                             two GPUs: 8B, 2 sequences of 8192
    python benchmarks/tensor_parallel.py --model tiny --seq 64 --steps 2 --rounds 2  anywhere, to see that it runs

The plan without and with products split beside their collectives (`overlap.tensor`), in turns. Beside each figure stands what
was predicted before: step time, exposed communication, allocated peak. Writes a dated record with `--record`.
"""

import argparse

from msgspec.structs import replace

import records
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import FullstrideError
from fullstride.model.source import load_spec
from fullstride.plan.calibration import calibrated
from fullstride.plan.defaults import FP32, weights_cast
from fullstride.plan.plan import Batch, Compile, Layout, Loss, ModelRef, Overlap, Plan, Recipe, Recompute, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import require
from rounds import in_turns


def plans_of(asked, cluster):
    """The plans by name."""
    plan = Plan(
        model=ModelRef(source=asked.model),
        workload=Workload(sequence_length=asked.seq, samples_per_step=asked.micro_batch, data=asked.data),
        recipe=Recipe(steps=10_000, warmup_steps=100),
        layout=Layout(tp=asked.ranks, sequence_parallel=True),
        batch=Batch(micro_batch=asked.micro_batch),
        recompute=Recompute(mode=asked.recompute),
        precision=FP32 if cluster.device.kind == "cpu" else weights_cast(1, "none"),
        loss=Loss(kind=asked.loss),
        compile=Compile(mode=asked.compile),
    )
    return {"whole products": plan, "split products": replace(plan, overlap=Overlap(tensor=True))}


def show(results):
    """Measured beside predicted, a line a plan."""
    print(f"{'':15} {'step s':>17} {'exposed ms':>17} {'peak GiB':>17}   (measured, predicted)")
    for name, row in results.items():
        if "failure" in row:
            print(f"{name:15} {row['failure'].splitlines()[0]}")
            continue
        wanted = row["predicted"]
        step = f"{row['step_seconds']:.4f} {wanted['step_seconds']:.4f}"
        exposed = f"{row['shares'].get('exposed_comm', 0.0):.1f} {wanted['exposed_seconds'] * 1e3:.1f}"
        peak = f"{row['peak_bytes'] / 2**30:.1f} {wanted['peak_bytes'] / 2**30:.1f}"
        print(f"{name:15} {step:>17} {exposed:>17} {peak:>17}{'   VOID: ' + row['void'] if row['void'] else ''}")


def predicted(plan, spec, cluster):
    """What the planner says of a plan, in figures."""
    estimate = price(plan, spec, cluster)
    exposed = sum(term.exposed_seconds for term in estimate.terms if term.kind == "comm")
    return {
        "step_seconds": estimate.step_seconds,
        "exposed_seconds": exposed,
        "peak_bytes": estimate.peak_allocated_bytes,
    }


def main():
    """Predict, measure in turns, profile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--recompute", default="none", choices=("none", "norm_activation", "full"))
    parser.add_argument("--loss", default="chunked", choices=("model", "chunked"))
    parser.add_argument("--compile", choices=("off", "block"), help="block on a GPU, off on a CPU")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    spec, probed = load_spec(asked.model), probe_cluster(num_ranks=asked.ranks)
    cluster = calibrated(probed, "none")
    asked.compile = asked.compile or ("off" if cluster.device.kind == "cpu" else "block")
    plans = plans_of(asked, cluster)
    for plan in plans.values():
        require(plan, spec, probed)
    results = in_turns(plans, asked)
    for name, plan in plans.items():
        results[name]["predicted"] = predicted(plan, spec, cluster)
    show(results)
    if asked.record:
        records.write("tensor-parallel", cluster, vars(asked), plans=results)


if __name__ == "__main__":
    try:
        main()
    except FullstrideError as error:
        raise SystemExit(str(error)) from None
