import math
import random
import statistics

import pytest
from msgspec.structs import replace
from tests.tune.fakes import (
    AUTOCAST,
    FakeClock,
    FakeSession,
    bytes_by_parts,
    fake_cluster,
    fake_plan,
    fake_price,
    fake_spec,
    oom,
    seconds_by_parts,
)

from fullstride.files import read_json
from fullstride.plan.estimate import Term
from fullstride.plan.plan import Batch, Layout, Pipeline, Shard
from fullstride.plan.toml import read_plan
from fullstride.rundir import Failure, RunDir
from fullstride.tune.learned import learn
from fullstride.tune.levers import LEVERS
from fullstride.tune.loop import tune
from fullstride.tune.page_predictions import predictions
from fullstride.tune.trial import Ladder


class Bench:
    """A tuning run on made-up machines."""

    def __init__(self, folder):
        self.folder, self.clock, self.heard = folder, FakeClock(), []

    def tune(self, *, plan=None, minutes=10.0, cluster=None, price=None, resume=None, max_rungs=8, hear=None, **session):
        run_dir = RunDir(root=str(self.folder / "run"))
        self.session = FakeSession(run_dir, self.clock, **session)
        self.began = self.clock.now
        return tune(
            spec=fake_spec(),
            cluster=cluster or fake_cluster(),
            baseline=plan or fake_plan(),
            session=self.session,
            run_dir=run_dir,
            directory=self.folder,
            budget_seconds=60 * minutes,
            resume=resume,
            on_progress=hear or self.heard.append,
            pricer=price or fake_price(),
            clock=self.clock,
            max_rungs=max_rungs,
        )


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def by_lever(ladder):
    return {trial.lever: trial for trial in ladder.trials}


def test_gains_are_climbed_the_largest_first_and_proven(bench, tmp_path):
    ladder = bench.tune()
    kept = [trial for trial in ladder.trials if trial.outcome == "kept"]
    assert kept[0].lever == "precision"
    assert {trial.lever for trial in kept} >= {"precision", "compile", "micro-batch"}
    assert ladder.best_plan.batch.micro_batch == 4
    assert ladder.best_plan.compile.mode == "block"
    assert ladder.final.verdict == "better"
    assert ladder.final.other.plan_hash == ladder.best_plan.plan_hash
    assert ladder.final.base.plan_hash == ladder.baseline_plan.plan_hash
    truth = seconds_by_parts(ladder.baseline_plan) / seconds_by_parts(ladder.best_plan)
    assert ladder.final.ratio.low <= truth <= ladder.final.ratio.high
    assert {trial.lever for trial in ladder.trials} == {lever.name for lever in LEVERS}, "every lever has its verdict"
    assert all(trial.reason for trial in ladder.trials)
    assert read_json(tmp_path / "ladder.json", Ladder) == ladder
    assert read_plan(tmp_path / "best.toml").plan_hash == ladder.best_plan.plan_hash
    assert ladder.stopped


def test_the_budget_holds(bench):
    for minutes in (2, 4, 8):
        ladder = bench.tune(minutes=minutes)
        assert bench.clock.now - bench.began <= 60 * minutes
        assert ladder.spent_seconds <= 60 * minutes


def test_where_nothing_wins_the_baseline_stands(bench):
    ladder = bench.tune(seconds=lambda plan: 1.0, noise=0.01)
    assert ladder.best_plan == ladder.baseline_plan
    assert ladder.final is None
    assert all(trial.outcome in ("undone", "not tried") for trial in ladder.trials)
    assert any(trial.outcome == "undone" for trial in ladder.trials)


def test_noise_alone_is_hardly_ever_kept(bench):
    runs = [bench.tune(seconds=lambda plan: 1.0, noise=0.02, seed=seed, minutes=4) for seed in range(12)]
    assert any(trial.outcome == "undone" for ladder in runs for trial in ladder.trials)
    assert sum(ladder.best_plan != fake_plan() for ladder in runs) <= 1


def test_losses_are_undone(bench):
    ladder = bench.tune(seconds=lambda plan: 2.0 if plan.compile.mode == "block" else 1.0)
    assert by_lever(ladder)["compile"].outcome == "undone"
    assert "screen" in by_lever(ladder)["compile"].reason


