"""Pipelines through the worker: training, another layout afterwards, a stage that dies or hangs, orders, what is refused."""

import json
import time

import msgspec
import pytest
import torch

from fullstride.engine.parity_cases import PlainModel, make_case
from fullstride.engine.pipeline.build import cut_to_stages
from fullstride.engine.run import Run
from fullstride.errors import BadInput, RuleBroken
from fullstride.events import Evaluation, StepEnd, read_events
from fullstride.launch.command import worker_command
from fullstride.launch.failure import failure_of
from fullstride.launch.local import start
from fullstride.launch.session import WorkerSession
from fullstride.measure.collect import read_trace
from fullstride.measure.pipeline import measured_timeline
from fullstride.plan.pipeline import plan_schedule
from fullstride.plan.plan import Batch, Comm, Layout, ModelRef, Pipeline, Plan, Recipe, Shard, Workload
from fullstride.plan.schedule.text import read_schedule, schedule_text, write_schedule
from fullstride.plan.toml import write_plan
from fullstride.rundir import RunDir

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
STEPS = 6


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    home = tmp_path_factory.mktemp("work")
    (home / "config.json").write_text(json.dumps(CONFIG))
    (home / "data.txt").write_text("".join(f"line {i} of the text. " for i in range(200)))
    (home / "held.txt").write_text("other words, held out of it. " * 20)
    return Plan(
        model=ModelRef(source=str(home / "config.json")),
        workload=Workload(
            sequence_length=16, samples_per_step=4, data=str(home / "data.txt"), eval_data=str(home / "held.txt")
        ),
        recipe=Recipe(steps=STEPS, warmup_steps=1, seed=3),
        layout=Layout(pp=2),
        pipeline=Pipeline(schedule="zb-v", chunks=2),
        batch=Batch(micro_batch=1, accumulation=4),
        comm=Comm(timeout_seconds=20.0),
    )


def trained(plan, root, *, fault="", export=None):
    """A training run to its end; returns its RunDir and status."""
    run_dir = RunDir(root=str(root))
    write_plan(plan, run_dir.plan, overwrite=True)
    module = "fullstride.testing.faulty_worker" if fault else "fullstride.engine.worker"
    job = worker_command(run_dir, plan, train=True, save_every=2, export=export, module=module)
    job = msgspec.structs.replace(job, env={**job.env, "FULLSTRIDE_FAULT": fault, "CUDA_VISIBLE_DEVICES": ""})
    process = start(job)
    try:
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert time.monotonic() < deadline, "the run did not end"
        return run_dir, process.poll()
    finally:
        process.close()


def losses(run_dir, rank=0):
    return {event.step: event.loss for event in read_events(run_dir.events(rank)) if isinstance(event, StepEnd)}


@pytest.mark.multi
@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_after_its_stage_was_killed(plan, tmp_path):
    """From a pipeline with a table at both ends to sharded ranks and back, beside a V that runs through."""
    apart = msgspec.structs.replace(plan, pipeline=Pipeline(schedule="1f1b"))
    run_dir, status = trained(apart, tmp_path / "run", fault="kill:step:3:1")
    failure = failure_of(run_dir, status)
    assert status != 0 and (failure.failure, failure.rank) == ("killed", 1)
    assert "rank 1 is stage 1 of 2" in failure.message
    flat = msgspec.structs.replace(
        plan, layout=Layout(dp_shard=2), shard=Shard(carrier="fsdp2", stage=2), pipeline=Pipeline(), batch=Batch(accumulation=2)
    )
    _, status = trained(flat, tmp_path / "run", fault="kill:step:5:0")
    assert status != 0
    _, status = trained(apart, tmp_path / "run", export=str(tmp_path / "model"))
    assert status == 0
    assert losses(run_dir) == losses(run_dir, 1)
    whole, status = trained(plan, tmp_path / "whole", export=str(tmp_path / "whole-model"))
    assert status == 0
    crossed, wanted = losses(run_dir), losses(whole)
    assert sorted(crossed) == sorted(wanted) == list(range(STEPS))
    assert crossed == pytest.approx(wanted, rel=2e-5)
    held = [
        [e.loss for e in read_events(d.events(0)) if isinstance(e, Evaluation) and e.step == STEPS] for d in (run_dir, whole)
    ]
    assert held[0] == pytest.approx(held[1], rel=2e-5)
    from safetensors.torch import load_file

    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "whole-model"))
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], atol=2e-3), name


