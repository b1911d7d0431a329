import math

import pytest
from tests.tune.fakes import FakeClock, FakeSession, fake_cluster, fake_plan, fake_spec, oom

from fullstride.measure.protocol import Settings, Visit
from fullstride.plan.plan import Batch, Compile
from fullstride.rundir import Failure, RunDir
from fullstride.tune.driver import Driver, NoTime, Record, bench, compare


@pytest.fixture
def stage(tmp_path):
    def make(kind="h200-sxm", **options):
        clock = FakeClock()
        run_dir = RunDir(root=str(tmp_path))
        session = FakeSession(run_dir, clock, **options)
        heard = []
        driver = Driver(
            session, run_dir, fake_cluster(kind=kind), spec=fake_spec(), clock=clock, watch=lambda *said: heard.append(said)
        )
        return driver, session, heard

    return make


def records():
    return Record(name="A", plan=fake_plan()), Record(name="B", plan=fake_plan(compile=Compile(mode="block")))


def test_bench(stage):
    driver, session, heard = stage()
    measured = bench(driver, Record(name="plan", plan=fake_plan()), Settings(), driver.clock() + 1000)
    assert measured.step_seconds.value == pytest.approx(1.2, rel=0.01)
    assert len(measured.rounds) == 3
    assert measured.losses == (5.0, 4.99, 4.98, 4.97, 4.96)
    assert {share.name for share in measured.shares} == {"forward", "backward", "rest"}
    assert sum(share.seconds for share in measured.shares) == pytest.approx(measured.step_seconds.value, rel=0.011)
    assert measured.memory.peak_allocated_bytes > 0
    assert session.builds == ["plan"], "rounds of one plan need one build"
    assert measured.mfu_full is None, "fp32 has no peak here"
    assert heard[0][0] == "plan"


def test_compare_alternates_and_finds_the_faster(stage):
    driver, session, _ = stage()
    comparison = compare(driver, *records(), Settings(screen=False), driver.clock() + 1000)
    assert comparison.verdict == "better"
    assert comparison.ratio.value == pytest.approx(1.25, rel=0.01)
    assert session.builds[:6] == ["A", "B"] * 3
    assert [r.label for r in comparison.base.rounds] == ["A"] * 3
    assert [r.index for r in comparison.other.rounds] == [1, 3, 5]
    assert comparison.base.shares
    assert comparison.other.shares


def test_a_failure_is_a_value(stage):
    driver, _, _ = stage(fails=lambda plan: oom(plan) if plan.compile.mode == "block" else None)
    outcome = compare(driver, *records(), Settings(), driver.clock() + 1000)
    assert isinstance(outcome, Failure)
    assert outcome.failure == "out_of_memory"


def test_numbers_that_stray_make_the_comparison_void_at_once(stage):
    driver, session, _ = stage(loss=lambda plan, step: 5.0 * (1.01 if plan.compile.mode == "block" else 1.0))
    comparison = compare(driver, *records(), Settings(), driver.clock() + 1000)
    assert comparison.verdict == "void"
    assert "loss of step 0" in comparison.reasons[0]
    assert session.builds == ["A", "B"]


def test_nan_is_never_fast(stage):
    driver, _, _ = stage(loss=lambda plan, step: math.nan if plan.compile.mode == "block" and step > 3 else 5.0)
    outcome = compare(driver, *records(), Settings(), driver.clock() + 1000)
    assert isinstance(outcome, Failure)
    assert outcome.failure == "not_finite"
    assert "nan" in outcome.message


def test_the_base_of_an_earlier_comparison_starts_afresh(stage):
    driver, _, _ = stage()
    base, other = records()
    compare(driver, base, other, Settings(screen=False), driver.clock() + 1000)
    third = Record(name="C", plan=fake_plan(batch=Batch(micro_batch=4)))
    comparison = compare(driver, base, third, Settings(screen=False), driver.clock() + 1000)
    assert len(comparison.base.rounds) == 3
    assert comparison.base.losses[0] == 5.0


def test_two_drivers_in_one_run_directory_do_not_read_each_others_steps(stage, tmp_path):
    driver, session, _ = stage()
    bench(driver, Record(name="plan", plan=fake_plan()), Settings(), driver.clock() + 1000)
    driver.release()
    again = Driver(session, RunDir(root=str(tmp_path)), fake_cluster(), clock=driver.clock)
    measured = bench(again, Record(name="plan", plan=fake_plan()), Settings(round_steps=4), again.clock() + 1000)
    assert {len(r.step_seconds) for r in measured.rounds} == {4}


def test_recompilation_voids_a_round_and_the_round_is_repeated(stage):
    driver, _, _ = stage(recompiles=lambda order: 1 if order == 4 else 0)
    measured = bench(driver, Record(name="plan", plan=fake_plan()), Settings(), driver.clock() + 1000)
    assert [bool(r.void) for r in measured.rounds].count(True) == 1
    assert "1 recompilations" in next(r.void for r in measured.rounds if r.void)
    assert sum(not r.void for r in measured.rounds) == 3
    assert measured.recompiles == 1


