import gzip
import json
import shutil
import time

import msgspec
import pytest
import torch

from fullstride.engine.checkpoint_folder import complete
from fullstride.events import Evaluation, RunEnd, RunStart, Span, StepEnd, read_events
from fullstride.files import read_json
from fullstride.launch.command import worker_command
from fullstride.launch.local import start
from fullstride.launch.session import WorkerSession
from fullstride.plan.plan import Batch, Data, Layout, ModelRef, Plan, Recipe, Shard, Workload
from fullstride.plan.toml import write_plan
from fullstride.rundir import Failure, RunDir

pytestmark = [pytest.mark.multi, pytest.mark.slow]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
STEPS = 8


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    home = tmp_path_factory.mktemp("work")
    (home / "config.json").write_text(json.dumps(CONFIG))
    (home / "data.txt").write_text("".join(f"line {i} of the text. " for i in range(200)))
    (home / "held.txt").write_text("other words, held out of it. " * 20)
    work = Workload(sequence_length=16, samples_per_step=4, data=str(home / "data.txt"), eval_data=str(home / "held.txt"))
    return Plan(
        model=ModelRef(source=str(home / "config.json")),
        workload=work,
        recipe=Recipe(steps=STEPS, warmup_steps=1, seed=3),
        layout=Layout(dp_shard=2),
        shard=Shard(carrier="fsdp2", stage=2),
        batch=Batch(micro_batch=1, accumulation=2),
        data=Data(workers=1),
    )


def run_plan(plan, root, *, fault="", export=None, save_every=3, until=None):
    """Start a training run and wait for its end, or until `until(run_dir)`, when it gets SIGTERM; returns (RunDir, status)."""
    run_dir = RunDir(root=str(root))
    write_plan(plan, run_dir.plan, overwrite=True)
    module = "fullstride.testing.faulty_worker" if fault else "fullstride.engine.worker"
    job = worker_command(run_dir, plan, train=True, save_every=save_every, export=export, module=module)
    job = msgspec.structs.replace(job, env={**job.env, "FULLSTRIDE_FAULT": fault, "CUDA_VISIBLE_DEVICES": ""})
    process = start(job)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if until and until(run_dir):
                process.terminate(grace_seconds=60)
                break
            time.sleep(0.05)
        assert time.monotonic() < deadline, "the run did not end"
        return run_dir, process.poll()
    finally:
        process.close()


def log_of(run_dir):
    return "".join(path.read_text()[-3000:] for path in sorted((run_dir.path / "logs").glob("rank*.log")))


def losses(run_dir, rank=0):
    """step -> every loss that was written for it."""
    found = {}
    for event in read_events(run_dir.events(rank)):
        if isinstance(event, StepEnd):
            found.setdefault(event.step, []).append(event.loss)
    return found


@pytest.fixture(scope="module")
def whole(plan, tmp_path_factory):
    home = tmp_path_factory.mktemp("whole")
    run_dir, status = run_plan(plan, home / "run", export=str(home / "model"))
    assert status == 0, log_of(run_dir)
    return run_dir, home / "model"


def test_a_run_leaves_events_checkpoints_a_held_out_loss_and_done(whole):
    run_dir, _ = whole
    events = list(read_events(run_dir.events(0)))
    assert run_dir.done.exists()
    assert not run_dir.failed.exists()
    assert sorted(losses(run_dir)) == list(range(STEPS))
    assert [p.name for p in complete(run_dir.checkpoints)] == ["step-00000003", "step-00000006", "step-00000008"]
    assert [e.step for e in events if isinstance(e, Evaluation)] == [3, 6, 8]
    assert {e.phase for e in events if isinstance(e, Span)} == {"data", "checkpoint"}
    assert events[-1].cause == "done"
    assert losses(run_dir) == losses(run_dir, 1)
    assert "torch" in json.loads(run_dir.versions.read_text())


FAULTS = ["kill:staged:3:1", "kill:manifest:6:0", "kill:step:7:1"]


def test_kills_at_any_moment_change_no_bit(plan, whole, tmp_path):
    reference, model = whole
    for fault in FAULTS:
        run_dir, status = run_plan(plan, tmp_path / "run", fault=fault)
        assert status != 0
        assert not run_dir.done.exists()
    run_dir, status = run_plan(plan, tmp_path / "run", export=str(tmp_path / "model"))
    assert status == 0, log_of(run_dir)
    wanted = losses(reference)
    seen = losses(run_dir)
    assert sorted(seen) == sorted(wanted)
    assert {step: set(values) for step, values in seen.items()} == {step: set(values) for step, values in wanted.items()}
    assert sum(map(len, seen.values())) > STEPS  # steps were lost and taken again
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert not list(run_dir.checkpoints.glob(".step-*"))


def test_another_layout_goes_on_at_the_same_sample(plan, whole, tmp_path):
    reference, _ = whole
    alone = msgspec.structs.replace(plan, layout=Layout(), shard=Shard(), batch=Batch(micro_batch=4))
    target = RunDir(root=str(tmp_path / "run"))
    shutil.copytree(reference.checkpoint(3), target.checkpoint(3))
    run_dir, status = run_plan(alone, tmp_path / "run", save_every=100)
    assert status == 0, log_of(run_dir)
    seen, wanted = losses(run_dir), losses(reference)
    assert sorted(seen) == list(range(3, STEPS))
    assert [v[0] for v in seen.values()] == pytest.approx([wanted[step][0] for step in seen], rel=1e-5)
    first = next(e for e in read_events(run_dir.events(0)) if isinstance(e, RunStart))
    assert first.first_step == 3


