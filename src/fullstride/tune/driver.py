"""Runs rounds through a worker session: what `bench`, `compare` and `tune` have in common.

Plans alternate as the protocol asks. On a GPU one is built at a time; on a CPU whose memory holds two, the one that waits
is set aside, so that plans can take turns quickly on a machine that is restless. A failure of the worker is a value.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol as Interface

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.measure.collect import (
    Flops,
    OrderEvents,
    attribution_of,
    events_of_order,
    measurement_of,
    read_versions,
    sizes_of_events,
    step_seconds,
)
from fullstride.measure.compare import compare_rounds
from fullstride.measure.measurement import Comparison, Form, Measurement, MemoryUse, Round, Share, Verdict
from fullstride.measure.pipeline import pipeline_ranks
from fullstride.measure.protocol import CHECKED_STEPS, Protocol, Settings, Solo, Stop, Visit, is_steady, not_finite, strays
from fullstride.measure.stats import Clock, trimmed_mean
from fullstride.model.spec import ModelSpec
from fullstride.plan.adapted import step_flops_per_token
from fullstride.plan.plan import Plan
from fullstride.rundir import Failure, Reply, RunDir

LEAD_IN = 1
"""Steps at the head of every timed order that are not counted: the pipeline of data and kernels fills again."""
PROFILED_STEPS = 2
_SHARE_FOR_TWO = 0.5
"""Of the host's memory, for two plans side by side."""
_FLUSH_SECONDS = 5.0
"""How long to wait for events after the reply that announces them."""
_FORMAT = "%Y-%m-%dT%H:%M:%S%z"


class NoTime(Failure, frozen=True, kw_only=True):
    """The time ended before the other plan had a round: nothing is known of it."""


class Session(Interface):
    """What the driver needs of a worker session (`launch.session.WorkerSession`)."""

    def build(self, name: str, plan: Plan) -> Reply:
        """Build a plan."""

    def run(self, steps: int, label: str, profile: bool = False, *, timeout_seconds: float | None = None) -> Reply:
        """Take steps with it; the session has a time-out of its own where none is given."""

    def set_aside(self) -> Reply:
        """Set it aside with all it holds; building it again under its name takes it up."""

    def holds(self, name: str) -> bool:
        """Whether it is still aside: another worker may have been needed since."""

    def release(self) -> Reply:
        """Free it, and what is aside."""


def _nothing_used() -> MemoryUse:
    return MemoryUse(peak_allocated_bytes=0, peak_reserved_bytes=0, static_bytes=0)


@dataclass
class Record:
    """All that was seen of one plan so far."""

    name: str
    plan: Plan
    rounds: list[Round] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    reserved: dict[int, list[int]] = field(default_factory=dict)
    memory: MemoryUse = field(default_factory=_nothing_used)
    build_seconds: float = 0.0
    """Of the first build."""
    rebuild_seconds: float = 0.0
    """Of the newest build."""
    since_build: int = 0
    """Steps taken since the newest build."""
    first_seconds: float = 0.0
    """Build and warm-up of the first visit, all compilation included."""
    warmup_steps: int = 0
    recompiles: int = 0
    shares: tuple[Share, ...] = ()
    profiled: bool = False
    started: str = ""
    known_seconds: float = 0.0
    """Step time of the newest round; 0 before there was one."""


Watch = Callable[[str, float], None]
"""Told the plan's name and the mean step time after every order."""