def test_a_plan_that_always_recompiles_is_given_up(stage):
    driver, _, _ = stage(recompiles=lambda order: 1)
    outcome = compare(driver, *records(), Settings(), driver.clock() + 1000)
    assert isinstance(outcome, Failure)
    assert "recompilations" in outcome.message


def test_the_base_is_named_where_it_fails(stage):
    driver, _, _ = stage(fails=lambda plan: oom(plan) if plan.compile.mode == "off" else None)
    assert compare(driver, *records(), Settings(), driver.clock() + 1000).message.startswith("the plan it is compared with")


def test_steps_that_nobody_wrote_down_are_a_failure(stage, monkeypatch):
    monkeypatch.setattr("fullstride.tune.driver._FLUSH_SECONDS", 0.0)
    driver, session, _ = stage()
    monkeypatch.setattr(session, "_write", lambda *_: None)
    outcome = bench(driver, Record(name="plan", plan=fake_plan()), Settings(), driver.clock() + 1000)
    assert isinstance(outcome, Failure)
    assert "wrote down 0" in outcome.message


def test_orders_have_a_time_out_once_the_pace_is_known(stage):
    driver, session, _ = stage()
    driver.limit_seconds = lambda steps: 10.0 * steps
    bench(driver, Record(name="plan", plan=fake_plan()), Settings(), driver.clock() + 1000)
    assert set(session.limits) == {20.0, 60.0}


def test_the_full_form_warms_up_before_every_round(stage):
    driver, session, _ = stage()
    full = Settings(form="full", warmup_steps=30, max_warmup_steps=30, round_steps=50)
    measured = bench(driver, Record(name="plan", plan=fake_plan()), full, driver.clock())
    assert measured.form == "full"
    assert measured.warmup_steps == 30
    assert [len(r.step_seconds) for r in measured.rounds] == [50] * 3
    assert session.step >= 3 * 80


def test_a_plan_that_is_known_warms_up_in_one_step_and_in_more_where_that_is_slow(stage):
    driver, session, _ = stage(noise=0.0)
    steps = []
    run = session.run
    session.run = lambda number, *more, **options: (steps.append(number), run(number, *more, **options))[1]
    compare(driver, *records(), Settings(screen=False, max_alternations=3), driver.clock() + 1000, profile_after=())
    assert steps == [2, 6, 2, 6, 1, 6, 1, 6, 1, 6, 1, 6]
    base, _ = records()
    base.known_seconds = 0.1
    steps.clear()
    driver.release()
    bench(driver, base, Settings(), driver.clock() + 1000)
    assert steps[:3] == [1, 2, 6], "one step does not look like what is known, two more are alike"


def test_a_comparison_goes_on_from_earlier_rounds(stage):
    driver, _, _ = stage()
    base, other = records()
    first = compare(driver, base, other, Settings(screen=False, max_alternations=3), driver.clock() + 1000)
    rounds = sorted((*first.base.rounds, *first.other.rounds), key=lambda r: r.index)
    settings = Settings(screen=False, max_alternations=5, threshold=0.5)
    second = compare(driver, base, other, settings, driver.clock() + 1000, earlier=rounds)
    assert second.verdict == "no difference", "decided by the rounds there are"
    assert second.base.rounds == first.base.rounds
    third = compare(driver, base, other, Settings(min_alternations=4), driver.clock() + 1000, earlier=rounds)
    assert third.verdict == "better"
    assert [r.index for r in third.other.rounds] == [1, 3, 5, 7]
    assert third.other.rounds[:3] == first.other.rounds


def test_a_time_that_ends_before_the_other_had_a_round_is_no_failure_of_it(stage):
    driver, _, _ = stage()
    outcome = compare(driver, *records(), Settings(), driver.clock() + 10)
    assert isinstance(outcome, NoTime)
    assert "time ended" in outcome.message


def test_on_a_cpu_with_room_for_two_plans_take_turns_without_being_built_again(stage):
    driver, session, _ = stage(kind="cpu")
    base, other = records()
    compare(driver, base, other, Settings(screen=False, min_alternations=5), driver.clock() + 1000)
    assert session.builds == ["A", "B", "A"], "the first visit of each is alone, then both stand"
    assert [len(r.rounds) for r in (base, other)] == [5, 5]
    assert base.since_build > 4 * 6 and other.since_build > 5 * 6, "steps go on where they were"
    driver.release()
    assert not session.aside


def test_two_plans_that_do_not_fit_beside_each_other_are_built_in_turn(stage):
    driver, session, _ = stage(kind="cpu", host_bytes=2**36)
    compare(driver, *records(), Settings(screen=False), driver.clock() + 1000)
    assert session.builds[:6] == ["A", "B"] * 3


def test_a_plan_that_was_lost_with_its_worker_is_warmed_up_again(stage):
    driver, session, _ = stage(kind="cpu")
    base, other = records()
    compare(driver, base, other, Settings(screen=False), driver.clock() + 1000)
    session.aside.clear()
    waits = driver._aside
    before = len(session.limits)
    driver.visit(waits, Visit(index=9, label=waits.name, warmup_steps=2, max_warmup_steps=4, round_steps=2))
    assert session.builds[-1] == waits.name
    assert len(session.limits) - before == 2, "one order to warm up, one that is timed"
