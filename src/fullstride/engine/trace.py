"""A short profiled window, reduced to Spans: what each stretch of a step was spent on.

On a GPU: kernels by class and stream, each in the step and phase that launched it. On a CPU: the host's phases, out of which
communication is taken where no operator was running meanwhile, so that it counts as exposed. Neighbours of one kind merge.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fullstride.events import Phase, Span, now_ns

Kernel: TypeAlias = Literal["matmul", "attention", "collective", "copy", "elementwise", "optimizer"]
Stretch: TypeAlias = tuple[int, int]

MERGE_NS = 2_000
"""Spans of one kind that are no further apart become one."""
_ANCHOR = "fullstride::anchor"
_ANCHORS = 5
# First match wins; words of kernel names by cuBLAS, CUTLASS, cuDNN, FlashAttention, NCCL, Triton and ATen.
_CLASSES: tuple[tuple[Kernel, tuple[str, ...]], ...] = (
    ("collective", ("nccl",)),
    ("copy", ("memcpy", "memset", "copy_kernel", "copyfunctor", "catarray", "split_with_sizes", "chunk_cat")),
    ("attention", ("flash", "fmha", "sdpa", "attention", "mha_")),
    ("optimizer", ("adam", "multi_tensor_apply")),
    ("matmul", ("gemm", "cutlass", "cublas", "nvjet", "splitk", "matmul", "xmma", "s1688", "s16816")),
)
_COMMUNICATION = ("gloo:", "nccl:")
_MESSAGES = ("gloo:send", "gloo:recv")
"""Under way from the moment they are posted, long before anything waits for them; a pipeline tells its waits by phases."""
_WAITS = ("c10d", "wait_tensor")


def kernel_class(name: str) -> Kernel:
    """The class of a device kernel, by its name."""
    lower = name.lower()
    return next((kind for kind, words in _CLASSES if any(word in lower for word in words)), "elementwise")


class _Where(NamedTuple):
    """What the host was at: fields of a Span."""

    step: int
    phase: Phase
    micro_batch: int
    stage: int


class _Stretch(NamedTuple):
    start: int
    end: int
    where: _Where


class Tracer:
    """Profiles the steps of one order; `phase` and `step` go around what they name."""

    def __init__(self, device: torch.device) -> None:
        """Trace `device` and the host."""
        self._cuda = device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._cuda else [])
        self._profile: Any = profile(activities=activities, acc_events=True)  # without it torch warns
        self._phases: list[_Stretch] = []
        self._step = 0
        self._anchors: list[Stretch] = []

    def __enter__(self) -> Tracer:
        self._profile.__enter__()
        for _ in range(_ANCHORS):
            before = now_ns()
            with record_function(_ANCHOR):
                self._anchors.append((before, now_ns()))
        return self

    def __exit__(self, *error: Any) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._profile.__exit__(*error)

    def step(self, step: int) -> None:
        """What follows belongs to this step."""
        self._step = step

    @contextlib.contextmanager
    def phase(self, name: str, *, micro_batch: int = 0, stage: int = 0) -> Iterator[None]:
        """A stretch of the host's time inside a step; fits `Run.on_phase`."""
        start = now_ns()
        try:
            yield
        finally:
            where = _Where(self._step, cast("Phase", name), micro_batch, stage)
            self._phases.append(_Stretch(start, now_ns(), where))

    def spans(self) -> list[Span]:
        """The window's spans, by start; called once it is closed."""
        events: list[Any] = list(self._profile.events() or [])
        offset = self._offset(int(event.time_range.start * 1000) for event in events if event.name == _ANCHOR)
        timed = [_Timed(event, offset) for event in events if event.name != _ANCHOR]
        spans = self._device_spans(timed) + self._host_spans(()) if self._cuda else self._host_spans(timed)
        return merged(spans)

    def _offset(self, starts: Iterable[int]) -> int:
        """Nanoseconds to add to the profiler's clock: each anchor began between two readings of the host's clock."""
        bounds = [(before - start, after - start) for (before, after), start in zip(self._anchors, starts, strict=True)]
        return (max(low for low, _ in bounds) + min(high for _, high in bounds)) // 2

    def _device_spans(self, events: list[_Timed]) -> list[Span]:
        # A kernel and the runtime call that launched it carry one correlation number.
        launched = {e.number: e.start for e in events if not e.on_device and e.name.startswith(("cuda", "cu"))}
        spans = []
        for event in events:
            if not event.on_device or event.end <= event.start:
                continue
            where = self._at(launched.get(event.number, event.start))
            kind = kernel_class(event.name)
            phase = "comm" if kind == "collective" else "h2d" if "HtoD" in event.name else where.phase
            stretch = event.start, event.end
            spans.append(_span(where._replace(phase=phase), stretch, clock="device", stream=event.stream, kernel=kind))
        return spans

    def _at(self, time_ns: int) -> _Where:
        """Where the host was at a moment: in the last phase that had begun by then."""
        index = bisect.bisect_right(self._phases, time_ns, key=lambda phase: phase.start) - 1
        return self._phases[max(0, index)].where if self._phases else _Where(self._step, "forward", 0, 0)

    def _host_spans(self, events: Iterable[_Timed]) -> list[Span]:
        operators, talking = [], []
        for event in events:
            if event.name.startswith(_MESSAGES):
                continue
            if event.name.startswith(_COMMUNICATION):
                talking.append((event.start, event.end))
            elif event.name.startswith("aten::") and not any(word in event.name for word in _WAITS):
                operators.append((event.start, event.end))
        exposed = minus(union(talking), union(operators))
        spans = []
        for start, end, where in self._phases:
            inside = minus([(start, end)], exposed)
            spans += [_span(where, stretch) for stretch in inside]
            waited = minus([(start, end)], inside)
            spans += [_span(where._replace(phase="comm"), stretch, kernel="collective") for stretch in waited]
        return spans


