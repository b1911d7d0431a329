"""From the events that the ranks left behind to a Measurement."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput
from fullstride.events import AnyEvent, Memory, Span, StepEnd, read_events
from fullstride.files import Value
from fullstride.measure.attribution import attribute, fit_to_step
from fullstride.measure.health import health_figures
from fullstride.measure.measurement import Form, Interval, Measurement, MemoryUse, Round, Share
from fullstride.measure.stats import interval_of_mean, mean_without_extremes, trimmed_mean
from fullstride.plan.plan import Plan
from fullstride.rundir import RunDir


class Flops(Value, frozen=True, kw_only=True):
    """Arithmetic of one token, forward and backward, in both conventions of counting attention."""

    full: float
    causal: float


class OrderEvents(Value, frozen=True, kw_only=True):
    """What the ranks wrote while one order was carried out."""

    steps: dict[int, tuple[StepEnd, ...]]
    """rank -> its steps in order."""
    reserved_bytes: dict[int, tuple[int, ...]] = {}
    """rank -> samples taken between the first step's start and the last step's end."""
    device_used_bytes: int = 0
    """Largest seen on any rank."""
    host_bytes: int = 0


def sizes_of_events(run_dir: RunDir, num_ranks: int) -> dict[int, int]:
    """Bytes in each rank's event file: where what comes next will start."""
    return {rank: path.stat().st_size for rank in range(num_ranks) if (path := run_dir.events(rank)).exists()}


def events_of_order(run_dir: RunDir, label: str, num_ranks: int, starts: Mapping[int, int] | None = None) -> OrderEvents:
    """Collect the events of the order named `label`; ranks that wrote nothing are left out.

    Args:
        run_dir: where the event files lie.
        label: of the order.
        num_ranks: ranks to look for.
        starts: `sizes_of_events` from before the order, so that long files need not be read whole.

    Raises:
        BadInput: an event file is damaged.
    """
    steps: dict[int, tuple[StepEnd, ...]] = {}
    reserved: dict[int, tuple[int, ...]] = {}
    used = host = 0
    for rank in range(num_ranks):
        path = run_dir.events(rank)
        events: list[AnyEvent] = list(read_events(path, (starts or {}).get(rank, 0))) if path.exists() else []
        own = tuple(e for e in events if isinstance(e, StepEnd) and e.order == label)
        if not own:
            continue
        steps[rank] = own
        window = (own[0].start_ns, own[-1].time_ns)
        memory = [e for e in events if isinstance(e, Memory) and window[0] <= e.time_ns <= window[1]]
        reserved[rank] = tuple(e.reserved_bytes for e in memory)
        used = max([used, *(e.device_used_bytes for e in memory)])
        host = max([host, *(e.host_bytes for e in memory)])
    return OrderEvents(steps=steps, reserved_bytes=reserved, device_used_bytes=used, host_bytes=host)


def step_seconds(events: OrderEvents) -> tuple[float, ...]:
    """Time of each step on the rank that took longest over it; from one step's end to the next, so that nothing between
    steps is lost.
    """
    ranks = [_durations(steps) for steps in events.steps.values()]
    return tuple(max(times) for times in zip(*ranks, strict=False)) if ranks else ()


def _durations(steps: Sequence[StepEnd]) -> list[float]:
    starts = [steps[0].start_ns, *(step.time_ns for step in steps[:-1])]
    return [(step.time_ns - start) / 1e9 for step, start in zip(steps, starts, strict=True)]


def read_trace(path: Path) -> list[Span]:
    """Device spans of one rank's profiled windows; those before the damage if the file was cut short."""
    spans: list[Span] = []
    decoder = msgspec.json.Decoder(Span)
    try:
        with gzip.open(path, "rb") as lines:
            spans.extend(decoder.decode(line) for line in lines if line.strip())
    except (OSError, EOFError, zlib.error, msgspec.DecodeError):
        return spans
    return spans


def attribution_of(run_dir: RunDir, label: str, num_ranks: int, *, pipeline: Sequence[int] = ()) -> tuple[Share, ...]:
    """Shares of the profiled order named `label`, on the rank whose steps took longest; empty if nothing was profiled.

    Ranks of a pipeline take equally long and compute unequally: given them, it is the one that computes most.

    Raises:
        BadInput: an event file is damaged.
    """
    events = events_of_order(run_dir, label, num_ranks)
    if not events.steps:
        return ()
    slowest = max(events.steps, key=lambda rank: sum(_durations(events.steps[rank])))
    ranks = [rank for rank in pipeline if rank in events.steps] or [slowest]
    found = [attribute(read_trace(run_dir.trace(rank)), events.steps[rank]) for rank in ranks if run_dir.trace(rank).exists()]
    return max(found, key=_computed_seconds, default=())


