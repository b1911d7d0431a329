"""Times what a step is made of, in a process of its own: products, attention, copies, disk, collectives.

    python -m fullstride.cluster.linkbench --out FILE --part device --seconds 10
    python -m torch.distributed.run ... -m fullstride.cluster.linkbench --out FILE --part links --seconds 10

The only file outside the engine that imports torch; nothing imports it. Data is random (zeros draw less power and run
faster than any training: 894 against 788 TFLOP/s on an H200), times are medians after warm-up, and each part ends at its
time budget, saying what it left out. The environment is passed on as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fullstride.cluster.cluster import AttentionPoint, CollectiveName, CollectivePoint, DType, Figure, MatmulPoint
from fullstride.cluster.diskbench import disk_rates
from fullstride.cluster.readings import FigureName, Readings
from fullstride.files import write_json

_nccl: Any = torch.cuda.nccl  # without types of its own
_cudnn: Any = torch.backends.cudnn
DTYPES: dict[DType, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
# (n, k) of linears from 1B to 70B, square and not, then heads over 128k words; the first are the ones that matter most.
GPU_SHAPES: tuple[tuple[int, int], ...] = (
    (4096, 4096),
    (14336, 4096),
    (4096, 14336),
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
    (128256, 4096),
)
GPU_SHAPES += (
    (128256, 2048),
    (6144, 4096),
    (1024, 4096),
    (3072, 2048),
    (512, 2048),
    (8192, 8192),
    (28672, 8192),
    (8192, 28672),
)
GPU_TOKENS = (8192, 2048, 32768, 1024, 16384, 4096)
CPU_SHAPES = (
    (256, 256),
    (1024, 256),
    (256, 1024),
    (512, 512),
    (2048, 512),
    (512, 2048),
    (1024, 1024),
    (8192, 256),
    (4096, 1024),
)
CPU_TOKENS = (512, 128, 2048)
LARGEST_PRODUCT = 2.5e13
"""FLOP of one timed product at most."""
# (batch, heads, KV heads, head size, sequence)
GPU_ATTENTION: tuple[tuple[int, ...], ...] = tuple((1, 32, 8, d, s) for d in (128, 64) for s in (8192, 2048, 4096, 1024, 16384))
GPU_ATTENTION += ((4, 32, 8, 64, 2048), (1, 32, 32, 128, 4096), (1, 8, 2, 128, 8192))
CPU_ATTENTION: tuple[tuple[int, ...], ...] = (
    (1, 4, 4, 64, 256),
    (1, 8, 8, 64, 512),
    (4, 4, 4, 64, 256),
    (1, 8, 4, 32, 128),
    (1, 4, 4, 64, 1024),
)
OPERATIONS: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
GPU_BYTES = (2**26, 2**20, 2**29, 2**16, 2**23, 2**12, 2**31)
CPU_BYTES = (2**20, 2**12, 2**24, 2**16, 2**22)


class Budget:
    """Seconds that may be spent, and what had to be left out."""

    def __init__(self, seconds: float) -> None:
        """Start the clock."""
        self.end = time.monotonic() + seconds
        self.notes: list[str] = []

    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.end - time.monotonic()


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _seconds(call: Callable[[], Any], device: torch.device, *, enough: float = 0.05) -> float:
    """Median time of a call. Calls are timed in batches of about a millisecond, so that the timer does not show."""
    call()
    _sync(device)
    start = time.perf_counter()
    call()
    _sync(device)
    once = max(time.perf_counter() - start, 1e-7)
    batch = max(1, min(1000, int(1e-3 / once)))
    repeats = max(3, min(15, int(enough / (once * batch))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        _sync(device)
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times)


def matmuls(device: torch.device, budget: Budget) -> Iterator[MatmulPoint]:
    """Linear layers by dtype and shape, the most telling first, until the budget is spent."""
    gpu = device.type == "cuda"
    wanted = list(_products(gpu))
    dtypes = {dtype for dtype, *_ in wanted}
    size = max(max(m * k, n * k) for _, m, n, k in wanted)
    pools = {dtype: torch.randn(size, device=device, dtype=DTYPES[dtype]) for dtype in dtypes}
    for done, (dtype, m, n, k) in enumerate(wanted):
        if budget.left() <= 0:
            budget.notes.append(f"matmul: {len(wanted) - done} of {len(wanted)} shapes left out, the time was over")
            return
        a, b = pools[dtype][: m * k].view(m, k), pools[dtype][-n * k :].view(n, k)
        yield MatmulPoint(dtype=dtype, m=m, n=n, k=k, seconds=_seconds(partial(F.linear, a, b), device))


def _products(gpu: bool) -> Iterator[tuple[DType, int, int, int]]:
    """(dtype, m, n, k) in the order of their worth: training on a GPU is bf16, fp32 is a few points behind it."""
    if not gpu:
        yield from ((dtype, m, n, k) for m in CPU_TOKENS for n, k in CPU_SHAPES for dtype in ("fp32", "bf16"))
        return
    yield from (("bf16", m, n, k) for m in GPU_TOKENS for n, k in GPU_SHAPES if 2.0 * m * n * k < LARGEST_PRODUCT)
    yield from (("fp32", m, n, k) for m in GPU_TOKENS[:2] for n, k in GPU_SHAPES if n < 100_000)


def attentions(device: torch.device, budget: Budget) -> Iterator[AttentionPoint]:
    """Causal attention, forward and backward."""
    gpu = device.type == "cuda"
    dtypes: tuple[DType, ...] = ("bf16",) if gpu else ("fp32", "bf16")
    wanted = [(dtype, shape) for shape in (GPU_ATTENTION if gpu else CPU_ATTENTION) for dtype in dtypes]
    for done, (dtype, (batch, heads, kv_heads, dim, seq)) in enumerate(wanted):
        if budget.left() <= 0:
            budget.notes.append(f"attention: {len(wanted) - done} of {len(wanted)} shapes left out, the time was over")
            return
        q, k, v = (_random((batch, h, seq, dim), dtype, device) for h in (heads, kv_heads, kv_heads))
        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        yield AttentionPoint(
            dtype=dtype,
            batch=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            sequence_length=seq,
            forward_seconds=_seconds(forward, device),
            backward_seconds=_seconds(backward, device),
        )


def _random(shape: tuple[int, ...], dtype: DType, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True)


def _measured(value: float, note: str) -> Figure:
    return Figure(value=value, source="measured", note=note)


def figures(device: torch.device, disk_folder: str, quick: bool, budget: Budget) -> dict[FigureName, Figure]:
    """Copies and the cost of a launch; with a folder for the disk also what concerns the whole host."""
    gpu = device.type == "cuda"
    found: dict[FigureName, Figure] = {}
    size = 2**30 if gpu else 2**26
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * size / _seconds(lambda: target.copy_(source), device)
    found["device.memory_bandwidth"] = _measured(rate, f"copy of {size >> 20} MiB, read plus write")
    tiny = torch.randn(1, device=device)
    found["device.launch_seconds"] = _measured(_launch(tiny, device), "eager add_ of one number, host time")
    if gpu:
        host = torch.randint(0, 255, (2**28,), dtype=torch.uint8).pin_memory()
        part = target[: 2**28]
        note = "256 MiB of pinned memory, one device"
        found["host.host_to_device"] = _measured(2**28 / _seconds(lambda: part.copy_(host, non_blocking=True), device), note)
        found["host.device_to_host"] = _measured(2**28 / _seconds(lambda: host.copy_(part, non_blocking=True), device), note)
    if not disk_folder:
        return found
    found["host.memory_bandwidth"] = _host_copy()
    for name, value, note in disk_rates(disk_folder, 2**26 if quick else 2**29):
        if value is None:
            budget.notes.append(f"disk: {note}")
        else:
            found["host.disk_write" if name == "write" else "host.disk_read"] = _measured(value, note)
    return found


def _launch(tiny: torch.Tensor, device: torch.device) -> float:
    """Host time of one eager operator while the device's queue has room."""
    times = []
    for _ in range(9):
        _sync(device)
        start = time.perf_counter()
        for _ in range(100):
            tiny.add_(1.0)
        times.append((time.perf_counter() - start) / 100)
    return statistics.median(times)


