import contextlib
import gzip
import itertools
import os
import signal
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist

from fullstride.engine.channel import Channel
from fullstride.engine.failures import NotFinite, failure_of, missing
from fullstride.engine.memory_stats import MemoryMeter
from fullstride.engine.orders import last_reply
from fullstride.engine.recorder import StepRecorder
from fullstride.engine.signals import StopFlag
from fullstride.engine.trace import Tracer, append_spans, kernel_class, merged, minus, union
from fullstride.errors import BadInput, EnvironmentFault, TimedOut, UsageError
from fullstride.events import EventWriter, Span, StepEnd, read_events
from fullstride.rundir import Failure, RunDir
from fullstride.testing.clock import FakeClock
from fullstride.testing.faults import Fault, parse_fault

CPU = torch.device("cpu")


def test_kernels_are_known_by_their_names():
    names = {
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collective",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT": "matmul",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": "attention",
        "Memcpy HtoD (Pinned -> Device)": "copy",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<float>>": "copy",
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": "elementwise",
        "triton_poi_fused_mul_silu_0": "elementwise",
    }
    assert {name: kernel_class(name) for name in names} == names


def test_arithmetic_of_stretches():
    assert union([(5, 7), (0, 2), (1, 3), (4, 4)]) == [(0, 3), (5, 7)]
    assert minus([(0, 10), (20, 30)], [(2, 4), (8, 22), (29, 40)]) == [(0, 2), (4, 8), (22, 29)]
    assert minus([(0, 5)], []) == [(0, 5)]


def span(start, end, **more):
    return Span(**{"time_ns": end, "step": 0, "phase": "forward", "start_ns": start, "end_ns": end, **more})


def test_only_neighbours_of_one_kind_merge():
    spans = [span(0, 10), span(500, 900), span(900, 1000, kernel="matmul"), span(10_000, 10_001)]
    assert [(s.start_ns, s.end_ns, s.kernel) for s in merged(spans)] == [
        (0, 900, ""),
        (900, 1000, "matmul"),
        (10_000, 10_001, ""),
    ]


def test_a_message_that_was_posted_ahead_is_no_communication_that_anything_waits_for():
    tracer = Tracer(CPU)
    with tracer:
        tracer.step(1)
        with torch.profiler.record_function("gloo:recv"), tracer.phase("forward"):
            time.sleep(0.02)
        with torch.profiler.record_function("gloo:recv"), tracer.phase("comm", stage=1):
            time.sleep(0.01)
    forward, comm = tracer.spans()
    assert (forward.phase, comm.phase, comm.stage) == ("forward", "comm", 1)
    assert forward.end_ns - forward.start_ns >= 0.02e9 and comm.end_ns - comm.start_ns >= 0.01e9


def test_a_trace_has_the_phases_with_communication_taken_out(tmp_path):
    tracer = Tracer(CPU)
    with tracer:
        for step in (4, 5):
            tracer.step(step)
            with tracer.phase("forward"):
                torch.ones(200, 200) @ torch.ones(200, 200)
                with torch.profiler.record_function("gloo:all_reduce"):
                    time.sleep(0.02)
            with tracer.phase("optimizer"):
                torch.ones(10).add_(1)
    spans = tracer.spans()
    assert {(s.step, s.phase) for s in spans} == {
        (4, "forward"),
        (4, "comm"),
        (5, "forward"),
        (5, "comm"),
        (4, "optimizer"),
        (5, "optimizer"),
    }
    comm = sum(s.end_ns - s.start_ns for s in spans if s.phase == "comm")
    assert comm >= 0.035e9
    append_spans(tmp_path / "t.gz", spans[:2])
    append_spans(tmp_path / "t.gz", spans[2:])
    lines = gzip.decompress((tmp_path / "t.gz").read_bytes()).splitlines()
    assert [msgspec.json.decode(line, type=Span) for line in lines] == spans


@pytest.mark.parametrize(
    ("error", "kind", "rank", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB."), "out_of_memory", 3, int(1.5 * 2**30)),
        (MemoryError(), "out_of_memory", 3, 0),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory", 3, 0),
        (NotFinite("the loss of step 3 is nan"), "not_finite", 3, 0),
        (EnvironmentFault("compile.mode is block, but there is no C++ compiler on this host"), "unavailable", 3, 0),
        (EnvironmentFault("disk is full"), "environment", 3, 0),
        (BadInput("no such preset"), "refused", 3, 0),
        (TimedOut("waited 3 s for rank 1"), "hang", 3, 0),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), "hang", 3, 0),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), "crash", -1, 0),
        (ValueError("shapes differ"), "crash", 3, 0),
    ],
)
def test_failures_have_a_class_and_a_rank(error, kind, rank, wanted):
    failure = failure_of(error, 3)
    assert (failure.failure, failure.rank, failure.wanted_bytes) == (kind, rank, wanted)
    assert failure.message
    assert "\n" not in failure.message


def result(loss):
    return SimpleNamespace(loss=loss, tokens=7, grad_norm=1.0, lr=0.1, skipped=False)


