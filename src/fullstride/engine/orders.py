"""Carries out the orders found in a RUN_DIR, one after the other, on every rank alike."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch.distributed as dist

from fullstride.engine.assembly import Built, Writer, announce, assemble, release
from fullstride.engine.compiling import recompile_count
from fullstride.engine.moments import moment
from fullstride.engine.process import Ancestors, Place
from fullstride.engine.run import use_threads
from fullstride.engine.trace import Tracer, append_spans
from fullstride.errors import BadInput, TimedOut
from fullstride.events import RunEnd, now_ns
from fullstride.files import Value, write_json
from fullstride.plan.toml import read_plan
from fullstride.rundir import AsideOrder, BuildOrder, ExitOrder, Order, Reply, RunDir, RunOrder

POLL_SECONDS = 0.01
MEMORY_EVERY = 5
"""Steps between readings of memory inside an order."""
LAGGARD_SECONDS = 3600.0
"""Longest wait for the slowest rank to carry out an order; whoever gave it has a tighter limit."""
_decoder = msgspec.json.Decoder(Order)


class Told(Value, frozen=True, kw_only=True):
    """What a rank tells rank 0 after an order."""

    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    static_bytes: int = 0
    recompiles: int = 0


class OrderLoop:
    """One rank of a worker that waits for orders.

    Attributes:
        number: of the order in hand, for whoever reports a failure.
    """

    def __init__(self, place: Place, out: Writer, idle_seconds: float) -> None:
        """Begin behind the last order that has a reply."""
        self.number = last_reply(out.run_dir)
        self._place, self._out, self._idle_seconds = place, out, idle_seconds
        self._ancestors = Ancestors(2)
        self._built: Built | None = None
        self._name = ""
        self._aside: dict[str, Built] = {}

    def run(self) -> None:
        """Carry out orders until `exit`, until whoever started this is gone, or until none came for long."""
        while True:
            order = self._next()
            self.number, began = order.number, time.monotonic()
            if isinstance(order, ExitOrder):
                self._release()
                self._reply(began, Told())
                return
            compiled = recompile_count()
            if isinstance(order, BuildOrder):
                self._build(order)
            elif isinstance(order, RunOrder):
                self._run(order)
            elif isinstance(order, AsideOrder):
                self._set_aside()
            else:
                self._release()
            self._reply(began, self._told(recompile_count() - compiled))

    def _next(self) -> Order:
        """Rank 0 looks for the next order's file; the others are told by it."""
        raw = self._poll() if self._place.rank == 0 else b""
        wait = self._idle_seconds + 60.0
        try:
            return _decoder.decode(self._place.channel.broadcast(raw, what="the next order", seconds=wait))
        except TimedOut:
            return ExitOrder(number=self.number + 1)

    def _poll(self) -> bytes:
        path = self._out.run_dir.order(self.number + 1)
        began = looked = time.monotonic()
        while not path.exists():
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                if now - began > self._idle_seconds or self._ancestors.gone():
                    return msgspec.json.encode(ExitOrder(number=self.number + 1))
            time.sleep(POLL_SECONDS)
        return path.read_bytes()

    def _build(self, order: BuildOrder) -> None:
        if self._built:
            raise BadInput(f"order {order.number} builds {order.plan!r} before the last plan was released", fix="release first")
        plan = read_plan(self._out.run_dir.plan_named(order.plan))
        kept = self._aside.pop(order.plan, None)
        if kept and kept.plan != plan:
            raise BadInput(f"order {order.number} takes {order.plan!r} up again as another plan", fix="release first")
        self._built, self._name = kept or assemble(plan, self._place, self._out), order.plan
        if kept:
            use_threads(plan, self._place.device)
            return
        announce(self._built, order.plan, self._place, self._out)

    def _run(self, order: RunOrder) -> None:
        built = self._built
        if built is None:
            raise BadInput(f"order {order.number} runs steps and nothing is built", fix="build a plan first")
        tracer = Tracer(self._place.device) if order.profile else None
        if self._place.host_group:
            dist.barrier(self._place.host_group)
        built.recorder.begin()
        with tracer or nullcontext():
            for number in range(1, order.steps + 1):
                self._step(built, order, tracer, last=number == order.steps)
            built.recorder.finish()
        self._out.events.write(built.meter.read(built.run.step_index - 1))
        self._out.events.flush()
        if tracer:
            built.run.on_phase = lambda _name, **_where: nullcontext()
            append_spans(self._out.run_dir.trace(self._place.rank), tracer.spans())

    def _step(self, built: Built, order: RunOrder, tracer: Tracer | None, *, last: bool) -> None:
        step = built.run.step_index
        moment("step", step)
        waiting: AbstractContextManager[None] = nullcontext()
        if tracer:
            tracer.step(step)
            built.run.on_phase = tracer.phase
            waiting = tracer.phase("data")
        with waiting:
            batch = built.loader.next()
        result = built.run.step(batch)
        if last:
            built.run.ready()  # no step after it pays for what is still under way
        built.recorder.step(step, result, order.label)
        if step % MEMORY_EVERY == 0:
            self._out.events.write(built.meter.read(step))

    def _set_aside(self) -> None:
        if self._built:
            self._aside[self._name], self._built = self._built, None

    def _release(self) -> None:
        self._set_aside()
        while self._aside:
            release(self._aside.popitem()[1])
            self._out.events.write(RunEnd(time_ns=now_ns(), cause="released"))
            self._out.events.flush()

    def _told(self, recompiles: int) -> Told:
        if self._built is None:
            return Told(recompiles=recompiles)
        memory = self._built.meter.read(self._built.run.step_index)
        return Told(
            peak_allocated_bytes=memory.peak_allocated_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            static_bytes=memory.allocated_bytes,
            recompiles=recompiles,
        )

    def _reply(self, began: float, own: Told) -> None:
        """Rank 0 answers when every rank has carried the order out."""
        what = f"order {self.number} to be carried out"
        everybody = self._place.channel.gather(msgspec.json.encode(own), what=what, seconds=LAGGARD_SECONDS)
        if self._place.rank:
            return
        told = [msgspec.json.decode(raw, type=Told) for raw in everybody]
        largest = {name: max(getattr(one, name) for one in told) for name in Told.__struct_fields__}
        reply = Reply(number=self.number, ok=True, seconds=time.monotonic() - began, **largest)
        write_json(self._out.run_dir.reply(self.number), reply)


def last_reply(run_dir: RunDir) -> int:
    """The highest number that has been answered, 0 if none."""
    return max((int(path.name.split(".")[0]) for path in run_dir.orders.glob("*.reply.json")), default=0)
