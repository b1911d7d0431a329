"""A worker session without workers: it keeps a clock of its own and writes the events that real ranks would."""

import gzip
import math
import random

import msgspec

from fullstride.cluster.cluster import Cluster, Device, Figure, Host, Link, NodeGroup
from fullstride.events import EventWriter, Memory, Span, StepEnd
from fullstride.model.spec import Matmul, ModelSpec, Parameter, Stack, Sublayer
from fullstride.plan.estimate import Estimate, Term
from fullstride.plan.plan import Batch, Layout, ModelRef, Plan, Precision, Shard, Workload
from fullstride.rundir import Failure, Reply

CAPACITY = 2**36


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def seconds_by_parts(plan):
    """A made-up machine: larger micro-batches and compile pay, recompute and chunks cost."""
    seconds = 1.0 * (1 + 0.2 / plan.batch.micro_batch)
    seconds *= {"none": 1.0, "norm_activation": 1.02, "full": 1.3}[plan.recompute.mode]
    seconds *= 0.8 if plan.compile.mode == "block" else 1.0
    seconds *= 1.03 if plan.loss.kind == "chunked" else 1.0
    seconds *= {"none": 1.0, "autocast": 0.7, "weights": 0.6}[plan.precision.cast]
    return seconds


def bytes_by_parts(plan):
    activations = plan.batch.micro_batch * {"none": 8, "norm_activation": 6, "full": 2}[plan.recompute.mode]
    logits = plan.batch.micro_batch * (1 if plan.loss.kind == "chunked" else 4)
    return int((10 + activations + logits) * 2**30)


def fake_price(seconds=seconds_by_parts, memory=bytes_by_parts):
    def price(plan, spec, cluster):
        step = seconds(plan)
        peak = memory(plan)
        term = Term(name="all", kind="compute", seconds=step, exposed_seconds=step, source="made up", confidence="assumed")
        return Estimate(
            plan_hash=plan.plan_hash,
            rows=(),
            terms=(term,),
            moments=(),
            peak_allocated_bytes=peak,
            peak_device_bytes=peak,
            capacity_bytes=CAPACITY,
            step_seconds=step,
            tokens_per_second=1 / step,
        )

    return price


