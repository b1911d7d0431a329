"""ZeRO on flat buffers on a GPU each, or on one together: the numbers of one process, and of FSDP2, in bf16; streams that
overtake nothing.
"""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.engine import one_gpu
from tests.engine.one_gpu import CAST, CONFIG

from fullstride.engine.build import from_config
from fullstride.engine.run import prepare
from fullstride.plan.plan import (
    Batch,
    Comm,
    Compile,
    Layout,
    Loss,
    ModelRef,
    Overlap,
    Plan,
    Precision,
    Recipe,
    Recompute,
    Shard,
    Workload,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BF16_SUMS = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", reduction="bf16")
SAMPLES, LENGTH, RANKS = 4, 1024, 2


def course(carrier, stage, *, accumulation=2, steps=4, tied=False, rate=1e-5, **parts):
    """Losses and norms of some steps [steps, 2], with an evaluation between them."""
    torch._dynamo.reset()
    ranks = 1 if carrier == "none" else RANKS
    plan = Plan(
        model=ModelRef(source="test"),
        workload=Workload(sequence_length=LENGTH, samples_per_step=SAMPLES),
        recipe=Recipe(learning_rate=rate, warmup_steps=0, clip_norm=0.5),
        layout=Layout(dp_shard=ranks),
        shard=Shard(carrier=carrier, stage=stage),
        batch=Batch(micro_batch=SAMPLES // ranks // accumulation, accumulation=accumulation),
        **{"precision": CAST, **parts},
    )
    run = prepare(from_config({**CONFIG, "tie_word_embeddings": tied}, "test"), plan)
    found = []
    for seed in range(steps):
        ids = torch.randint(0, 8191, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
        each = SAMPLES // ranks
        mine = ids[run.data_rank * each : (run.data_rank + 1) * each]
        out = run.step({"input_ids": mine, "labels": mine.masked_fill(mine % 5 == 0, -100)})
        if seed == 1:
            run.evaluate({"input_ids": mine, "labels": mine})
        found.append(out)  # read after all steps: nothing waits in between
    told = torch.tensor([(out.loss, out.grad_norm) for out in found])
    run.close()
    return told


def close(found, wanted, loss=2e-3, norm=2e-2):
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=loss, atol=0)
    torch.testing.assert_close(found[:, 1], wanted[:, 1], rtol=norm, atol=0)


def check_one_process(alone):
    for stage in (1, 2, 3):
        close(course("flat", stage), alone)


def check_stages(_):
    for accumulation in (1, 2):
        wanted = course("fsdp2", 2, accumulation=accumulation)
        for stage in (1, 2, 3):
            close(course("flat", stage, accumulation=accumulation), wanted)
    wide = course("fsdp2", 2, precision=Precision())
    close(course("flat", 2, precision=Precision()), wide, 1e-5, 1e-4)
    close(course("flat", 3, precision=Precision()), wide, 1e-5, 1e-4)
    close(course("flat", 2), wide)  # bf16 against fp32


def check_settings(_):
    wanted = course("fsdp2", 2)
    for parts in (
        {"precision": BF16_SUMS},
        {"loss": Loss(kind="chunked", chunk_tokens=1000)},
        {"recompute": Recompute(mode="full")},
        {"compile": Compile(mode="block")},
        {"compile": Compile(mode="block"), "recompute": Recompute(mode="norm_activation")},
    ):
        for stage in (2, 3):
            close(course("flat", stage, **parts), wanted)
    close(course("flat", 3, overlap=Overlap(prefetch=3)), wanted)
    if dist.get_backend() != "staged":
        for carrier in ("flat", "fsdp2"):
            close(course(carrier, 2, comm=Comm(ctas=4)), wanted)
    close(course("flat", 3, tied=True), course("fsdp2", 3, tied=True))


def check_streams(_):
    """Long kernels before whatever runs on a side stream: whoever does not wait for it reads or overwrites too early."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    parts = {"rate": 1e-3}  # a step that is missed shows
    wanted = {stage: course("flat", stage, **parts) for stage in (1, 2, 3)}
    original = torch.cuda.Stream.wait_stream
    spun = []

    def slow(stream, other):
        original(stream, other)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # about a millisecond before each collective
        spun.append(stream)

    torch.cuda.Stream.wait_stream = slow
    try:
        for stage in (1, 2, 3):
            spun.clear()
            close(course("flat", stage, **parts), wanted[stage], 1e-6, 1e-5)
            assert len(spun) > 8
    finally:
        torch.cuda.Stream.wait_stream = original
        torch.use_deterministic_algorithms(False)


def work(rank, folder):
    warnings.simplefilter("ignore")  # deterministic algorithms name what has none
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    alone = course("none", 0)  # before there is a group
    one_gpu.join(rank, RANKS, folder)
    for check in (check_one_process, check_stages, check_settings, check_streams):
        check(alone)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=RANKS)
