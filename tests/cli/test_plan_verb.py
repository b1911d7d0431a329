"""`plan` and `explain` as a user meets them: answers, files, other frameworks' configurations, two plans side by side."""

import json

import pytest
from msgspec.structs import replace

from fullstride.cli.main import main
from fullstride.plan.defaults import weights_cast
from fullstride.plan.pipeline import plan_schedule
from fullstride.plan.plan import Batch, Layout, Pipeline, Plan, Recompute, Shard
from fullstride.plan.rules import check
from fullstride.plan.schedule.text import write_schedule
from fullstride.plan.toml import read_plan, write_plan

HERE = ["--gpu", "h100-sxm", "--gpus", "8"]


def told(capfd, *words, code=0):
    assert main([*words, "--json"]) == code
    return json.loads(capfd.readouterr().out)["data"]


def shown(capfd, *words, code=0):
    assert main(list(words)) == code
    return " ".join(capfd.readouterr().out.split())


def test_plan_ranks_every_layout_and_marks_what_runs(capfd):
    text = shown(capfd, "plan", "gpt2", *HERE, "--tokens", "300B")
    for words in ("The best plans", "GPU-days for 300 B tokens", "One step away from the best plan", "plans considered"):
        assert words in text
    data = told(capfd, "plan", "gpt2", *HERE)
    assert len(data["runs"]) == len(data["best"]) and data["neighbours"]


