"""Tensor parallelism, pipelines and adapters on two ranks, on a GPU each or on one together: one process's numbers, in bf16."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.engine import one_gpu
from tests.engine.one_gpu import CAST, CONFIG

from fullstride.engine.build import from_config
from fullstride.engine.run import prepare
from fullstride.plan.plan import (
    Adapter,
    Batch,
    Compile,
    Layout,
    Loss,
    ModelRef,
    Overlap,
    Pipeline,
    Plan,
    Recipe,
    Recompute,
    Shard,
    Workload,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SAMPLES, LENGTH, RANKS = 4, 1024, 2
COMPILED, CHUNKS = Compile(mode="block"), Loss(kind="chunked", chunk_tokens=1000)
PART, FULL = Recompute(mode="norm_activation"), Recompute(mode="full")
TENSOR, PIPE = {"layout": Layout(tp=2)}, {"layout": Layout(pp=2)}
BESIDE = Overlap(tensor=True)


def piped(schedule, chunks=1, **parts):
    return {**PIPE, "pipeline": Pipeline(schedule=schedule, chunks=chunks, **parts)}


CASES = {
    "tensor": TENSOR,
    "tensor, whole sequences": {"layout": Layout(tp=2, sequence_parallel=False)},
    "tensor, chunked loss": {**TENSOR, "loss": CHUNKS},
    "tensor, compiled": {**TENSOR, "compile": COMPILED, "loss": CHUNKS, "recompute": PART},
    "tensor in parts": {**TENSOR, "overlap": BESIDE},
    "tensor in parts, recomputed": {**TENSOR, "overlap": BESIDE, "recompute": FULL},
    "tensor in parts, compiled": {**TENSOR, "overlap": BESIDE, "compile": COMPILED, "recompute": PART},
    "1f1b": piped("1f1b"),
    "1f1b, sizes": piped("1f1b", micro_batch_per_stage=(1, 2)),
    "1f1b, compiled": {**piped("1f1b"), "compile": COMPILED, "loss": CHUNKS},
    "zb-h1, recomputed": {**piped("zb-h1"), "recompute": FULL},
    "zb-v": piped("zb-v", 2),
    "zb-v, compiled": {**piped("zb-v", 2), "compile": COMPILED, "recompute": PART},
    "interleaved, compiled": {**piped("interleaved", 2), "compile": COMPILED},
}


def course(layout, carrier="none", stage=0, **parts):
    """Losses and norms of some steps [steps, 2], with an evaluation between them."""
    torch._dynamo.reset()
    ranks = layout.data_parallel
    each = SAMPLES // ranks
    plan = Plan(
        model=ModelRef(source="test"),
        workload=Workload(sequence_length=LENGTH, samples_per_step=SAMPLES),
        recipe=Recipe(learning_rate=1e-5, warmup_steps=0, clip_norm=0.5),
        layout=layout,
        shard=Shard(carrier=carrier, stage=stage),
        batch=Batch(micro_batch=1, accumulation=each),
        **{"precision": CAST, **parts},
    )
    run, found = prepare(from_config(CONFIG, "test"), plan), []
    for seed in range(3):
        ids = torch.randint(0, 8191, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
        mine = ids[run.data_rank * each : (run.data_rank + 1) * each]
        batch = {"input_ids": mine, "labels": mine.masked_fill(mine % 5 == 0, -100)}
        found.append(run.step(batch))
        if seed == 1:
            run.evaluate(batch)
    told = torch.tensor([(out.loss, out.grad_norm) for out in found])
    run.close()
    return told


def close(name, found, wanted):
    assert torch.isfinite(found).all(), name
    torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=2e-3, atol=0, msg=lambda text: f"{name}: {text}")
    torch.testing.assert_close(found[:, 1], wanted[:, 1], rtol=2e-2, atol=0, msg=lambda text: f"{name}: {text}")


def work(rank, folder):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    low = {"adapter": Adapter(rank=8)}
    alone, adapted = course(Layout()), course(Layout(), **low)
    assert adapted[:, 1].sum() < alone[:, 1].sum()
    one_gpu.join(rank, RANKS, folder)
    for name, parts in CASES.items():
        close(name, course(**parts), alone)
    for carrier in ("fsdp2", "flat"):
        close(f"adapters, {carrier}", course(Layout(dp_shard=2), carrier, 2, **low), adapted)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=RANKS)
