"""The verb `convert`, and foreign files where a plan is read."""

import json

import pytest
from tests.plan.formats import samples

from fullstride.cli import foreign
from fullstride.cli.foreign import is_own_plan, plan_to_run
from fullstride.cli.main import main
from fullstride.cli.output import Output
from fullstride.errors import BadInput
from fullstride.model.source import load_spec
from fullstride.plan.formats.imported import FOREIGN
from fullstride.plan.formats.runnable import runnable
from fullstride.plan.plan import Layout, Shard
from fullstride.plan.rules import check
from fullstride.plan.toml import parse_plan, read_plan


@pytest.fixture
def here(monkeypatch, cluster):
    monkeypatch.setattr(foreign, "probe_cluster", lambda num_ranks=None: cluster)


def file(tmp_path, text, name="f"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_to_stdout_comes_the_file_alone(tmp_path, capsys, kind):
    assert main(["convert", file(tmp_path, samples.TORCHTITAN), "--to", kind, "--gpus", "8"]) == 0
    out, err = capsys.readouterr()
    again = file(tmp_path, out, "again")
    assert "not carried" in err
    assert main(["convert", again, "--to", "fullstride", "--model", "llama3-8b", "--seq", "8192"]) == 0
    plan = parse_plan(capsys.readouterr().out, "f")
    assert plan.layout.world_size == 8
    assert plan.workload.samples_per_step == 4


def test_a_described_model_gets_a_config_beside_the_plan(tmp_path, capsys):
    target = tmp_path / "plan.toml"
    script = file(tmp_path, samples.MEGATRON_SCRIPT, "train.sh")
    assert main(["convert", script, "--to", "fullstride", "-o", str(target)]) == 0
    plan = read_plan(target)
    assert plan.model.source == str(tmp_path / "plan.config.json")
    assert load_spec(plan.model.source).digest == plan.model.digest
    assert "Not carried" in capsys.readouterr().out
    assert main(["convert", script, "--to", "fullstride", "-o", str(target)]) == 3, "nothing is written over"
    assert main(["convert", script, "--to", "fullstride"]) == 3
    assert "-o OUT" in capsys.readouterr().err


def test_json_has_text_and_lists(tmp_path, capsys):
    path = file(tmp_path, samples.DEEPSPEED_ZERO2)
    assert main(["convert", path, "--to", "torchtitan", "--model", "llama3-8b", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["kind"] == "converted"
    data = whole["data"]
    assert data["from"] == "deepspeed"
    assert "[parallelism]" in data["text"]
    assert "steps_per_print" in {one["key"] for one in data["not_carried"]["read"]}
    assert "shard.carrier" in {one["key"] for one in data["not_carried"]["written"]}


def test_what_is_missing_is_bad_input_in_one_line(tmp_path, capsys):
    assert main(["convert", file(tmp_path, samples.DEEPSPEED_AUTO), "--to", "accelerate"]) == 3
    line = capsys.readouterr().err.strip()
    assert "--model" in line
    assert "--gpus" in line
    assert line.count("\n") == 0


def test_a_foreign_baseline_runs_in_the_nearest_form(tmp_path, capsys, here):
    text = samples.DEEPSPEED_ZERO2.replace('"train_batch_size": 64,', "").replace('"device": "cpu"', '"device": "none"')
    path = file(tmp_path, text)
    out = Output()
    plan = plan_to_run(path, out, model="tiny", sequence_length=128)
    assert plan.layout == Layout(dp_shard=2), "the ranks of this machine"
    assert plan.shard == Shard(carrier="fsdp2", stage=2)
    assert plan.workload.sequence_length == 128
    assert not check(plan, load_spec("tiny"))
    told = capsys.readouterr().err
    assert "allgather_bucket_size" in told
    assert "shard.carrier = deepspeed" in told
    assert any("precision.gradient" in warning for warning in out.warnings)
    assert not is_own_plan(path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["bf16", "none", "autocast"])
def test_every_stage_of_deepspeed_has_a_form_that_runs(tmp_path, capsys, here, stage, ranks, accumulation, dtype):
    raw = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    raw |= {"train_batch_size": 2 * accumulation * ranks, "zero_optimization": {"stage": stage}}
    raw |= {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    raw |= {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if dtype == "autocast" else {}
    plan = plan_to_run(file(tmp_path, json.dumps(raw)), Output(), model="tiny", sequence_length=64)
    assert not check(plan, load_spec("tiny"))
    assert plan.layout.world_size == ranks
    assert runnable(plan) == (plan, ()), "what runs is left as it is"


def test_a_torchtitan_baseline_names_its_model(tmp_path, capsys, here):
    plan = plan_to_run(file(tmp_path, samples.TORCHTITAN.replace("parallel_degree = 2", "parallel_degree = 1")), Output())
    assert plan.model.source == "llama3-8b"
    assert not check(plan, load_spec("llama3-8b"))


def test_a_baseline_without_a_model_asks_for_it_alone(tmp_path, capsys, here):
    with pytest.raises(BadInput) as error:
        plan_to_run(file(tmp_path, samples.DEEPSPEED_ZERO2.replace('"train_batch_size": 64,', "")), Output())
    assert "--model" in error.value.fix
    assert "--gpus" not in error.value.fix


def test_options_of_the_work_go_with_a_foreign_baseline_only(tmp_path, capsys, here):
    own = tmp_path / "p.toml"
    assert main(["convert", file(tmp_path, samples.TORCHTITAN), "--to", "fullstride", "--gpus", "2", "-o", str(own)]) == 0
    assert main(["tune", "tiny", "--baseline", str(own), "--dry-run"]) == 2
    assert "the plan says what the work is" in capsys.readouterr().err