def test_out_of_memory_is_recorded_and_larger_plans_are_not_tried(bench):
    ladder = bench.tune(fails=lambda plan: oom(plan) if plan.batch.micro_batch >= 2 else None)
    failed = [trial for trial in ladder.trials if trial.outcome == "failed"]
    assert failed
    assert all(trial.failure.failure == "out_of_memory" for trial in failed)
    sizes = [trial.estimate.peak_device_bytes for trial in failed]
    assert sizes == sorted(sizes, reverse=True), "after each the memory that is hoped for is smaller"
    assert ladder.best_plan.batch.micro_batch == 1
    assert ladder.final.verdict == "better"


@pytest.mark.parametrize("kind", ["hang", "crash", "unavailable"])
def test_other_failures_are_recorded_with_their_cause(bench, kind):
    failure = Failure(failure=kind, message=f"it was a {kind}")
    ladder = bench.tune(fails=lambda plan: failure if plan.compile.mode == "block" else None)
    trial = by_lever(ladder)["compile"]
    assert trial.outcome == "failed"
    assert trial.failure.failure == kind
    assert kind in trial.reason
    assert ladder.best_plan.compile.mode == "off"


def test_nan_is_fast_and_not_kept(bench):
    ladder = bench.tune(loss=lambda plan, step: math.nan if plan.precision.cast != "none" else 5.0)
    assert by_lever(ladder)["precision"].outcome == "failed"
    assert ladder.best_plan.precision.cast == "none"


def test_learning_that_strays_is_undone(bench):
    ladder = bench.tune(loss=lambda plan, step: 5.0 if plan.precision.cast == "none" else 5.05)
    trial = by_lever(ladder)["precision"]
    assert trial.outcome == "undone"
    assert "loss of step 0" in trial.reason


def test_a_baseline_that_does_not_fit_becomes_smaller(bench):
    plan = fake_plan(batch=Batch(micro_batch=4, accumulation=1))
    ladder = bench.tune(plan=plan, fails=lambda plan: oom(plan) if plan.batch.micro_batch > 1 else None)
    steps = [trial for trial in ladder.trials if trial.lever == "baseline"]
    assert [trial.outcome for trial in steps] == ["failed", "failed"]
    assert steps[0].plan == plan
    assert ladder.baseline_plan.batch.micro_batch == 1
    assert ladder.baseline is not None


def test_a_baseline_that_fails_ends_it(bench, tmp_path):
    ladder = bench.tune(fails=lambda plan: Failure(failure="crash", message="no such file"))
    assert "no such file" in ladder.stopped
    assert ladder.baseline is None
    assert not (tmp_path / "best.toml").exists()
    assert "nan" in bench.tune(loss=lambda plan, step: math.nan).stopped


def test_what_is_not_available_says_so(bench):
    ladder = bench.tune(cluster=fake_cluster(kind="cpu", has_compiler=False))
    trial = by_lever(ladder)["compile"]
    assert trial.outcome == "not tried"
    assert "compiler" in trial.reason


def test_a_chunked_loss_makes_room_for_a_micro_batch(bench):
    def memory(plan):
        return int(bytes_by_parts(plan) * 2.4)

    plan = fake_plan(precision=AUTOCAST, batch=Batch(micro_batch=2, accumulation=2))
    price = fake_price(lambda plan: 1 + 1 / plan.batch.micro_batch + 0.01 * (plan.loss.kind == "chunked"), memory)
    ladder = bench.tune(
        plan=plan, price=price, memory=memory, seconds=lambda plan: 1 + 1 / plan.batch.micro_batch,
        fails=lambda plan: oom(plan) if memory(plan) > 2**36 else None, cluster=fake_cluster(has_compiler=False, kind="cpu"),
    )  # fmt: skip
    kept = [trial for trial in ladder.trials if trial.outcome == "kept"]
    assert any("makes room for micro-batch 2 -> 4" in trial.change for trial in kept)
    assert ladder.best_plan.batch.micro_batch == 4


