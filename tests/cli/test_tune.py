"""`tune`: the task it makes of a command line, what it leaves behind, what it says; the loop itself is a fake here."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.cli.values import make_comparison, make_measurement, make_plan

import fullstride
from fullstride.cli import main as cli
from fullstride.cli import tuning
from fullstride.cli.tune import Watcher, summary_of
from fullstride.files import read_json, write_json
from fullstride.plan.toml import read_plan, write_plan
from fullstride.report.document import Chart, Document, Heading, Text, Trace
from fullstride.tune.progress import TuneProgress
from fullstride.tune.trial import Ladder, Trial


def make_ladder(plan, **changes):
    ladder = Ladder(started="2026-01-01T00:00:00+0000", budget_seconds=240, baseline_plan=plan, best_plan=plan)
    return msgspec.structs.replace(ladder, **{"baseline": make_measurement(), "stopped": "enough", **changes})


@pytest.fixture
def loop(tmp_path, monkeypatch, cluster):
    """Replaces the machine, the workers and the loop; keeps what the loop was asked."""
    monkeypatch.chdir(tmp_path)
    asked, closed = [], []

    class Session:
        def __init__(self, *_args):
            pass

        def close(self):
            closed.append(True)

    def tune(**task):
        asked.append(task)
        ladder = make_ladder(task["baseline"], **tune.changes)
        write_json(task["directory"] / "ladder.json", ladder)
        if tune.stops:
            raise KeyboardInterrupt
        write_plan(ladder.best_plan, task["directory"] / "best.toml", overwrite=True)
        return ladder

    tune.changes, tune.stops, tune.asked, tune.closed = {}, False, asked, closed
    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.setattr(tuning, "WorkerSession", Session)
    monkeypatch.setattr(tuning, "probe_cluster", lambda num_ranks=None: cluster)
    monkeypatch.setattr(tuning, "measure_cluster", lambda cluster, quick, warn: cluster)
    return tune


def test_with_no_arguments_a_small_model_is_tuned_on_two_ranks(loop, capfd, cluster):
    assert cli.main(["tune"]) == 0
    (task,) = loop.asked
    workload = task["baseline"].workload
    assert (workload.sequence_length, workload.samples_per_step, workload.data) == (256, 8, "stdlib")
    assert task["baseline"].layout.world_size == 2 and task["baseline"].model.source == "tiny"
    assert 0 < task["budget_seconds"] <= 270
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("tune-") and folder.name.endswith("-tiny")
    assert {"best.toml", "ladder.json", "report.html", "cluster.json", "model.json"} <= {p.name for p in folder.iterdir()}
    assert loop.closed
    seen = capfd.readouterr()
    assert "best.toml" in seen.err and "baseline stands" in seen.out


def test_the_work_is_that_of_the_command_line(loop, capfd):
    words = ["tune", "gpt2", "--seq", "64", "--global-batch", "4", "--data", "x.txt", "--minutes", "2", "-o", "out", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capfd.readouterr().out)["kind"] == "ladder"
    (task,) = loop.asked
    workload = task["baseline"].workload
    assert (workload.sequence_length, workload.samples_per_step, workload.data) == (64, 4, "x.txt")
    assert task["budget_seconds"] <= 120
    assert cli.main(words) == 3
    assert "is there already" in capfd.readouterr().err


def test_an_own_plan_is_the_baseline_and_says_what_the_work_is(loop, capfd):
    write_plan(make_plan(), "mine.toml")
    assert cli.main(["tune", "--baseline", "mine.toml", "-o", "out"]) == 0
    assert loop.asked[0]["baseline"] == make_plan()
    for extra in (["tiny"], ["--seq", "8"], ["--data", "x"]):
        assert cli.main(["tune", *extra, "--baseline", "mine.toml", "-o", "new"]) == 2
    assert "the plan says what the work is" in capfd.readouterr().err


def test_an_interrupted_run_leaves_a_page_and_is_resumed(loop, capfd):
    loop.stops = True
    assert cli.main(["tune", "-o", "out"]) == 130
    assert "tune --resume -o out` goes on" in capfd.readouterr().err
    assert Path("out/report.html").exists() and loop.closed
    assert not Path("out/DONE").exists()
    loop.stops = False
    assert cli.main(["tune", "--resume", "-o", "out"]) == 0
    first, second = loop.asked
    assert second["resume"] == make_ladder(first["baseline"]) and second["baseline"] == first["baseline"]
    assert Path("out/DONE").exists()


def test_resuming_needs_a_run_of_this_machine(loop, capfd, cluster):
    assert cli.main(["tune", "--resume"]) == 2
    assert cli.main(["tune", "--resume", "-o", "nothing"]) == 3
    assert cli.main(["tune", "tiny", "--resume", "-o", "nothing"]) == 2
    assert cli.main(["tune", "-o", "out"]) == 0
    group = cluster.groups[0]
    other = msgspec.structs.replace(group.device, name="another CPU")
    write_json("out/cluster.json", msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, device=other),)))
    capfd.readouterr()
    assert cli.main(["tune", "--resume", "-o", "out"]) == 3
    assert "was begun on 2 x another CPU" in capfd.readouterr().err


def test_a_baseline_that_cannot_be_measured_is_a_failed_run(loop, capfd):
    loop.changes = {"baseline": None, "stopped": "the baseline failed (crash): so it went"}
    assert cli.main(["tune", "-o", "out"]) == 6
    assert "so it went" in capfd.readouterr().err.splitlines()[-1]
    assert Path("out/report.html").exists()


def test_a_dry_run_tunes_nothing(loop, capfd):
    assert cli.main(["tune", "-o", "out", "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["kind"] == "plan"
    assert cli.main(["tune", "-o", "out", "--dry-run", "--minutes", "4.5"]) == 0
    told = capfd.readouterr()
    assert "for 4.5 minutes" in told.err
    assert "[workload]" in told.out, "the plan that it would start from is shown"
    assert not loop.asked and not Path("out").exists()


def test_tuning_is_a_function_too(loop):
    ladder = fullstride.autotune(directory="out", minutes=1)
    assert ladder == read_json("out/ladder.json", Ladder)
    assert fullstride.read_run("out").ladder == ladder
    assert read_plan("out/best.toml") == ladder.best_plan
    fullstride.autotune(directory="out", resume=True)
    fullstride.autotune(baseline=make_plan(), directory="own")
    assert loop.asked[-1]["baseline"] == make_plan()


def test_the_watcher_says_each_thing_once():
    told = []

    class View:
        def phase(self, text):
            told.append(("phase", text))

        def trial(self, lever, change, ratio):
            told.append(("trial", lever, change, ratio))

        def step(self, seconds, label):
            told.append(("step", seconds, label))

        def verdict(self, lever, outcome, note, tone):
            told.append(("verdict", lever, outcome, note, tone))

    watch = Watcher(View())
    common = {"spent_seconds": 1.0, "left_seconds": 2.0}
    watch(TuneProgress(phase="baseline", **common))
    watch(TuneProgress(phase="baseline", step_seconds=1.5, plan_name="baseline", **common))
    trial = {"phase": "trial", "index": 0, "lever": "threads", "change": "1 -> 2", "predicted_ratio": 1.1}
    watch(TuneProgress(**trial, **common))
    watch(TuneProgress(**trial, step_seconds=1.2, plan_name="trial-00", **common))
    ended = Trial(
        index=0,
        lever="threads",
        change="1 -> 2",
        plan=make_plan(),
        predicted_ratio=1.1,
        outcome="kept",
        reason="proven",
        comparison=make_comparison(),
    )
    watch(TuneProgress(**trial, ended=ended, **common))
    assert told == [
        ("phase", "measuring the baseline"),
        ("step", 1.5, "baseline"),
        ("trial", "threads", "1 -> 2", 1.1),
        ("step", 1.2, "trial-00"),
        ("verdict", "threads", "kept", "1 -> 2: proven", "good"),
    ]


def test_the_terminal_gets_the_answer_and_the_ladder():
    chart = Chart(title="c", form="bar", traces=(Trace(name="t", x=("a",), y=(1.0,)),))
    blocks = (Text(text="top"), Heading(text="The ladder"), chart, Text(text="rows"), Heading(text="Plan"), Text(text="long"))
    short = summary_of(Document(title="T", blocks=blocks))
    assert [block.text for block in short.blocks] == ["top", "The ladder", "rows"]
