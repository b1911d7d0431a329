"""`train` prepares, launches or joins, follows, and says how it ended; the workers are a small script here."""

import json
import sys
import time
from pathlib import Path

import pytest
from tests.cli.values import make_plan, make_step

from fullstride.cli import main as cli
from fullstride.cli import train
from fullstride.files import read_json, to_json
from fullstride.launch.job import Job
from fullstride.model.presets import preset_config
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Adapter, ModelRef, Recipe
from fullstride.plan.toml import read_plan, write_plan
from fullstride.rundir import Failure

ENDS = """
import pathlib, sys
root = pathlib.Path(sys.argv[1])
(root / "events").mkdir(exist_ok=True)
(root / "events/rank00000.jsonl").write_text(STEPS)
if FAILURE:
    (root / "FAILED.json").write_text(FAILURE)
    sys.exit(1)
(root / "DONE").write_text("")
"""


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_plan(make_plan(recipe=Recipe(steps=2)), tmp_path / "p.toml")
    return "p.toml"


@pytest.fixture
def workers(monkeypatch):
    """Replaces torchrun by a script that leaves events and an end behind; keeps what it was asked for."""
    asked = {}

    def use(failure=None):
        steps = b"".join(to_json(make_step(n, loss=3.0 - n), indent=False) for n in range(2)).decode()
        told = to_json(failure).decode() if failure else ""
        program = ENDS.replace("STEPS", repr(steps)).replace("FAILURE", repr(told))

        def command(run_dir, plan, *, train, save_every, export, merge):
            asked.update(plan=plan, train=train, save_every=save_every, export=export, merge=merge)
            return Job(run_dir=run_dir.root, num_processes=2, command=(sys.executable, "-c", program, run_dir.root))

        monkeypatch.setattr(train, "worker_command", command)
        return asked

    return use


def test_a_schedule_file_that_cannot_be_run_is_refused_before_anything_is_started(plan_file, tmp_path, capfd):
    (tmp_path / "mine.schedule").write_text("kind=schedule format=1 name=mine pp=2 chunks=1 placement=loop samples=4")
    two = ["--set", "layout.pp=2", "--set", "layout.dp_replicate=1", "--set", "pipeline.schedule=1f1b"]
    two += ["--set", "shard.carrier=none", "--set", "shard.stage=0", "--set", "pipeline.schedule_file=mine.schedule"]
    plan = read_plan(plan_file)
    two += ["--set", f"batch.accumulation={plan.workload.samples_per_step // plan.batch.micro_batch}"]
    assert cli.main(["train", plan_file, "-o", "run", *two]) == 3
    told = " ".join(capfd.readouterr().err.split())
    assert "pipeline.schedule_file mine.schedule: samples [0,4) have no forward on stage 0 (and 13 faults more)" in told
    assert not Path("run").exists()


def test_a_rank_that_hangs_does_not_hold_up_the_end_once_the_failure_is_told(plan_file, tmp_path, capfd, monkeypatch):
    told = to_json(Failure(failure="hang", rank=1, message="rank 1 did not come")).decode()
    program = f"import pathlib, sys, time; pathlib.Path(sys.argv[1], 'FAILED.json').write_text({told!r}); time.sleep(120)"

    def command(run_dir, plan, **options):
        return Job(run_dir=run_dir.root, num_processes=2, command=(sys.executable, "-c", program, run_dir.root))

    monkeypatch.setattr(train, "worker_command", command)
    monkeypatch.setattr(train, "_END_SECONDS", 0.3)
    began = time.monotonic()
    assert cli.main(["train", plan_file, "-o", "run"]) == 7
    assert time.monotonic() - began < 60
    assert "hang on rank 1: rank 1 did not come" in capfd.readouterr().err


def test_a_run_from_start_to_end_then_again(plan_file, workers, capfd):
    asked = workers()
    words = ["train", plan_file, "--data", "x y.txt", "--eval", "e.txt", "-o", "run", "--steps", "2", "--save-every", "5"]
    words += ["--export", "out", "--set", "recipe.learning_rate=1e-5", "--json"]
    assert cli.main(words) == 0, capfd.readouterr().err
    seen = capfd.readouterr()
    told = json.loads(seen.out)
    assert told["kind"] == "training"
    assert told["data"] == {"run_dir": "run", "steps": 2, "last_step": 1, "loss": 2.0, "held_out_loss": None}
    assert asked["train"] and asked["save_every"] == 5 and asked["export"] == "out"
    plan = read_plan("run/plan.toml")
    assert plan == asked["plan"]
    assert (plan.workload.data, plan.workload.eval_data, plan.recipe.learning_rate) == ("x y.txt", "e.txt", 1e-5)
    assert read_json("run/model.json", ModelSpec).num_parameters > 0
    assert Path("run/cluster.json").exists() and Path("run/command.txt").exists()
    assert cli.main(words) == 0
    assert "done already" in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "code"), [("out_of_memory", 4), ("hang", 7), ("crash", 6)])
