import gzip
import itertools
import json
import time

import msgspec
import pytest
import torch

from fullstride.engine.checkpoint_folder import complete
from fullstride.events import Memory, Span, StepEnd, read_events
from fullstride.launch.command import worker_command
from fullstride.launch.local import start
from fullstride.launch.session import WorkerSession
from fullstride.measure.collect import attribution_of
from fullstride.plan.plan import Batch, Data, Layout, MadeFor, ModelRef, Plan, Precision, Recipe, Shard, Workload
from fullstride.plan.toml import write_plan
from fullstride.rundir import RunDir

pytestmark = [pytest.mark.gpu, pytest.mark.multi, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
}
BF16 = Precision(cast="autocast", embedding="fp32", block="bf16", head="bf16")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    ranks = min(2, torch.cuda.device_count())
    home = tmp_path_factory.mktemp("work")
    (home / "config.json").write_text(json.dumps(CONFIG))
    (home / "data.txt").write_text("".join(f"line {i} of the text. " for i in range(20000)))
    return Plan(
        model=ModelRef(source=str(home / "config.json")),
        workload=Workload(sequence_length=2048, samples_per_step=8, data=str(home / "data.txt")),
        recipe=Recipe(steps=12, warmup_steps=1),
        made_for=MadeFor(device="h200"),
        layout=Layout(dp_shard=ranks),
        shard=Shard(carrier="fsdp2", stage=3) if ranks > 1 else Shard(),
        batch=Batch(micro_batch=8 // ranks),
        precision=msgspec.structs.replace(BF16, cast="weights") if ranks > 1 else BF16,
        data=Data(workers=1, pin=True),
    )


def steps_of(run_dir, order, rank=0):
    return [e for e in read_events(run_dir.events(rank)) if isinstance(e, StepEnd) and e.order == order]


def test_orders_on_gpus_are_timed_by_the_device_and_traced(plan, tmp_path):
    run_dir = RunDir(root=str(tmp_path / "run"))
    with WorkerSession(run_dir, plan) as session:
        built = session.build("base", plan)
        assert built.ok, built
        assert session.run(5, "warm").ok
        began = time.monotonic_ns()
        reply = session.run(20, "timed")
        ended = time.monotonic_ns()
        assert session.run(3, "trace", profile=True).ok
        assert session.release().ok
    steps = steps_of(run_dir, "timed")
    assert [s.step for s in steps] == list(range(5, 25))
    assert all(a.time_ns == b.start_ns for a, b in itertools.pairwise(steps))
    assert began - 5_000_000 <= steps[0].start_ns < steps[-1].time_ns <= ended + 5_000_000
    print("step ms", [round((s.time_ns - s.start_ns) / 1e6, 2) for s in steps])
    assert 0 < reply.static_bytes <= reply.peak_allocated_bytes <= reply.peak_reserved_bytes
    print(reply)
    memory = [e for e in read_events(run_dir.events(0)) if isinstance(e, Memory)]
    assert all(m.device_used_bytes >= m.reserved_bytes > 0 for m in memory)
    check_trace(run_dir, plan.layout.world_size)


def check_trace(run_dir, ranks):
    raw = gzip.decompress(run_dir.trace(0).read_bytes()).splitlines()
    spans = [msgspec.json.decode(line, type=Span) for line in raw]
    device = [s for s in spans if s.clock == "device"]
    assert {"matmul", "attention", "elementwise"} <= {s.kernel for s in device}
    assert ("collective" in {s.kernel for s in device}) == (ranks > 1)
    assert {"forward", "backward", "optimizer"} <= {s.phase for s in device}
    assert {s.step for s in device} == {25, 26, 27}
    shares = attribution_of(run_dir, "trace", ranks)
    steps = steps_of(run_dir, "trace")
    mean = sum(s.time_ns - s.start_ns for s in steps) / len(steps) / 1e9
    print(len(spans), mean, [(s.name, round(s.seconds * 1e3, 2)) for s in shares])
    for kernel in ("matmul", "attention", "elementwise", "copy", "optimizer", "collective"):
        print(kernel, sum(s.end_ns - s.start_ns for s in device if s.kernel == kernel) / 3e6)
    seconds = {s.name: s.seconds for s in shares}
    assert seconds["backward"] > seconds["forward"] > 0


def train(plan, run_dir, fault="", export=None):
    write_plan(plan, run_dir.plan, overwrite=True)
    module = "fullstride.testing.faulty_worker"
    job = worker_command(run_dir, plan, train=True, save_every=4, export=export, module=module)
    process = start(msgspec.structs.replace(job, env={**job.env, "FULLSTRIDE_FAULT": fault}))
    try:
        return process.wait(180)
    finally:
        process.close()


def test_training_on_gpus_goes_on_after_a_kill_and_exports(plan, tmp_path):
    whole, killed = RunDir(root=str(tmp_path / "whole")), RunDir(root=str(tmp_path / "killed"))
    assert train(plan, whole) == 0
    assert train(plan, killed, "kill:step:6:0") != 0
    # Saving goes on beside training: whether step 4 was whole two fast steps later is up to the disk.
    assert {p.name for p in complete(killed.checkpoints)} <= {"step-00000004"}
    assert train(plan, killed, export=str(tmp_path / "model")) == 0
    wanted = {s.step: s.loss for s in steps_of(whole, "")}
    seen = {s.step: s.loss for s in steps_of(killed, "")}
    print(wanted, seen)
    assert seen == pytest.approx(wanted, rel=1e-3)
    assert (tmp_path / "model" / "model.safetensors").exists()