def _host_copy() -> Figure:
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
    try:
        source = torch.randint(0, 255, (2**27,), dtype=torch.uint8)
        target = torch.empty_like(source)
        seconds = _seconds(lambda: target.copy_(source), torch.device("cpu"))
        return _measured(2 * source.numel() / seconds, f"copy of 128 MiB by {torch.get_num_threads()} threads, read plus write")
    finally:
        torch.set_num_threads(threads)


def bench_device(device: torch.device, seconds: float, disk_folder: str, quick: bool) -> Readings:
    """Everything that one rank does alone."""
    budget = Budget(seconds)
    points = tuple(matmuls(device, _share(budget, 0.7)))
    attention = tuple(attentions(device, budget))
    found = figures(device, disk_folder, quick, budget)
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "cudnn": str(_cudnn.version())}
    return Readings(matmuls=points, attentions=attention, figures=found, versions=versions, notes=tuple(budget.notes))


def _share(budget: Budget, share: float) -> Budget:
    """A budget that ends earlier and notes in the same place."""
    part = Budget(budget.left() * share)
    part.notes = budget.notes
    return part


def bench_links(device: torch.device, seconds: float) -> Readings:
    """Collectives over all local ranks, and over 2, 4, ... of them; rank 0 returns the points."""
    budget, world = Budget(seconds), dist.get_world_size()
    counts = sorted({world, *(n for n in (2, 4, 8) if n < world)}, reverse=True)
    points: list[CollectivePoint] = []
    for count in counts:
        # Everybody makes every group; only its members time it.
        group = dist.new_group(list(range(count))) if count < world else dist.group.WORLD
        if dist.get_rank() < count:
            points += _time_group(device, count, group, _share(budget, 0.7 if count == world and len(counts) > 1 else 1.0))
        dist.barrier()
    versions = {}
    if device.type == "cuda":
        versions["nccl"] = ".".join(map(str, _nccl.version()))
    note = f"small messages, {dist.get_backend()}"
    small = [p.seconds for p in points if p.op == "send_recv" and p.ranks == world and p.bytes <= 2**16]
    large = [p.bytes / p.seconds for p in points if p.op == "send_recv" and p.ranks == world]
    found: dict[FigureName, Figure] = {}
    if small and large:
        found["link.latency"] = _measured(min(small), note)
        found["link.bandwidth"] = _measured(max(large), "largest rate of send and receive between two ranks, one way")
    return Readings(collectives=tuple(points), figures=found, versions=versions, notes=tuple(budget.notes))