@pytest.mark.multi
@pytest.mark.slow
def test_a_stage_that_hangs_is_named_within_the_time_out(plan, tmp_path):
    """Of four stages three wait, one of them for a stage that waits itself."""
    comm, layout = Comm(timeout_seconds=8.0), Layout(pp=4)
    short = msgspec.structs.replace(plan, pipeline=Pipeline(schedule="1f1b"), comm=comm, layout=layout)
    began = time.monotonic()
    run_dir, status = trained(short, tmp_path / "run", fault="hang:step:2:1")
    failure = failure_of(run_dir, status)
    assert status != 0 and (failure.failure, failure.rank) == ("hang", 1)
    assert failure.message.startswith("rank 1 did not come; ")
    assert "stage 0 (rank 0) waited 8 s for gradients of samples [0, 1) from stage 1 (rank 1)" in failure.message
    assert time.monotonic() - began < 150


@pytest.mark.multi
@pytest.mark.slow
def test_orders_run_pipelines_in_turn_and_profile_them(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_dir, found = RunDir(root=str(tmp_path / "run")), []
    with WorkerSession(run_dir, plan) as session:
        for name, pipeline in (("zb-v", plan.pipeline), ("1f1b", Pipeline(schedule="1f1b", micro_batch_per_stage=(1, 2)))):
            other = msgspec.structs.replace(plan, pipeline=pipeline)
            assert session.build(name, other).ok
            assert session.run(2, name).ok
            assert session.run(1, f"{name}-profile", profile=True).ok
            timeline = measured_timeline(run_dir, other)
            actions = [a for a in plan_schedule(other).actions if "send" not in a.kind and "recv" not in a.kind]
            done = {run.action.text() for run in timeline.runs}
            assert done == {a.text() for a in actions if a.kind != "reduce"}
            assert 0 < timeline.bubble_share < 1
            for rank in timeline.ranks:  # nothing of a computation counts as a wait for a message that was posted ahead
                own = [r.end - r.start for r in timeline.runs if r.action.rank == rank.rank and r.action.kind != "optimizer"]
                assert rank.busy_seconds == pytest.approx(sum(own), rel=1e-6)
            phases = [span.phase for span in read_trace(run_dir.trace(1))]
            assert phases.count("comm") >= sum(a.rank == 1 and a.kind.startswith("recv") for a in plan_schedule(other).actions)
            for rank in range(2):
                run_dir.trace(rank).unlink()
            found.append([e.loss for e in read_events(run_dir.events(0)) if isinstance(e, StepEnd) and e.order == name])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_schedule_file_is_read_checked_and_refused_with_its_actions(plan, tmp_path):
    path = tmp_path / "mine.schedule"
    schedule = plan_schedule(plan)
    write_schedule(schedule, path)
    mine = msgspec.structs.replace(plan, pipeline=msgspec.structs.replace(plan.pipeline, schedule_file=str(path)))
    assert plan_schedule(mine) == schedule == read_schedule(path)
    first = next(a for a in schedule.actions if a.kind == "weight_grad")
    moved = [first, *(a for a in schedule.actions if a is not first)]
    path.write_text(schedule_text(msgspec.structs.replace(schedule, actions=tuple(moved))))
    with pytest.raises(RuleBroken, match="weight_grad stands before input_grad") as refused:
        plan_schedule(mine)
    assert first.text() in refused.value.message
    shorter = msgspec.structs.replace(mine, batch=Batch(micro_batch=1, accumulation=2))
    with pytest.raises(
        RuleBroken, match="has pp 2, chunks 2, placement v, samples 4, the plan pp 2, chunks 2, placement v, samples 2"
    ):
        plan_schedule(shorter)
    path.unlink()
    with pytest.raises(BadInput, match=r"mine\.schedule"):
        plan_schedule(mine)


def test_a_file_that_splits_backwards_is_refused_under_fsdp2(plan, tmp_path):
    path = tmp_path / "mine.schedule"
    split = msgspec.structs.replace(plan, pipeline=Pipeline(schedule="zb-h1"))
    write_schedule(plan_schedule(split), path)
    mine = msgspec.structs.replace(
        plan, pipeline=Pipeline(schedule="1f1b", schedule_file=str(path)), shard=Shard(carrier="fsdp2", stage=1)
    )
    with pytest.raises(RuleBroken, match=r"input_grad c0 \[0,1\) with shard.carrier = 'fsdp2'"):
        cut_to_stages(PlainModel(), None, mine, None)


def test_hand_written_loops_are_refused():
    run = Run.__new__(Run)
    run.plan = make_case("plain", pp=2).plan
    for what in ("model", "optimizer"):
        with pytest.raises(RuleBroken, match=f"run.{what} with layout.pp = 2: a rank holds a part of the model"):
            getattr(run, what)