class _Timed:
    """One event of the profiler on the host's clock."""

    def __init__(self, event: Any, offset_ns: int) -> None:
        self.name = str(event.name)
        self.start = int(event.time_range.start * 1000) + offset_ns
        self.end = int(event.time_range.end * 1000) + offset_ns
        self.on_device = event.device_type.name == "CUDA"
        self.stream = int(getattr(event, "device_resource_id", 0) or 0)
        self.number = int(event.id)


def _span(where: _Where, stretch: Stretch, **more: Any) -> Span:
    return Span(time_ns=stretch[1], start_ns=stretch[0], end_ns=stretch[1], **where._asdict(), **more)


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Disjoint stretches in order that cover the same moments."""
    found: list[Stretch] = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > start:
            found.append((start, end))
    return found


def minus(stretches: list[Stretch], taken: list[Stretch]) -> list[Stretch]:
    """What of disjoint, ordered stretches is not in other disjoint, ordered stretches."""
    found = []
    for begin, end in stretches:
        start = begin
        first = max(0, bisect.bisect_right(taken, start, key=lambda s: s[0]) - 1)
        for low, high in taken[first:]:
            if low >= end:
                break
            if low > start:
                found.append((start, min(low, end)))
            start = max(start, high)
        if start < end:
            found.append((start, end))
    return found


def merged(spans: list[Span]) -> list[Span]:
    """Neighbours of one step, phase, clock, stream and class made one, where they nearly touch."""
    groups: dict[tuple[Any, ...], list[Span]] = {}
    for span in sorted(spans, key=lambda s: s.start_ns):
        key = (span.step, span.phase, span.clock, span.stream, span.kernel, span.micro_batch, span.stage)
        group = groups.setdefault(key, [])
        if group and span.start_ns <= group[-1].end_ns + MERGE_NS:
            end = max(span.end_ns, group[-1].end_ns)
            group[-1] = msgspec.structs.replace(group[-1], end_ns=end, time_ns=end)
        else:
            group.append(span)
    return sorted((span for group in groups.values() for span in group), key=lambda s: s.start_ns)


def append_spans(path: Path, spans: Iterable[Span]) -> None:
    """Add spans to a rank's trace as one more gzip member; readers see the members one after the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    encode: Callable[[Span], bytes] = msgspec.json.Encoder().encode
    with open(path, "ab") as out:
        out.write(gzip.compress(b"".join(encode(span) + b"\n" for span in spans), mtime=0))