class FakeSession:
    """Carries out orders on made-up numbers.

    `fails` maps a plan to a Failure for its build or run (or None); `loss` may bend the loss of a plan; `computes` is the share
    of a step that a rank of it computes.
    """

    def __init__(
        self,
        run_dir,
        clock,
        *,
        seconds=seconds_by_parts,
        memory=bytes_by_parts,
        fails=lambda plan: None,
        loss=lambda plan, step: 5.0 - 0.01 * step,
        noise=0.002,
        build_seconds=1.0,
        seed=0,
        stop_after=None,
        recompiles=lambda order: 0,
        host_bytes=1,
        computes=lambda plan, rank: 0.9,
    ):
        self.run_dir, self.clock, self.seconds, self.memory = run_dir, clock, seconds, memory
        self.fails, self.loss, self.noise, self.build_seconds = fails, loss, noise, build_seconds
        self.random, self.plan, self.step, self.number = random.Random(seed), None, 0, 0
        self.builds, self.stop_after, self.aside = [], stop_after, {}
        self.recompiles, self.limits, self.host_bytes, self.computes = recompiles, [], host_bytes, computes

    def _reply(self, seconds, failure=None):
        self.number += 1
        self.clock.now += seconds
        if self.stop_after is not None and self.number > self.stop_after:
            raise KeyboardInterrupt
        if failure:
            self.plan = None
        peak = self.memory(self.plan) if self.plan else 0
        return Reply(
            number=self.number,
            ok=failure is None,
            seconds=seconds,
            failure=failure,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            static_bytes=peak // 2,
            recompiles=self.recompiles(self.number),
        )

    def build(self, name, plan):
        assert self.plan is None, "what was built before must have been released"
        self.names = name
        if name in self.aside:
            self.plan, self.step = self.aside.pop(name)
            assert self.plan == plan
            return self._reply(0.01)
        seconds = self.build_seconds(plan, self.builds.count(name)) if callable(self.build_seconds) else self.build_seconds
        self.builds.append(name)
        self.plan, self.step = plan, 0
        return self._reply(seconds, self.fails(plan))

    def run(self, steps, label, profile=False, *, timeout_seconds=None):
        self.limits.append(timeout_seconds)
        began = self.clock.now
        noise = self.noise(self.plan) if callable(self.noise) else self.noise
        times = [self.seconds(self.plan) * (1 + self.random.gauss(0, noise)) for _ in range(steps)]
        for rank in range(self.plan.layout.world_size):
            self._write(rank, label, began, times)
            if profile:
                self._trace(rank, began, sum(times))
        self.step += steps
        return self._reply(sum(times))

    def set_aside(self):
        self.aside[self.names] = (self.plan, self.step)
        self.plan = None
        return self._reply(0.01)

    def holds(self, name):
        return name in self.aside

    def release(self):
        self.plan = None
        self.aside.clear()
        return self._reply(0.1)

    def _write(self, rank, label, began, times):
        writer = EventWriter(self.run_dir.events(rank))
        for number, seconds in enumerate(times):
            start, began = began, began + seconds
            loss = self.loss(self.plan, self.step + number)
            writer.write(
                StepEnd(
                    time_ns=int(began * 1e9),
                    step=self.step + number,
                    start_ns=int(start * 1e9),
                    samples=8,
                    tokens=8,
                    loss=loss,
                    grad_norm=1.0 if math.isfinite(loss) else loss,
                    lr=1e-3,
                    order=label,
                )
            )
            peak = self.memory(self.plan)
            writer.write(
                Memory(
                    time_ns=int(began * 1e9),
                    step=0,
                    allocated_bytes=peak,
                    reserved_bytes=peak,
                    peak_allocated_bytes=peak,
                    peak_reserved_bytes=peak,
                    device_used_bytes=peak,
                    host_bytes=self.host_bytes,
                )
            )
        writer.close()

    def _trace(self, rank, began, seconds):
        path = self.run_dir.trace(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        start, end = int(began * 1e9), int((began + self.computes(self.plan, rank) * seconds) * 1e9)
        middle = (start + end) // 2
        spans = [
            Span(time_ns=middle, step=0, phase="forward", start_ns=start, end_ns=middle, clock="device"),
            Span(time_ns=end, step=0, phase="backward", start_ns=middle, end_ns=end, clock="device"),
        ]
        with gzip.open(path, "ab") as out:
            out.write(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))


def oom(plan):
    return Failure(failure="out_of_memory", message="tried to allocate 8 GiB", rank=1)


def fake_cluster(*, kind="h200-sxm", has_compiler=True, num_devices=2):
    device = Device(
        kind=kind,
        name=kind,
        memory_bytes=Figure(value=CAPACITY, source="assumed"),
        peak_flops={"bf16": Figure(value=1e15, source="assumed")},
    )
    host = Host(cpu_name="cpu", num_cores=8, memory_bytes=2**37, has_compiler=has_compiler)
    link = Link(name="link", bandwidth=Figure(value=1e11, source="assumed"), latency=Figure(value=1e-6, source="assumed"))
    group = NodeGroup(count=1, num_devices=num_devices, device=device, host=host, link=link)
    return Cluster(name="fake", groups=(group,))


def fake_spec():
    weight = Parameter(name="w.weight", shape=(64, 64), role="weight")
    linear = Sublayer(name="w", kind="linear", parameters=(weight,), matmuls=(Matmul(name="w", n=64, k=64),))
    table = Parameter(name="embed.weight", shape=(128, 64), role="embedding")
    embedding = Sublayer(name="embed", kind="embedding", parameters=(table,))
    stack = Stack(path="layers", first=0, count=2, sublayers=(linear,))
    return ModelSpec(
        name="fake",
        family="module",
        hidden_size=64,
        vocab_size=128,
        max_sequence=0,
        tied_embeddings=True,
        embedding=(embedding,),
        stacks=(stack,),
        tail=(),
    )


def fake_plan(**parts):
    defaults = {
        "model": ModelRef(source="tiny"),
        "workload": Workload(sequence_length=64, samples_per_step=8),
        "layout": Layout(dp_replicate=2),
        "shard": Shard(carrier="ddp"),
        "batch": Batch(micro_batch=1, accumulation=4),
    }
    return Plan(**{**defaults, **parts})


AUTOCAST = Precision(cast="autocast", block="bf16", head="bf16")
