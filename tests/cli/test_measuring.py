"""`bench` and `compare`: what they write, say and return; the measuring itself is the driver's."""

import json
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.cli.values import make_comparison, make_measurement, make_plan

from fullstride.cli import bench, compare
from fullstride.cli import main as cli
from fullstride.files import read_json, write_json
from fullstride.measure.measurement import Comparison, Measurement
from fullstride.measure.protocol import FULL
from fullstride.plan.plan import Recipe, Threads
from fullstride.plan.toml import write_plan
from fullstride.rundir import Failure


@pytest.fixture
def plans(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_plan(make_plan(), tmp_path / "a.toml")
    write_plan(make_plan(threads=Threads(compute=1)), tmp_path / "b.toml")
    write_plan(make_plan(recipe=Recipe(steps=99)), tmp_path / "other.toml")

    @contextmanager
    def driver_of(*_args):
        yield "driver"

    for verb in (bench, compare):
        monkeypatch.setattr(verb, "driver_of", driver_of)


@pytest.fixture
def answer(monkeypatch):
    """What the driver answers; keeps what it was asked."""
    asked = []

    def use(value):
        monkeypatch.setattr(bench, "bench", lambda *args: asked.append(args) or value)
        monkeypatch.setattr(compare, "compare", lambda *args: asked.append(args) or value)
        return asked

    return use


def test_bench_leaves_a_measurement_and_a_page(plans, answer, capfd):
    asked = answer(make_measurement())
    assert cli.main(["bench", "a.toml", "-o", "run", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["kind"] == "measurement" and told["data"]["step_seconds"]["value"] == 1.0
    assert read_json("run/measurement.json", Measurement) == make_measurement()
    assert "<html" in Path("run/report.html").read_text()[:200].lower()
    assert asked[0][1].plan == make_plan() and asked[0][2].form == "short"
    assert cli.main(["bench", "a.toml", "-o", "run"]) == 3
    assert "is there already" in capfd.readouterr().err


def test_bench_for_a_person_shows_the_interval(plans, answer, capfd):
    answer(make_measurement())
    assert cli.main(["bench", "a.toml", "--full"]) == 0
    assert "1.00 s" in capfd.readouterr().out
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("bench-") and folder.name.endswith("-tiny")


def test_the_full_form_is_the_long_one(plans, answer):
    asked = answer(make_measurement())
    assert cli.main(["bench", "a.toml", "--full", "-o", "x"]) == 0
    assert asked[0][2] == FULL


def test_a_failed_measurement_has_its_exit_code_and_stays(plans, answer, capfd):
    failure = Failure(failure="out_of_memory", message="wanted 3 GiB", rank=0)
    answer(failure)
    assert cli.main(["bench", "a.toml", "-o", "run"]) == 4
    assert capfd.readouterr().err.splitlines()[-1].startswith("fullstride bench: error: out of memory on rank 0: wanted 3 GiB")
    assert read_json("run/FAILED.json", Failure) == failure


@pytest.mark.parametrize(
    ("verdict", "code"), [("better", 0), ("no difference", 0), ("worse", 0), ("undetermined", 9), ("void", 6)]
)
def test_compare_measures_in_turns_and_answers(plans, answer, capfd, verdict, code):
    comparison = msgspec.structs.replace(make_comparison(), verdict=verdict)
    asked = answer(comparison)
    assert cli.main(["compare", "a.toml", "b.toml", "-o", "run", "--json"]) == code
    assert json.loads(capfd.readouterr().out)["data"]["verdict"] == verdict
    assert read_json("run/comparison.json", Comparison) == comparison
    assert [record.name for record in asked[0][1:3]] == ["A", "B"]


def test_plans_of_other_work_do_not_compare(plans, answer, capfd):
    answer(make_comparison())
    assert cli.main(["compare", "a.toml", "other.toml"]) == 3
    assert "[recipe] differs" in capfd.readouterr().err
    assert not Path("runs").exists()


def test_two_measurements_give_a_ratio_and_no_verdict(plans, capfd):
    write_json("a.json", make_measurement(1.0))
    write_json("b.json", make_measurement(0.5))
    assert cli.main(["compare", "a.json", "b.json", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)["data"]
    assert told["ratio"]["value"] == pytest.approx(2.0) and not told["interleaved"] and told["verdict"] == "undetermined"
    assert cli.main(["compare", "a.json", "b.json"]) == 0
    text = capfd.readouterr().out
    assert "not interleaved" in text and "better" not in text


def test_a_plan_and_a_measurement_are_not_compared(plans, capfd):
    write_json("a.json", make_measurement())
    assert cli.main(["compare", "a.json", "a.toml"]) == 2
    assert "not the same kind" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["bench", "a.toml"], ["compare", "a.toml", "b.toml"]])
def test_a_dry_run_writes_nothing(plans, capfd, words):
    assert cli.main([*words, "--dry-run"]) == 0
    assert "would measure" in capfd.readouterr().err
    assert not Path("runs").exists()


def test_report_makes_the_page_of_what_is_there(plans, capfd):
    write_json("c.json", make_comparison())
    assert cli.main(["report", "c.json"]) == 0
    assert Path("c.html").read_text().count("<html") == 1
    assert cli.main(["report", "c.json"]) == 3
    write_json("run/measurement.json", make_measurement())
    assert cli.main(["report", "run"]) == 0 and cli.main(["report", "run"]) == 0
    assert "renewed run/report.html" in capfd.readouterr().err
    assert cli.main(["report", "run", "-o", "x.html", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["data"]["page"] == "x.html"
    assert cli.main(["report", "nowhere"]) == 3