def _computed_seconds(shares: tuple[Share, ...]) -> float:
    return sum(share.seconds for share in shares if share.name in ("forward", "backward"))


def read_versions(run_dir: RunDir) -> dict[str, str]:
    """Versions that the worker wrote down; empty if it did not."""
    try:
        raw = msgspec.json.decode(run_dir.versions.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return {str(k): str(v) for k, v in raw.items()} if isinstance(raw, dict) else {}


def mfu(flops_per_token: float, tokens_per_second: float, plan: Plan, cluster: Cluster) -> float | None:
    """Model FLOPs utilisation (Chowdhery et al. 2022, appendix B); None where the device's peak is unknown."""
    peak = cluster.device.peak_flops.get(plan.precision.block)
    if peak is None or peak.value <= 0:
        return None
    return flops_per_token * tokens_per_second / (plan.layout.world_size * peak.value)


def step_interval(rounds: Sequence[Round], form: Form, confidence: float = 0.99) -> Interval:
    """Step time over the rounds that count, the fastest and the slowest round dropped from the value, not from the interval.

    Raises:
        BadInput: no round counts.
    """
    counted = [r for r in rounds if not r.void]
    if not counted:
        raise BadInput("no round of this measurement counts", fix="look at why its rounds are void")
    times = [sum(r.step_seconds) / len(r.step_seconds) if form == "full" else trimmed_mean(r.step_seconds) for r in counted]
    spread = interval_of_mean(times, confidence)
    value = mean_without_extremes(times)
    return Interval(value=value, low=max(0.0, min(spread.low, value)), high=max(spread.high, value), confidence=confidence)


def measurement_of(
    *,
    plan: Plan,
    cluster: Cluster,
    rounds: Sequence[Round],
    memory: MemoryUse,
    warmup_steps: int,
    form: Form,
    started: str,
    versions: Mapping[str, str] | None = None,
    flops: Flops | None = None,
    shares: Sequence[Share] = (),
    reserved_bytes: Mapping[int, Sequence[int]] | None = None,
    losses: Sequence[float] = (),
    grad_norms: Sequence[float] = (),
    build_seconds: float = 0.0,
    recompiles: int = 0,
) -> Measurement:
    """Put together what was seen of one plan.

    `tokens_per_step` counts every token that is processed, also those whose loss is masked. `shares` are those of the
    profiled window; they are brought to the length of the timed steps here. `losses` and `grad_norms` end before the
    first that is not finite, which JSON cannot hold.

    Raises:
        BadInput: no round counts.
    """
    interval = step_interval(rounds, form)
    tokens = plan.workload.samples_per_step * plan.workload.sequence_length
    rate = tokens / interval.value
    fitted = fit_to_step(shares, interval.value, on_host=cluster.device.kind == "cpu")
    timed = [seconds for r in rounds if not r.void for seconds in r.step_seconds]
    named = {share.name: share.seconds for share in fitted}
    return Measurement(
        plan_hash=plan.plan_hash,
        work_hash=plan.work_hash,
        cluster=cluster.digest,
        device=cluster.device.name,
        versions=dict(versions or {}),
        form=form,
        started=started,
        world_size=plan.layout.world_size,
        warmup_steps=warmup_steps,
        rounds=tuple(rounds),
        step_seconds=interval,
        samples_per_step=plan.workload.samples_per_step,
        tokens_per_step=tokens,
        tokens_per_second=rate,
        mfu_full=mfu(flops.full, rate, plan, cluster) if flops else None,
        mfu_causal=mfu(flops.causal, rate, plan, cluster) if flops else None,
        health=health_figures(
            step_seconds=timed,
            reserved_bytes=reserved_bytes or {},
            shares=fitted,
            world_size=plan.layout.world_size,
            on_host=cluster.device.kind == "cpu",
        ),
        shares=fitted,
        exposed_comm_seconds=named.get("exposed_comm", 0.0) if fitted and "unattributed" not in named else None,
        memory=memory,
        build_seconds=build_seconds,
        recompiles=recompiles,
        losses=tuple(takewhile(math.isfinite, losses)),
        grad_norms=tuple(takewhile(math.isfinite, grad_norms)),
    )
