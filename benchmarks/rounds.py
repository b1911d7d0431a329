"""Rounds of plans in turns in one worker, and where a step goes: what several benchmarks share."""

import math
import statistics
import tempfile

from fullstride.launch.session import WorkerSession
from fullstride.measure.collect import attribution_of, events_of_order, read_trace, sizes_of_events, step_seconds
from fullstride.rundir import RunDir

LOSS_APART, NORM_APART = 2e-3, 5e-2
"""Relative; bf16 sums in another order move the first steps by less."""


class Failed(Exception):
    """A worker failed; its own words."""


def must(reply):
    """The reply, if it is one.

    Raises:
        Failed: the worker failed.
    """
    if not reply.ok:
        raise Failed(f"{reply.failure.message}\n{reply.failure.detail}")
    return reply


def in_turns(plans, asked):
    """Rounds of all plans in turns, then a profile of each: a row a plan, by name.

    A plan that fails (does not fit, say) has a `failure` in its row, and the others go on.
    """
    rows, turns = {name: {"plan": plan} for name, plan in plans.items()}, {name: [] for name in plans}
    with tempfile.TemporaryDirectory() as folder, WorkerSession(RunDir(root=folder), next(iter(plans.values()))) as session:
        run_dir = RunDir(root=folder)

        def attempt(name, work):
            if "failure" not in rows[name]:
                try:
                    work()
                    must(session.release())
                except Failed as error:
                    rows[name]["failure"] = str(error)

        for number in range(asked.rounds):
            for name, plan in plans.items():
                label = f"{name} {number}"
                attempt(name, lambda n=name, p=plan, at=label: turns[n].append(turn(session, run_dir, n, p, at, asked)))
        for name, plan in plans.items():
            attempt(name, lambda n=name, p=plan: rows[n].update(shares=profiled(session, run_dir, n, p)))
    for name, row in rows.items():
        if "failure" not in row:
            row.update(summed(turns[name]))
    whole = [row for row in rows.values() if "failure" not in row]
    for row in whole:
        row["void"] = strays(row, whole[0])
    return rows


def summed(rounds):
    """One plan's rounds together."""
    return {
        "step_seconds": statistics.mean(done["seconds"] for done in rounds),
        "rounds": [done["seconds"] for done in rounds],
        "peak_bytes": max(done["peak_bytes"] for done in rounds),
        "losses": rounds[0]["losses"],
        "norms": rounds[0]["norms"],
    }


def turn(session, run_dir, name, plan, label, asked):
    """One round of one plan: step times, first losses and norms, peak memory."""
    must(session.build(name, plan))
    ranks = plan.layout.world_size
    starts = sizes_of_events(run_dir, ranks)
    warm = must(session.run(asked.warmup, f"{label} warm"))
    early = next(iter(events_of_order(run_dir, f"{label} warm", ranks, starts).steps.values()))
    starts = sizes_of_events(run_dir, ranks)
    timed = must(session.run(asked.steps + 1, label))
    times = step_seconds(events_of_order(run_dir, label, ranks, starts))[1:]
    return {
        "seconds": statistics.mean(times),
        "losses": [step.loss for step in early],
        "norms": [step.grad_norm for step in early],
        "peak_bytes": max(warm.peak_allocated_bytes, timed.peak_allocated_bytes),
    }


def profiled(session, run_dir, name, plan):
    """Milliseconds of the step by share, and of copies, on the slowest rank."""
    must(session.build(name, plan))
    must(session.run(2, f"{name} again"))
    must(session.run(2, f"{name} profiled", profile=True))
    shares = attribution_of(run_dir, f"{name} profiled", plan.layout.world_size)
    traces = [run_dir.trace(rank) for rank in range(plan.layout.world_size)]
    copies = max(copied(path) for path in traces)
    for path in traces:
        path.unlink(missing_ok=True)  # the next plan's spans stand alone
    return {**{share.name: share.seconds * 1e3 for share in shares}, "copies": copies}


def copied(path):
    """Milliseconds a step that a rank's kernels only moved bytes, those from the host left out; 0 without a device."""
    spans = read_trace(path) if path.exists() else []
    steps = {span.step for span in spans}
    return sum(s.end_ns - s.start_ns for s in spans if s.kernel == "copy" and s.phase != "h2d") / 1e6 / max(1, len(steps))


def strays(row, first):
    """Why a row's numbers are not those of the first row; empty if they are."""
    for what, allowed in (("losses", LOSS_APART), ("norms", NORM_APART)):
        for mine, theirs in zip(row[what], first[what], strict=True):
            if not math.isclose(mine, theirs, rel_tol=allowed):
                return f"{what} {mine:.5g} beside {theirs:.5g}"
    return ""