class Driver:
    """Carries out visits: build if need be, warm up, time a round."""

    def __init__(
        self,
        session: Session,
        run_dir: RunDir,
        cluster: Cluster,
        *,
        spec: ModelSpec | None = None,
        clock: Clock = time.monotonic,
        watch: Watch | None = None,
    ) -> None:
        """Args as named; `spec` gives Measurements their MFU, `watch` hears of progress."""
        self.session, self.run_dir, self.cluster, self.spec, self.clock = session, run_dir, cluster, spec, clock
        self._watch = watch
        self._built: Record | None = None
        self._aside: Record | None = None
        # Event files grow over sessions in one RUN_DIR: labels of an earlier one must not come again.
        self._stamp, self._orders = f"{time.time_ns() // 1000:x}", 0
        self.limit_seconds: Callable[[int], float] | None = None
        """How long an order of so many steps may take; None leaves it to the session."""

    def visit(self, record: Record, visit: Visit) -> Round | Failure:
        """One round of a plan; the record takes in what was seen."""
        began = self.clock()
        failure = self._build(record) if self._built is not record else None
        if failure is None and (not record.since_build or visit.warmup_steps == visit.max_warmup_steps):
            failure = self._warm_up(record, visit)
        if failure:
            return self._failed(failure)
        record.first_seconds = record.first_seconds or self.clock() - began
        outcome = self._run(record, visit.round_steps + LEAD_IN)
        if isinstance(outcome, Failure):
            return self._failed(outcome)
        times, events, reply = outcome
        record.recompiles += reply.recompiles
        void = _wrong_numbers(events) or (f"{reply.recompiles} recompilations in the timed steps" if reply.recompiles else "")
        done = Round(index=visit.index, label=visit.label, step_seconds=times[LEAD_IN:], void=void)
        for rank, samples in events.reserved_bytes.items():
            record.reserved.setdefault(rank, []).extend(samples)
        record.rounds.append(done)
        record.known_seconds = trimmed_mean(done.step_seconds)
        return done

    def profile(self, record: Record) -> Failure | None:
        """Attribute the step of the plan, in a short window that is not timed; builds it if need be."""
        failure = self._build(record) or self._warm_first() if self._built is not record else None
        if failure:
            return self._failed(failure)
        label = self._label(record)
        reply = self.session.run(PROFILED_STEPS, label, profile=True, timeout_seconds=self._limit(PROFILED_STEPS))
        if reply.failure or not reply.ok:
            return self._failed(_failure_of(reply))
        record.profiled = True
        layout = record.plan.layout
        stages = pipeline_ranks(record.plan) if layout.pp > 1 else ()
        record.shares = attribution_of(self.run_dir, label, layout.world_size, pipeline=stages)
        return None

    def measurement(self, record: Record, form: Form = "short", rounds: Sequence[Round] | None = None) -> Measurement:
        """What is known of a plan.

        Raises:
            BadInput: no round counts.
        """
        return measurement_of(
            plan=record.plan,
            cluster=self.cluster,
            rounds=record.rounds if rounds is None else rounds,
            memory=record.memory,
            warmup_steps=record.warmup_steps,
            form=form,
            started=record.started,
            versions=read_versions(self.run_dir) or self.cluster.versions,
            flops=self._flops(record.plan),
            shares=record.shares,
            reserved_bytes=record.reserved,
            losses=record.losses,
            grad_norms=record.grad_norms,
            build_seconds=record.build_seconds,
            recompiles=record.recompiles,
        )

    def _flops(self, plan: Plan) -> Flops | None:
        if self.spec is None:
            return None
        return Flops(full=step_flops_per_token(plan, self.spec, "full"), causal=step_flops_per_token(plan, self.spec, "causal"))

    def release(self) -> None:
        """Let go of what is built, and of what is aside."""
        if self._built is not None or self._aside is not None:
            self._built = self._aside = None
            self.session.release()

    def holds_two(self, one: Record, other: Record | None = None) -> bool:
        """Whether two plans may stand side by side; by default a plan twice.

        Never on a GPU: there memory is what is planned, and allocators remember.
        """
        needed = sum(r.memory.host_bytes * r.plan.layout.world_size for r in (one, other or one))
        hosts = self.cluster.host.memory_bytes if self.cluster.device.kind == "cpu" else 0
        return 0 < needed < _SHARE_FOR_TWO * hosts

    def _make_room(self, record: Record) -> bool:
        """Set aside what is built where both find room, else free everything; whether the record itself is aside.

        A plan's first visit is its own, so that its memory is seen alone.
        """
        built, waits = self._built, self._aside is record
        room = waits or self._aside is None
        if built is None and room:
            return waits
        if built and room and record.known_seconds and self.holds_two(built, record) and self.session.set_aside().ok:
            self._built, self._aside = None, built
            return waits
        self.release()
        return False

    def _build(self, record: Record) -> Failure | None:
        taken_up = self._make_room(record) and self.session.holds(record.name)
        record.started = record.started or datetime.datetime.now(datetime.UTC).strftime(_FORMAT)
        reply = self.session.build(record.name, record.plan)
        if reply.failure or not reply.ok:
            return _failure_of(reply)
        self._built = record
        if not taken_up:
            record.since_build = 0
            record.build_seconds = record.build_seconds or reply.seconds
            record.rebuild_seconds = reply.seconds
        return None

    def _warm_up(self, record: Record, visit: Visit) -> Failure | None:
        times: list[float] = []
        fixed = visit.warmup_steps == visit.max_warmup_steps
        # What a plan's step takes when it is warm is known after its first visit: then one step can show that it is.
        first = 1 if record.known_seconds and not fixed else visit.warmup_steps
        while len(times) < visit.max_warmup_steps:
            steps = min(2 if times else first, visit.max_warmup_steps - len(times))
            outcome = self._run(record, steps)
            if isinstance(outcome, Failure):
                return outcome
            times += outcome[0]
            if not fixed and is_steady(times, record.known_seconds):
                break
        record.warmup_steps = max(record.warmup_steps, len(times))
        return None

    def _warm_first(self) -> Failure | None:
        assert self._built is not None
        outcome = self._run(self._built, 2)
        return outcome if isinstance(outcome, Failure) else None

    def _run(self, record: Record, steps: int) -> tuple[tuple[float, ...], OrderEvents, Reply] | Failure:
        label = self._label(record)
        starts = sizes_of_events(self.run_dir, record.plan.layout.world_size)
        reply = self.session.run(steps, label, timeout_seconds=self._limit(steps))
        if reply.failure or not reply.ok:
            return _failure_of(reply)
        events = self._events(record, label, steps, starts)
        times = step_seconds(events)
        if len(times) < steps:
            return Failure(failure="crash", message=f"the worker announced {steps} steps and wrote down {len(times)}")
        self._take_in(record, events, reply)
        if self._watch:
            self._watch(record.name, sum(times) / len(times))
        return times, events, reply

    def _events(self, record: Record, label: str, steps: int, starts: dict[int, int]) -> OrderEvents:
        ranks = record.plan.layout.world_size
        give_up = time.monotonic() + _FLUSH_SECONDS
        while True:
            events = events_of_order(self.run_dir, label, ranks, starts)
            whole = len(events.steps) == ranks and all(len(own) >= steps for own in events.steps.values())
            if whole or time.monotonic() > give_up:
                return events
            time.sleep(0.05)

    def _take_in(self, record: Record, events: OrderEvents, reply: Reply) -> None:
        steps = next(iter(events.steps.values()))
        missing = CHECKED_STEPS - len(record.losses)
        if missing > 0 and record.since_build == len(record.losses):
            record.losses += [step.loss for step in steps[:missing]]
            record.grad_norms += [step.grad_norm for step in steps[:missing]]
        record.since_build += len(steps)
        if self._aside is not None:
            return  # a resident set of two plans says nothing of one
        old = record.memory
        record.memory = MemoryUse(
            peak_allocated_bytes=max(old.peak_allocated_bytes, reply.peak_allocated_bytes),
            peak_reserved_bytes=max(old.peak_reserved_bytes, reply.peak_reserved_bytes),
            static_bytes=max(old.static_bytes, reply.static_bytes),
            device_used_bytes=max(old.device_used_bytes, events.device_used_bytes),
            host_bytes=max(old.host_bytes, events.host_bytes),
        )

    def _failed(self, failure: Failure) -> Failure:
        self._built = self._aside = None
        return failure

    def _limit(self, steps: int) -> float | None:
        return self.limit_seconds(steps) if self.limit_seconds else None

    def _label(self, record: Record) -> str:
        self._orders += 1
        return f"{record.name}.{self._stamp}.{self._orders}"