def test_memory_is_not_saved_for_its_own_sake(bench):
    ladder = bench.tune(memory=lambda plan: bytes_by_parts(plan) // 2)
    assert "under the target of 65%" in by_lever(ladder)["recompute"].reason


def unlucky(bench, minutes=20, **more):
    """The last rung kept before the first proof was luck: against the baseline at the end, its plan is slow."""
    kept, heard = [], []

    def seconds(plan):
        late = heard and heard[-1].phase == "final"
        if late and kept and plan.plan_hash == kept[-1].plan.plan_hash and len(kept) == 3:
            return 3.0
        return seconds_by_parts(plan)

    def hear(said):
        heard.append(said)
        if said.ended and said.ended.outcome == "kept":
            kept.append(said.ended)

    return bench.tune(seconds=seconds, minutes=minutes, hear=hear, **more), kept, heard


def test_a_rung_that_does_not_hold_at_the_end_falls_back(bench):
    ladder, kept, _ = unlucky(bench, max_rungs=3)
    last = next(trial for trial in ladder.trials if trial.index == kept[-1].index)
    assert last.outcome == "undone"
    assert "did not hold" in last.reason
    assert ladder.best_plan.plan_hash == kept[-2].plan.plan_hash
    assert ladder.final.verdict == "better"
    assert ladder.final.other.plan_hash == ladder.best_plan.plan_hash


def test_after_a_fall_there_is_another_climb_and_another_proof(bench):
    ladder, kept, heard = unlucky(bench, minutes=40)
    phases = [said.phase for i, said in enumerate(heard) if i == 0 or heard[i - 1].phase != said.phase]
    assert phases.count("final") >= 2 and len(kept) > 3
    assert ladder.final.verdict == "better"
    assert ladder.final.other.plan_hash == ladder.best_plan.plan_hash == kept[-1].plan.plan_hash
    assert len({trial.index for trial in ladder.trials}) == len(ladder.trials)


@pytest.mark.parametrize("orders", [1, 15, 40, 90])
def test_an_interrupted_run_is_resumed(bench, tmp_path, orders):
    with pytest.raises(KeyboardInterrupt):
        bench.tune(stop_after=orders)
    path = tmp_path / "ladder.json"
    before = read_json(path, Ladder) if path.exists() else None
    ladder = bench.tune(resume=before)
    assert ladder.final.verdict == "better"
    assert {trial.lever for trial in ladder.trials} == {lever.name for lever in LEVERS}
    if before:
        assert ladder.trials[: len(before.trials)] == before.trials
        assert ladder.spent_seconds > before.spent_seconds
    hashes = [trial.plan.plan_hash for trial in ladder.trials if trial.outcome != "not tried"]
    assert len(hashes) == len(set(hashes)), "nothing is tried twice"


def test_at_most_so_many_rungs(bench):
    ladder = bench.tune(max_rungs=1)
    assert sum(trial.outcome != "not tried" for trial in ladder.trials) == 1
    assert "1 trials are done" in ladder.stopped
    assert "predicted at" in next(t.reason for t in ladder.trials if t.outcome == "not tried" and "1 trials" in t.reason)


def test_progress_is_told(bench):
    bench.tune()
    phases = [said.phase for said in bench.heard]
    assert list(dict.fromkeys(phases)) == ["baseline", "noise", "trial", "final", "done"]
    assert all(said.left_seconds >= 0 for said in bench.heard)
    assert any(said.step_seconds for said in bench.heard if said.phase == "trial")
    assert next(said.ended.outcome for said in bench.heard if said.ended) == "kept"


def test_predictions_are_corrected_by_what_was_measured(bench):
    ladder = bench.tune(seconds=lambda plan: 1.5 * seconds_by_parts(plan), memory=lambda plan: int(1.1 * bytes_by_parts(plan)))
    errors = predictions(ladder)
    assert errors[0].name == "baseline"
    assert statistics.fmean(error.time_error for error in errors) == pytest.approx(1 / 1.5 - 1, abs=0.02)
    assert errors[0].memory_error == pytest.approx(1 / 1.1 - 1, abs=0.001)
    learned = learn(ladder)
    assert learned.memory_ratio == pytest.approx(1.1, abs=0.001)
    assert learned.factors["compute"] == pytest.approx(1.5 * 0.9, rel=0.05)


def test_a_faster_plan_that_is_not_healthy_is_undone(bench):
    """Compiled steps are a fifth faster and swing by a tenth: a figure crosses its limit, and not by chance."""
    ladder = bench.tune(noise=lambda plan: 0.1 if plan.compile.mode == "block" else 0.002, minutes=30)
    trial = by_lever(ladder)["compile"]
    assert trial.outcome == "undone"
    assert "throughput stability" in trial.reason


def test_a_long_first_build_does_not_spoil_a_trial(bench):
    """Compilation takes longer than a trial's share; visits after it are short."""
    ladder = bench.tune(
        build_seconds=lambda plan, times: 60.0 if plan.compile.mode == "block" and not times else 1.0, minutes=8
    )
    assert by_lever(ladder)["compile"].outcome == "kept"
    assert bench.clock.now - bench.began <= 60 * 8


def test_on_two_restless_cores_a_gain_of_half_is_kept(bench):
    """Steps of 0.77 s that vary by 11 %, so rounds of two vary by 8 %; 3:45 minutes."""
    found = []
    for seed in range(10):
        ladder = bench.tune(
            seconds=lambda plan: 0.77 / (1.5 if plan.precision.cast == "autocast" else 1.0),
            noise=0.11,
            seed=seed,
            minutes=3.75,
            cluster=fake_cluster(kind="cpu", has_compiler=False),
        )
        assert bench.clock.now - bench.began <= 225
        assert 0.01 < ladder.noise < 0.3
        found.append(ladder.final is not None and ladder.final.verdict == "better")
    assert sum(found) >= 8


def restless(heard, seed=2000):
    """A level of the machine that is another one for every order."""
    return random.Random(len(heard) + seed).choice((0.75, 1.0, 1.35))


def test_an_undecided_trial_is_taken_up_again_with_the_rounds_it_has(bench):
    """The first trial is played on a restless machine, which then calms down."""

    def seconds(plan):
        first = bench.heard[-1].phase == "trial" and bench.heard[-1].index == 0
        again = any(said.ended for said in bench.heard)
        gain = 1.25 if plan.precision.cast != "none" and plan.compile.mode == "off" else 1.0
        return (restless(bench.heard) if first and not again else 1.0) / gain

    ladder = bench.tune(seconds=seconds, minutes=20)
    first = [said for said in bench.heard if said.ended and said.ended.index == 0]
    assert [said.ended.outcome for said in first] == ["undone", "kept"]
    assert [said.index for said in first] == [0, 0]
    before, after = (said.ended.comparison for said in first)
    assert before.verdict == "undetermined"
    assert after.alternations > before.alternations
    assert after.base.rounds[: len(before.base.rounds)] == before.base.rounds
    assert after.other.losses == before.other.losses
    assert f"taken up again after {before.alternations} alternations" in ladder.trials[0].reason
    assert [trial.index for trial in ladder.trials] == list(range(len(ladder.trials)))
    assert ladder.best_plan.precision.cast != "none"
    assert ladder.final.verdict == "better"


def test_an_undecided_trial_is_made_anew_on_a_plan_that_has_changed(bench):
    """The first trial is undecided, the second is kept: the first change is then tried on top of it."""

    def seconds(plan):
        first = bench.heard[-1].phase == "trial" and bench.heard[-1].index == 0
        gain = (1.25 if plan.precision.cast != "none" else 1.0) * (1.2 if plan.compile.mode == "block" else 1.0)
        return (restless(bench.heard) if first else 1.0) / gain

    ladder = bench.tune(seconds=seconds, minutes=20)
    first = ladder.trials[0]
    assert (first.lever, first.outcome) == ("precision", "undone")
    assert first.comparison.verdict == "undetermined"
    assert by_lever(ladder)["compile"].outcome == "kept"
    anew = [trial for trial in ladder.trials if trial.lever == "precision" and trial.outcome == "kept"]
    assert len(anew) == 1
    assert anew[0].plan.compile.mode == "block"
    assert anew[0].comparison.base.plan_hash == by_lever(ladder)["compile"].plan.plan_hash
    assert ladder.final.verdict == "better"


def test_what_stays_undecided_is_said(bench):

    def seconds(plan):
        precision = bench.heard[-1].phase == "trial" and bench.heard[-1].lever == "precision"
        return (restless(bench.heard, 5000) if precision else 1.0) / (
            1.25 if plan.precision.cast != "none" and plan.compile.mode == "off" else 1.0
        )

    ladder = bench.tune(seconds=seconds, minutes=6)
    trial = by_lever(ladder)["precision"]
    assert (trial.outcome, trial.comparison.verdict) == ("undone", "undetermined")
    assert trial.comparison.ratio.value > 1 + ladder.noise
    assert "1 promising trial could not be decided in the time" in ladder.stopped
    assert ladder.best_plan == ladder.baseline_plan


def test_noise_that_bars_a_gain_is_measured_on_in_the_time_that_is_left(bench):
    """The machine is restless while its noise is measured at first, and calms down."""

    def seconds(plan):
        at_first = bench.heard[-1].phase == "noise" and not any(said.ended for said in bench.heard)
        level = restless(bench.heard) if at_first else 1.0
        return level / (1.2 if plan.precision.cast != "none" and plan.compile.mode == "off" else 1.0)

    ladder = bench.tune(seconds=seconds, minutes=12)
    first = next(said for said in bench.heard if said.ended)
    assert (first.ended.lever, first.ended.outcome) == ("precision", "undone")
    assert first.ended.comparison.threshold > 0.2
    assert 0.02 < ladder.noise < 0.2
    assert len(ladder.baseline.rounds) > 10
    assert len(ladder.baseline.losses) == 5
    precision = by_lever(ladder)["precision"]
    assert precision.outcome == "kept"
    assert precision.comparison.threshold == ladder.noise
    assert ladder.final.verdict == "better"
    assert bench.clock.now - bench.began <= 60 * 12
    phases = [said.phase for said in bench.heard]
    assert phases.index("trial") < len(phases) - 1 - phases[::-1].index("noise")


def hurried(bench, **more):
    """So noisy and so short that much is kept back for the last measurement, which then takes less."""
    return bench.tune(minutes=5.0, noise=0.1, **more)


def test_time_that_the_last_measurement_left_goes_to_further_rungs_and_their_own_proof(bench):
    phases = []
    ladder = hurried(bench, hear=lambda told: phases.append(told.phase))
    order = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    assert "trial" in order[order.index("final") :], "after a last measurement there was time for another trial"
    assert ladder.final.verdict == "better"
    assert ladder.final.other.plan_hash == ladder.best_plan.plan_hash
    assert {trial.lever for trial in ladder.trials} == {lever.name for lever in LEVERS}
    assert len({trial.index for trial in ladder.trials}) == len(ladder.trials)
    assert bench.clock.now - bench.began < 60 * 5


PIPED = {
    "layout": Layout(pp=2),
    "shard": Shard(),
    "pipeline": Pipeline(schedule="1f1b"),
    "batch": Batch(micro_batch=4, accumulation=2),
}
BUBBLE = {"gpipe": 0.5, "1f1b": 0.5, "zb-h1": 0.17}


def piped_seconds(plan):
    return seconds_by_parts(plan) + BUBBLE[plan.pipeline.schedule]


def test_a_pipeline_gets_the_schedule_that_shortens_its_bubble(bench):
    def price(plan, spec, cluster):
        found = fake_price(piped_seconds)(plan, spec, cluster)
        work, bubble = seconds_by_parts(plan), BUBBLE[plan.pipeline.schedule]
        terms = [Term(name=k, kind=k, seconds=t, exposed_seconds=t, source="made up", confidence="assumed")
                 for k, t in (("compute", work), ("bubble", bubble))]  # fmt: skip
        return replace(found, terms=tuple(terms))

    computes = {"computes": lambda plan, rank: 0.7 if rank else 0.4}
    ladder = bench.tune(plan=fake_plan(**PIPED), price=price, seconds=piped_seconds, minutes=20, **computes)
    trial = by_lever(ladder)["schedule"]
    assert (trial.outcome, trial.change) == ("kept", "schedule 1f1b -> zb-h1")
    assert ladder.best_plan.pipeline == Pipeline(schedule="zb-h1")
    assert ladder.final.verdict == "better"
    assert {trial.lever for trial in ladder.trials} == {lever.name for lever in LEVERS}
    shares = {share.name: share.seconds for share in ladder.baseline.shares}
    computed = (shares["forward"] + shares["backward"]) / sum(shares.values())
    assert computed == pytest.approx(0.7, abs=0.01), "the busiest rank is shown"
    assert "blocks do not lie by their cost" in by_lever(ladder)["balance"].reason
    assert by_lever(ladder)["zero"].reason == "needs several data-parallel ranks"


def test_a_schedule_that_is_only_predicted_to_be_faster_is_undone(bench):
    def seconds(plan):
        return seconds_by_parts(plan) + (0.9 if plan.pipeline.schedule == "zb-h1" else 0.5)

    ladder = bench.tune(plan=fake_plan(**PIPED), price=fake_price(piped_seconds), seconds=seconds, minutes=20)
    assert by_lever(ladder)["schedule"].outcome == "undone"
    assert ladder.best_plan.pipeline.schedule == "1f1b"
