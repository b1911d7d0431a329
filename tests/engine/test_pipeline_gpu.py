"""Pipelines on GPUs: losses of every schedule, messages that neither wait for each other nor hang, a measured timeline."""

import json

import msgspec
import pytest
import torch

from fullstride.events import StepEnd, read_events
from fullstride.launch.session import WorkerSession
from fullstride.measure.pipeline import measured_timeline
from fullstride.plan.defaults import weights_cast
from fullstride.plan.plan import Batch, Compile, Layout, ModelRef, Pipeline, Plan, Recipe, Recompute, Shard, Workload
from fullstride.rundir import RunDir

pytestmark = [pytest.mark.gpu, pytest.mark.multi, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PLANS = {
    "1f1b": {"pipeline": Pipeline(schedule="1f1b")},
    "sizes": {"pipeline": Pipeline(schedule="1f1b", micro_batch_per_stage=(1, 2))},
    "zb-h1": {"pipeline": Pipeline(schedule="zb-h1"), "recompute": Recompute(mode="full")},
    "zb-v": {"pipeline": Pipeline(schedule="zb-v", chunks=2)},
    "zb-v compiled": {"pipeline": Pipeline(schedule="zb-v", chunks=2), "compile": Compile(mode="block")},
    "interleaved": {"pipeline": Pipeline(schedule="interleaved", chunks=2), "compile": Compile(mode="block")},
}


def test_every_schedule_learns_what_sharding_learns(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data.txt").write_text("".join(f"line {i} of the text. " for i in range(20000)))
    data = Plan(
        model=ModelRef(source=str(tmp_path / "config.json")),
        workload=Workload(sequence_length=2048, samples_per_step=8, data=str(tmp_path / "data.txt")),
        recipe=Recipe(steps=20, warmup_steps=1),
        layout=Layout(dp_shard=2),
        shard=Shard(carrier="fsdp2", stage=1),
        batch=Batch(micro_batch=1, accumulation=4),
        precision=weights_cast(4, "fsdp2"),
    )
    pipe = msgspec.structs.replace(data, layout=Layout(pp=2), shard=Shard(), batch=Batch(micro_batch=1, accumulation=8))
    run_dir, found = RunDir(root=str(tmp_path / "run")), {}
    with WorkerSession(run_dir, pipe) as session:
        for number, (name, parts) in enumerate({"data": {}, **PLANS}.items()):
            plan = msgspec.structs.replace(pipe, **parts) if parts else data
            assert (built := session.build(f"p{number}", plan)).ok, (name, built.failure)
            assert (ran := session.run(6, name)).ok, (name, ran.failure)
            found[name] = [e.loss for e in read_events(run_dir.events(0)) if isinstance(e, StepEnd) and e.order == name]
            if parts and number < 5:
                assert session.run(1, f"{name}-profile", profile=True).ok
                timeline = measured_timeline(run_dir, plan)
                assert 0 <= timeline.bubble_share < 1
                assert {run.action.kind for run in timeline.runs} >= {"forward", "optimizer"}
                for rank in range(2):
                    run_dir.trace(rank).unlink()
    for name, losses in found.items():
        assert len(losses) == 6
        assert losses == pytest.approx(found["data"], rel=2e-2), name