def test_sigterm_saves_and_leaves_done_out(plan, tmp_path):
    endless = msgspec.structs.replace(plan, recipe=msgspec.structs.replace(plan.recipe, steps=10**6))

    def some_steps(run_dir):
        return run_dir.events(0).exists() and len(losses(run_dir)) > 3

    run_dir, status = run_plan(endless, tmp_path / "run", save_every=10**6, until=some_steps)
    ends = [e for e in read_events(run_dir.events(0)) if isinstance(e, RunEnd)]
    assert [e.cause for e in ends] == ["signal"], log_of(run_dir)
    assert status != 0
    assert not run_dir.done.exists()
    assert not run_dir.failed.exists()
    saved = complete(run_dir.checkpoints)
    assert [int(p.name[5:]) for p in saved] == [max(losses(run_dir)) + 1]


def test_the_exported_model_is_loaded_by_transformers_and_trained_further(plan, whole, tmp_path):
    from transformers import AutoModelForCausalLM

    _, model = whole
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert loaded.config.vocab_size == 259
    further = msgspec.structs.replace(
        plan,
        model=ModelRef(source=str(model)),
        recipe=Recipe(steps=1, learning_rate=1e-12),
        layout=Layout(),
        shard=Shard(),
        batch=Batch(micro_batch=4),
    )
    run_dir, status = run_plan(further, tmp_path / "run")
    assert status == 0, log_of(run_dir)
    held = [e.loss for e in read_events(run_dir.events(0)) if isinstance(e, Evaluation)]
    before = [e.loss for e in read_events(whole[0].events(0)) if isinstance(e, Evaluation)]
    assert held[-1] == pytest.approx(before[-1], rel=1e-5)


def test_a_worker_carries_out_orders_and_plans_take_turns(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_dir = RunDir(root=str(tmp_path / "run"))
    ddp = msgspec.structs.replace(plan, layout=Layout(dp_replicate=2), shard=Shard(carrier="ddp"))
    with WorkerSession(run_dir, plan) as session:
        assert session.build("base", plan).ok
        first = session.run(3, "base-1")
        assert (first.ok, first.recompiles) == (True, 0)
        assert first.peak_reserved_bytes >= first.peak_allocated_bytes
        assert session.run(2, "base-trace", profile=True).ok
        assert session.build("other", ddp).ok
        assert session.run(3, "other-1").ok
        assert session.set_aside().ok and session.build("base", plan).ok and session.run(3, "base-2").ok
        assert session.set_aside().ok and session.build("other", ddp).ok and session.run(1, "other-2").ok
        refused = session.build("bad", msgspec.structs.replace(plan, model=ModelRef(source="no-such-model")))
        assert not refused.ok
        assert refused.failure.failure == "refused"
        assert "no-such-model" in refused.failure.message
    steps = [e for e in read_events(run_dir.events(1)) if isinstance(e, StepEnd)]
    assert [(e.order, e.step) for e in steps[:3]] == [("base-1", 0), ("base-1", 1), ("base-1", 2)]
    base, other = ([e.loss for e in steps if e.order == name] for name in ("base-1", "other-1"))
    assert base == pytest.approx(other, rel=1e-6)  # a build begins again at sample 0
    (again,) = [e for e in steps if e.order == "other-2"]
    third = [e.loss for e in steps if e.order == "base-2"]
    assert (again.step, third) == (3, base)  # what was set aside goes on where it was
    check_trace(run_dir)


def check_trace(run_dir):
    raw = gzip.decompress(run_dir.trace(0).read_bytes()).splitlines()
    spans = [msgspec.json.decode(line, type=Span) for line in raw]
    assert {"data", "forward", "backward", "optimizer", "comm"} <= {s.phase for s in spans}
    assert {s.step for s in spans} == {3, 4}
    assert all(s.start_ns < s.end_ns for s in spans)


@pytest.mark.parametrize(
    ("fault", "kind", "rank"), [("out_of_memory:step:1:1", "out_of_memory", 1), ("raise:step:1:0", "crash", 0)]
)
def test_a_rank_that_fails_is_named(plan, tmp_path, fault, kind, rank, monkeypatch):
    monkeypatch.setenv("FULLSTRIDE_FAULT", fault)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_dir = RunDir(root=str(tmp_path / "run"))

    def command(where, plan):
        return worker_command(where, plan, module="fullstride.testing.faulty_worker")

    with WorkerSession(run_dir, plan, command=command) as session:
        assert session.build("base", plan).ok
        reply = session.run(3, "base-1")
    assert not reply.ok
    assert (reply.failure.failure, reply.failure.rank) == (kind, rank)
    assert read_json(run_dir.failed, Failure) == reply.failure
    assert reply.failure.wanted_bytes == (2 << 30 if kind == "out_of_memory" else 0)


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_saved(plan, tmp_path):
    wild = msgspec.structs.replace(plan, recipe=Recipe(steps=30, learning_rate=3e38, clip_norm=0.0, warmup_steps=0))
    run_dir, status = run_plan(wild, tmp_path / "run", save_every=100)
    assert status != 0
    assert read_json(run_dir.failed, Failure).failure == "not_finite"
    assert complete(run_dir.checkpoints) == []