def _time_group(device: torch.device, count: int, group: Any, budget: Budget) -> list[CollectivePoint]:
    sizes = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    points: list[CollectivePoint] = []
    failed: set[str] = set()
    for done, size in enumerate(sizes):
        for op in OPERATIONS:
            # All must agree on whether there is time, or some would wait for the others.
            go = torch.tensor([budget.left()], device=device)
            dist.all_reduce(go, op=dist.ReduceOp.MIN, group=group)
            if go.item() <= 0:
                budget.notes.append(f"links: {len(sizes) - done} of {len(sizes)} sizes cut short, the time was over")
                return points
            if op in failed:
                continue
            try:
                points.append(
                    CollectivePoint(op=op, ranks=count, bytes=size, seconds=_time_one(op, size, device, count, group))
                )
            except (RuntimeError, NotImplementedError) as error:
                failed.add(op)
                budget.notes.append(f"links: {op} is not supported here ({str(error).splitlines()[0][:120]})")
    return points


def _time_one(op: CollectiveName, size: int, device: torch.device, count: int, group: Any) -> float:
    """Seconds of one collective: the median of a few, the slowest rank's."""
    call = _collective(op, size, device, count, group)
    call()
    _sync(device)
    times = []
    for _ in range(5):
        dist.barrier(group=group)
        _sync(device)
        batch = 4 if size < 2**24 else 1
        start = time.perf_counter()
        for _ in range(batch):
            call()
        _sync(device)
        times.append((time.perf_counter() - start) / batch)
    ways = 2 if op == "send_recv" else 1
    slowest = torch.tensor([statistics.median(times) / ways], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest.item())


def _collective(op: CollectiveName, size: int, device: torch.device, count: int, group: Any) -> Callable[[], Any]:
    numbers = max(count, size // 4 // count * count)
    full, part = torch.rand(numbers, device=device), torch.rand(numbers // count, device=device)
    other = torch.empty_like(full)
    rank = dist.get_rank()
    if op == "send_recv":

        def exchange() -> None:  # from rank 0 to rank 1 and back
            for sender in (0, 1):
                if rank == sender:
                    dist.send(full, 1 - sender, group=group)
                elif rank == 1 - sender:
                    dist.recv(full, sender, group=group)

        return exchange
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full, group=group),
        "broadcast": lambda: dist.broadcast(full, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
    }
    return calls[op]


def main(arguments: list[str] | None = None) -> int:
    """Bench one part and write its Readings."""
    parser = argparse.ArgumentParser(prog="fullstride.cluster.linkbench")
    parser.add_argument("--out", required=True)
    parser.add_argument("--part", choices=("device", "links"), required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--disk", default="", help="folder on the disk to time; empty: leave the host's figures out")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(arguments)
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.part == "device":
        readings = bench_device(torch.device(kind), args.seconds, args.disk, args.quick)
        write_json(args.out, readings)
        return 0
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    readings = bench_links(device, args.seconds)
    if dist.get_rank() == 0:
        write_json(args.out, readings)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