def test_o_writes_the_best_plan_that_runs_and_any_the_best(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["llama3-8b", *HERE, "--global-batch", "256"]
    ranking = told(capfd, "plan", *options, "-o", "runs.toml")
    assert not check(read_plan("runs.toml"))
    told(capfd, "plan", *options, "--any", "-o", "any.toml")
    assert read_plan("any.toml").plan_hash == ranking["estimates"][0]["plan_hash"]
    few = ["llama3-8b", *HERE, "--global-batch", "4"]
    ranking = told(capfd, "plan", *few)
    runs = any(ranking["runs"]) or ranking["runnable"] is not None
    assert main(["plan", *few, "-o", "few.toml", "--dry-run"]) == (0 if runs else 4)
    assert ("--any" in capfd.readouterr().err) is not runs
    assert main(["plan", *few, "--any", "-o", "few.toml", "--dry-run"]) == 0
    assert not (tmp_path / "few.toml").exists()


def test_plans_for_adapters_take_less_and_hold_them(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["llama3-8b", "--gpu", "h200-sxm", "--gpus", "2"]
    all_of_it = told(capfd, "plan", *options)
    ranking = told(capfd, "plan", *options, "--lora", "16", "-o", "lora.toml")
    plan = read_plan("lora.toml")
    assert plan.adapter.rank == 16 and not check(plan)
    assert {best["adapter"]["rank"] for best in ranking["best"]} == {16}
    fastest = [told["estimates"][0]["step_seconds"] for told in (all_of_it, ranking)]
    assert fastest[1] < 0.8 * fastest[0]  # no products for the gradients of frozen weights
    assert "adapters of rank 16" in shown(capfd, "plan", *options, "--lora", "16")


@pytest.mark.parametrize(
    ("choice", "possible", "words"),
    [
        ("tp=8", True, "The best plan with it takes"),
        ("tp=3", False, "8 / 3 = 2.667"),
        ("pp=8,layers_per_stage=[4,4,4,4,4,4,4,3]", False, "adds up to 31"),
        ("zero=3,micro_batch=3", False, "is not whole"),
    ],
)
def test_why_answers_about_a_choice(capfd, choice, possible, words):
    options = ["llama3-8b", *HERE, "--global-batch", "256", "--why", choice]
    data = told(capfd, "plan", *options)
    assert data["possible"] is possible
    assert words in shown(capfd, "plan", *options)


def test_o_writes_the_plan_that_was_asked_about(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["plan", "llama3-8b", *HERE, "--global-batch", "256"]
    data = told(capfd, *options, "--why", "pp=2,schedule=1f1b", "-o", "two.toml")
    plan = read_plan("two.toml")
    assert (plan.layout.pp, plan.pipeline.schedule) == (2, "1f1b") and not check(plan)
    assert plan.plan_hash == data["estimate"]["plan_hash"]
    assert main([*options, "--why", "cp=2", "-o", "cp.toml"]) == 3
    assert "not run by this version" in capfd.readouterr().err
    assert main([*options, "--why", "tp=3", "-o", "tp.toml"]) == 3
    assert "8 / 3 = 2.667" in " ".join(capfd.readouterr().err.split())
    assert sorted(path.name for path in tmp_path.glob("*.toml")) == ["two.toml"]
    told(capfd, *options, "--why", "cp=2", "--any", "-o", "cp.toml")
    assert read_plan("cp.toml").layout.cp == 2


def test_explain_of_a_pipeline(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told(capfd, "plan", "llama3-8b", *HERE, "--global-batch", "64", "-o", "one.toml")
    text = (tmp_path / "one.toml").read_text()
    plan = read_plan("one.toml")
    share = 64 // 4 // plan.batch.micro_batch
    for old, new in (
        ("\npp = 1", "\npp = 2"),
        (f"\ndp_shard = {plan.layout.dp_shard}", "\ndp_shard = 4"),
        ('\nschedule = "none"', '\nschedule = "1f1b"'),
        (f"\naccumulation = {plan.batch.accumulation}", f"\naccumulation = {share}"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "two.toml").write_text(text)
    assert main(["explain", "two.toml", "--against", "one.toml"]) in (0, 4)
    captured = capfd.readouterr()
    text = " ".join(captured.out.split())
    for words in ("Memory by pipeline rank", "timeline, simulated", "Against the other plan", "times the tokens a second"):
        assert words in text
    assert isinstance(read_plan("two.toml"), Plan)


def test_explain_of_a_schedule_file_says_which_figures_are_its_own(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told(capfd, "plan", "llama3-8b", *HERE, "--global-batch", "64", "-o", "one.toml")
    plan = read_plan("one.toml")
    piped = replace(
        plan, layout=Layout(pp=plan.layout.world_size), shard=Shard(), batch=Batch(micro_batch=1, accumulation=64),
        pipeline=Pipeline(schedule="gpipe"), precision=weights_cast(1, "none"), recompute=Recompute(),
    )  # fmt: skip
    write_schedule(plan_schedule(piped), "mine.schedule")
    mine = replace(piped, pipeline=Pipeline(schedule="1f1b", schedule_file="mine.schedule"))
    write_plan(mine, "mine.toml")
    assert main(["explain", "mine.toml"]) in (0, 4)
    text = " ".join(capfd.readouterr().out.split())
    assert "In the order of mine.schedule; terms and rows above are those of 1f1b." in text
    assert "0P" not in text  # nothing is said of data parallelism where there is none
    assert "In this order rank " in text and "on a device of 79.6 GiB" in text  # all micro-batches stand in gpipe


def test_explain_of_a_layout_that_no_framework_could_do(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told(capfd, "plan", "gpt2", *HERE, "-o", "one.toml")
    (tmp_path / "bad.toml").write_text((tmp_path / "one.toml").read_text().replace("\ntp = 1", "\ntp = 5"))
    assert main(["explain", "bad.toml"]) == 3
    assert "12 / 5 = 2.4 heads a rank" in capfd.readouterr().err


def test_explain_reads_other_frameworks_files(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "wall_clock_breakdown": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    code = main(["explain", "ds.json", "--model", "gpt2", "--gpus", "8", "--seq", "1024"])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert "ZeRO-2 does not double" in " ".join(captured.out.split())
    assert "wall_clock_breakdown" in captured.err
    assert main(["explain", "ds.json"]) == 3
    assert "--model" in capfd.readouterr().err
