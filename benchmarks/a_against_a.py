"""Does the protocol call a gain where there is none? Comparisons of a plan with itself, on real steps of this machine.

    python benchmarks/a_against_a.py --comparisons 100

One worker trains `tiny` by the baseline plan and times rounds of a few steps, built anew every twelve rounds. Each comparison
takes the next rounds in turn as A and B, exactly as `compare` would, and goes on until the protocol decides. Threshold: the
lowest that may be asked for, 0.5 %, without the machine's own A/A half-width, which only makes a gain harder to call.
Writes a dated record.
"""

import argparse
import collections
import datetime
import json
import tempfile
import time
from pathlib import Path

from fullstride.cluster.probe import probe_cluster
from fullstride.launch.session import WorkerSession
from fullstride.measure.collect import events_of_order, sizes_of_events, step_seconds
from fullstride.measure.measurement import Round
from fullstride.measure.protocol import Protocol, Settings, Stop
from fullstride.model.source import load_spec
from fullstride.plan.baseline import baseline_plan
from fullstride.plan.plan import ModelRef, Recipe, Workload
from fullstride.rundir import RunDir

ROUNDS_OF_A_BUILD = 12


class Machine:
    """Real rounds, one after the other."""

    def __init__(self, session, run_dir, plan, steps):
        self.session, self.run_dir, self.plan, self.steps = session, run_dir, plan, steps
        self.number = 0

    def round(self):
        """Step times of the next round."""
        if self.number % ROUNDS_OF_A_BUILD == 0:
            if self.number:
                must(self.session.release())
            must(self.session.build("plan", self.plan))
            must(self.session.run(3, "warm"))
        self.number += 1
        starts = sizes_of_events(self.run_dir, self.plan.layout.world_size)
        label = f"round-{self.number}"
        must(self.session.run(self.steps, label))
        return step_seconds(events_of_order(self.run_dir, label, self.plan.layout.world_size, starts))


def must(reply):
    """Stop where the worker failed."""
    assert reply.ok, reply.failure


def comparison(machine, settings):
    """One comparison of the plan with itself, to its verdict."""
    protocol = Protocol(settings=settings, base="A", other="B", deadline=float("inf"))
    while not isinstance(visit := protocol.next(0.0), Stop):
        done = Round(index=visit.index, label=visit.label, step_seconds=machine.round())
        protocol = protocol.after(done, 0.0)
    return visit.verdict, protocol.ratio.value, protocol.alternations


def main():
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round")
    parser.add_argument("--seq", type=int, default=32)
    arguments = parser.parse_args()
    spec, cluster = load_spec("tiny"), probe_cluster()
    work = Workload(sequence_length=arguments.seq, samples_per_step=cluster.num_devices)
    plan = baseline_plan(spec, cluster, ModelRef(source="tiny"), work, Recipe())
    settings = Settings(threshold=0.005, promising_alternations=16)
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir(root=folder)
        with WorkerSession(run_dir, plan) as session:
            machine = Machine(session, run_dir, plan, arguments.steps)
            results = [comparison(machine, settings) for _ in range(arguments.comparisons)]
    counts = collections.Counter(verdict for verdict, _, _ in results)
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": f"python benchmarks/a_against_a.py --comparisons {arguments.comparisons} --steps {arguments.steps}",
        "device": cluster.device.name,
        "ranks": cluster.num_devices,
        "seconds": round(time.time() - started),
        "verdicts": dict(counts),
        "called_a_gain": counts["better"],
        "ratios": [round(ratio, 4) for _, ratio, _ in results],
        "alternations": [number for _, _, number in results],
    }
    target = Path(__file__).parent / "results" / f"{record['date']}-a-against-a.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"{arguments.comparisons} comparisons of a plan with itself: {dict(counts)}; {record['seconds']} s; wrote {target.name}"
    )


if __name__ == "__main__":
    main()
