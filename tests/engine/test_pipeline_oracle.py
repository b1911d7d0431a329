"""torch's own pipeline schedules, on what they can do: one micro-batch size, a model cut by hand. Gradients are compared."""

import socket

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from fullstride.engine.loss import IGNORED
from fullstride.engine.parity_cases import PlainModel, make_case
from fullstride.engine.run import prepare
from fullstride.plan.schedule.placement import placement_of

SAMPLES, LENGTH, VOCAB, DEPTH = 4, 12, 61, 4
SCHEDULES = {
    "1f1b": (Schedule1F1B, 1),
    "gpipe": (ScheduleGPipe, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "bfs": (ScheduleLoopedBFS, 2),
    "zb-v": (ScheduleZBVZeroBubble, 2),
}
if torch.__version__ < "2.12":
    del SCHEDULES["zb-v"]  # theirs sends a rank's own shapes to itself, which gloo does not


class Part(nn.Module):
    """A stage cut by hand."""

    def __init__(self, model, stage, stages):
        super().__init__()
        each, last = DEPTH // stages, stage == stages - 1
        self.table = None if stage else model.table
        self.stack = model.stack[stage * each : (stage + 1) * each]
        self.last_norm, self.to_vocab = (model.last_norm, model.to_vocab) if last else (None, None)

    def forward(self, x):
        x = self.table(x) if self.table is not None else x
        for block in self.stack:
            x = block(x)
        return x if self.to_vocab is None else self.to_vocab(self.last_norm(x))


def model_of():
    torch.manual_seed(5)
    return PlainModel(depth=DEPTH).double()


def batch_of():
    ids = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    return ids, torch.where(ids % 3 == 0, IGNORED, ids)


def theirs(name, rank):
    """Gradients of torch's schedule by name of the whole model's parameters, on the rank that holds them."""
    model, (ids, labels) = model_of(), batch_of()
    counted = int((labels[:, 1:] != IGNORED).sum())

    def loss(logits, target):
        flat = logits[:, :-1].reshape(-1, VOCAB)
        return nn.functional.cross_entropy(flat, target[:, 1:].reshape(-1), ignore_index=IGNORED, reduction="sum") / counted

    made, chunks = SCHEDULES[name]
    placement = placement_of(name, 2, chunks)
    own = [placement.stage(rank, chunk) for chunk in range(chunks)]
    parts = [PipelineStage(Part(model, stage, 2 * chunks), stage, 2 * chunks, torch.device("cpu")) for stage in own]
    schedule = made(parts if chunks > 1 else parts[0], n_microbatches=SAMPLES, loss_fn=loss, scale_grads=False)
    last = 2 * chunks - 1 in own
    schedule.step(*([ids] if 0 in own else []), target=labels if last else None, losses=[] if last else None)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def ours(name):
    chunks = SCHEDULES[name][1]
    case = make_case("plain", pp=2, schedule=name, chunks=chunks, layers=DEPTH, accumulation=SAMPLES, micro_batch=1)
    run, found = prepare(model_of(), case.plan, device="cpu"), {}
    update, weights = run._update, run._weights

    def spy():
        found.update({n: weights.gradient(i).clone() for i, n in enumerate(weights.names)})
        return update()

    run._update = spy
    run.step(dict(zip(("input_ids", "labels"), batch_of(), strict=True)))
    return found


def work(rank, port, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name in SCHEDULES:
        right, found = theirs(name, rank), ours(name)
        apart = (
            {n: float((found[n] - right[n]).abs().max() / right[n].abs().max()) for n in right}
            if set(right) == set(found)
            else {}
        )
        queue.put((name, rank, len(apart), max(apart.values(), default=1.0)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.multi
@pytest.mark.slow
def test_torchs_own_schedules_agree():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=work, args=(rank, port, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=150) for _ in range(2 * len(SCHEDULES))]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert {(name, rank) for name, rank, _, _ in found} == {(name, rank) for name in SCHEDULES for rank in range(2)}
    assert all(number > 5 and apart < 1e-10 for _, _, number, apart in found), found