def test_a_failed_run_says_why_in_one_line(plan_file, workers, capfd, kind, code):
    workers(Failure(failure=kind, message="so it went", rank=1, fix="do this"))
    assert cli.main(["train", plan_file, "-o", "run"]) == code
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"fullstride train: error: {kind.replace('_', ' ')} on rank 1: so it went; do this"


def test_a_dry_run_launches_and_writes_nothing(plan_file, capfd):
    assert cli.main(["train", plan_file, "-o", "run", "--dry-run"]) == 0
    seen = capfd.readouterr()
    assert "fullstride.engine.worker" in seen.err and "--nproc-per-node 2" in seen.err
    assert not Path("run").exists()


def test_adapters_are_asked_for_on_the_command_line(plan_file, workers, capfd):
    asked = workers()
    words = ["train", plan_file, "-o", "run", "--steps", "2", "--lora", "8", "--set", 'adapter.targets=["q_proj"]']
    assert cli.main([*words, "--export", "out", "--merge"]) == 0, capfd.readouterr().err
    assert "adapters beside weights of tiny that nobody trained" in capfd.readouterr().err
    assert (asked["plan"].adapter, asked["merge"]) == (Adapter(rank=8, targets=("q_proj",)), True)
    for wrong in (["--merge", "--lora", "8"], ["--merge", "--export", "out"], ["--lora", "0"]):
        assert cli.main(["train", plan_file, "-o", "other", *wrong]) == 2
    assert "nothing to merge" in capfd.readouterr().err
    assert cli.main(["train", plan_file, "-o", "other", "--lora", "8", "--set", 'adapter.targets=["c_attn"]']) == 3
    assert "'c_attn', and tiny has qkv (q_proj, k_proj, v_proj)" in capfd.readouterr().err


def test_an_own_group_is_joined_and_nothing_is_launched(plan_file, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    became = []
    monkeypatch.setattr(train.os, "execv", lambda path, words: became.append((path, words)))
    monkeypatch.setattr(train, "start", lambda job: pytest.fail("launched"))
    cli.main(["train", plan_file, "-o", "run"])
    ((path, words),) = became
    assert path == sys.executable
    assert words == [sys.executable, "-m", "fullstride.engine.worker", "run", "--train"]
    assert read_plan("run/plan.toml").layout.world_size == 2


def test_a_group_of_another_size_is_refused(plan_file, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", plan_file, "-o", "run"]) == 3
    assert "WORLD_SIZE is 3, the plan is for 2 ranks" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not toml = = =", "p.toml"),
        ('kind = "plan"\nformat = 1\nsausage = 1\n', "p.toml"),
        ('kind = "plan"\nformat = 2\n', "format"),
        ("", "kind"),
    ],
)
def test_a_damaged_plan_is_one_line(plan_file, content, says, capfd):
    Path(plan_file).write_text(content)
    assert cli.main(["train", plan_file]) == 3
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and says in error


def test_a_forbidden_plan_is_refused_before_anything_is_written(plan_file, capfd):
    assert cli.main(["train", plan_file, "--set", "batch.micro_batch=3", "-o", "run"]) == 3
    assert "micro_batch" in capfd.readouterr().err
    assert not Path("run").exists()


def directory(folder, *, tokenizer=True):
    """A model directory of the network that the plans here are for."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(preset_config("tiny")))
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def test_weights_of_a_directory_go_on_with_its_own_tokenizer(plan_file, workers, tmp_path, capfd):
    """Bytes mean nothing to weights that were trained on other tokens."""
    asked = workers()
    source = directory(tmp_path / "model")
    assert cli.main(["train", plan_file, "-o", "one", "--init", source]) == 0, capfd.readouterr().err
    assert asked["plan"].workload.tokenizer == source
    assert "tokens are those of" in capfd.readouterr().err
    assert cli.main(["train", plan_file, "-o", "two", "--init", source, "--set", "workload.tokenizer=bytes"]) == 0
    assert asked["plan"].workload.tokenizer == "bytes"
    bare = directory(tmp_path / "bare", tokenizer=False)
    assert cli.main(["train", plan_file, "-o", "three", "--init", bare]) == 0
    assert asked["plan"].workload.tokenizer == "bytes"
    assert "tokenizer.json" not in capfd.readouterr().err


def test_a_plan_that_takes_bytes_for_such_weights_is_told(workers, tmp_path, plan_file, capfd):
    asked = workers()
    source = directory(tmp_path / "model")
    write_plan(make_plan(recipe=Recipe(steps=2), model=ModelRef(source=source)), tmp_path / "bytes.toml")
    assert cli.main(["train", "bytes.toml", "-o", "run"]) == 0, capfd.readouterr().err
    assert asked["plan"].workload.tokenizer == "bytes"
    assert "the plan's tokenizer is bytes, and weights of" in capfd.readouterr().err


def test_plans_for_a_directory_name_its_tokenizer(tmp_path, plan_file, capfd):
    source = directory(tmp_path / "model")
    assert cli.main(["plan", source, "--gpu", "h100-sxm", "--gpus", "2", "-o", "made.toml"]) == 0, capfd.readouterr().err
    assert read_plan("made.toml").workload.tokenizer == source