def test_steps_are_written_late_and_without_gaps(tmp_path):
    path = tmp_path / "e.jsonl"
    with contextlib.closing(EventWriter(path)) as writer:
        recorder = StepRecorder(writer, CPU, 4)
        for step in range(3):
            recorder.step(step, result(float(step)), "order")
        recorder.finish()
    steps = list(read_events(path))
    assert [(s.step, s.loss, s.samples, s.order) for s in steps] == [(i, float(i), 4, "order") for i in range(3)]
    assert all(a.time_ns == b.start_ns for a, b in itertools.pairwise(steps))


def test_a_loss_that_is_no_number_is_written_and_then_raised(tmp_path):
    path = tmp_path / "e.jsonl"
    with contextlib.closing(EventWriter(path)) as writer:
        recorder = StepRecorder(writer, CPU, 4)
        for step, loss in enumerate([1.0, float("inf")]):
            recorder.step(step, result(loss))
        with pytest.raises(NotFinite, match="loss of step 1 is inf"):
            recorder.finish()
    assert len([e for e in read_events(path) if isinstance(e, StepEnd)]) == 2


def test_memory_of_a_cpu_grows_with_what_is_held():
    meter = MemoryMeter(CPU)
    before = meter.read(0)
    held = torch.ones(8 << 20)  # 32 MiB
    during = meter.read(1)
    assert during.allocated_bytes - before.allocated_bytes > 0.9 * held.nbytes
    del held
    after = meter.read(2)
    assert after.peak_allocated_bytes >= during.allocated_bytes
    assert during.reserved_bytes == during.device_used_bytes == during.host_bytes
    meter.reset()
    assert meter.read(3).peak_allocated_bytes < 16 << 20


def channels(count):
    store = dist.HashStore()
    return [Channel(store, rank, count) for rank in range(count)]


def test_ranks_talk_through_the_store():
    ends, heard = channels(3), {}

    def talk(end):
        told = end.broadcast(b"order", what="an order", seconds=10)
        heard[end.rank] = (told, end.gather(str(end.rank).encode(), what="replies", seconds=10))

    threads = [threading.Thread(target=talk, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert heard == dict.fromkeys(range(3), (b"order", [b"0", b"1", b"2"]))
    assert [end.claim("failure") for end in ends] == [True, False, False]


def test_a_silent_rank_is_named_when_the_wait_ends():
    with pytest.raises(TimedOut, match=r"waited 0 s for rank 1: replies"):
        channels(2)[0].gather(b"", what="replies", seconds=0.2)


def test_what_ranks_leave_is_heard_and_the_last_one_is_not_waited_for_long():
    ends = channels(3)
    ends[0].tell("waits", "for 1")
    assert ends[2].told("waits", 0.2) == {0: "for 1"}
    ends[2].tell("waits", "for 1 too")
    began = time.monotonic()
    assert ends[2].told("waits", 30.0) == {0: "for 1", 2: "for 1 too"}
    assert time.monotonic() - began < 10
    assert Channel(None, 0, 1).told("waits", 30.0) == {}


def test_a_hang_is_the_fault_of_the_rank_that_is_not_heard_of():
    said = "stage 3 (rank 3) waited 8 s for activations from stage 2 (rank 2)"
    hang = Failure(failure="hang", message=said, rank=3)
    told = {0: "stage 0 (rank 0) waited 8 s for gradients from stage 1 (rank 1)", 3: said}
    found = missing(hang, told | {2: "stage 2 (rank 2) waited 8 s for activations from stage 1 (rank 1)"}, 4)
    assert (found.rank, found.message) == (1, f"rank 1 did not come; {told[0]}")
    late = missing(hang, told, 4)
    assert (late.rank, late.message) == (3, f"{said} (not heard of: ranks 1, 2)")
    assert missing(hang, dict.fromkeys(range(4), said), 4) == hang
    found = missing(msgspec.structs.replace(hang, message="Timed out waiting 8000ms"), {0: "lost", 1: "lost", 3: "-"}, 4)
    assert (found.rank, found.message) == (2, "rank 2 did not come; rank 3 waited in vain: Timed out waiting 8000ms")


def test_a_signal_asks_for_the_end_and_handlers_are_given_back():
    before = signal.getsignal(signal.SIGTERM)
    flag = StopFlag(None)
    assert not flag.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.agreed()
    flag.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_orders_go_on_behind_the_last_reply(tmp_path):
    run_dir = RunDir(root=str(tmp_path))
    assert last_reply(run_dir) == 0
    run_dir.orders.mkdir()
    for path in (run_dir.reply(1), run_dir.reply(12), run_dir.order(13)):
        path.write_text("{}")
    assert last_reply(run_dir) == 12


def test_faults_are_read_as_they_are_written():
    fault = Fault(action="kill", moment="staged", step=3, rank=1)
    assert parse_fault(fault.text()) == fault
    with pytest.raises(UsageError, match="is no fault"):
        parse_fault("kill:lunch:3:1")


def test_fake_time_passes_only_when_told():
    clock = FakeClock(10.0)
    clock.sleep(2.5)
    clock.advance(1.0)
    assert (clock(), clock.slept) == (13.5, [2.5])
