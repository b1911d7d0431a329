"""Rounds of plans in turns in one worker, and where a step goes: what several benchmarks share."""

import math
import statistics

from fullstride.measure.collect import attribution_of, events_of_order, read_trace, sizes_of_events, step_seconds

LOSS_APART, NORM_APART = 2e-3, 5e-2
"""Relative; bf16 sums in another order move the first steps by less."""


def must(reply):
    """Stop where the worker failed."""
    assert reply.ok, f"{reply.failure.message}\n{reply.failure.detail}"
    return reply


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