def bench(driver: Driver, record: Record, settings: Settings, deadline: float) -> Measurement | Failure:
    """Measure one plan by the protocol, with its attribution.

    Raises:
        BadInput: every round is void.
    """
    state = Solo(settings=settings, label=record.name, deadline=deadline)
    while isinstance(action := state.next(driver.clock()), Visit):
        done = driver.visit(record, action)
        if isinstance(done, Failure):
            return done
        state = state.after(done)
    failure = driver.profile(record)
    return failure or driver.measurement(record, settings.form)


def compare(
    driver: Driver,
    base: Record,
    other: Record,
    settings: Settings,
    deadline: float,
    *,
    reference: Measurement | None = None,
    profile_after: Container[Verdict] = ("better", "worse", "no difference", "undetermined"),
    earlier: Sequence[Round] = (),
) -> Comparison | Failure:
    """Alternate two plans until the protocol has a verdict.

    Args:
        driver: runs the rounds.
        base: what `other` is compared with; its rounds of other comparisons do not count.
        other: the candidate.
        settings: how thoroughly.
        deadline: on the driver's clock.
        reference: whose first losses and gradient norms count; the base's own by default.
        profile_after: verdicts after which the step of both is attributed, where that was not done before.
        earlier: rounds of the same two plans, under these names, that this comparison goes on from.
    """
    base.rounds, other.rounds = ([r for r in earlier if r.label == record.name] for record in (base, other))
    state = Protocol(settings=settings, base=base.name, other=other.name, deadline=deadline, rounds=tuple(earlier))
    verdict: Verdict | None = None
    reasons: list[str] = []
    while isinstance(action := state.next(driver.clock()), Visit):
        record = base if action.label == base.name else other
        began = driver.clock()
        done = driver.visit(record, action)
        if isinstance(done, Failure):
            return done if record is other else _of_the_base(done)
        state = state.after(done, driver.clock() - began)
        wrong = _numerics(reference, base, other) if record is other else ""
        if wrong:
            verdict, reasons = "void", [wrong]
            break
    if isinstance(action, Stop):
        reasons = [action.reason]
        verdict = action.verdict
    if not _counted(base) or not _counted(other):
        if not other.rounds and isinstance(action, Stop) and action.verdict == "undetermined":
            return NoTime(failure="killed", message=action.reason)
        return Failure(failure="not_finite", message=reasons[0] if reasons else "no round counts")
    if verdict in profile_after:
        for record in (other, base):
            if not record.profiled and (failure := driver.profile(record)):
                return failure
    return compare_rounds(
        driver.measurement(base, settings.form),
        driver.measurement(other, settings.form),
        threshold=settings.threshold,
        confidence=settings.confidence,
        verdict=verdict,
        reasons=reasons,
    )


def _of_the_base(failure: Failure) -> Failure:
    return msgspec.structs.replace(failure, message=f"the plan it is compared with failed: {failure.message}")


def _counted(record: Record) -> bool:
    return any(not r.void for r in record.rounds)


def _numerics(reference: Measurement | None, base: Record, other: Record) -> str:
    losses, norms = (reference.losses, reference.grad_norms) if reference else (base.losses, base.grad_norms)
    return not_finite(other.losses, other.grad_norms) or strays(other.losses, other.grad_norms, losses, norms)


def _wrong_numbers(events: OrderEvents) -> str:
    steps = next(iter(events.steps.values()))
    return not_finite([s.loss for s in steps], [s.grad_norm for s in steps])


def _failure_of(reply: Reply) -> Failure:
    return reply.failure or Failure(failure="crash", message="the worker said no and not why")
