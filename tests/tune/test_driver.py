import math

import pytest
from tests.tune.fakes import FakeClock, FakeSession, fake_cluster, fake_plan, fake_spec, oom

from fullstride.measure.protocol import Settings
from fullstride.plan.plan import Batch, Compile
from fullstride.rundir import Failure, RunDir
from fullstride.tune.driver import Driver, Record, bench, compare


@pytest.fixture
def stage(tmp_path):
    def make(**options):
        clock = FakeClock()
        run_dir = RunDir(root=str(tmp_path))
        session = FakeSession(run_dir, clock, **options)
        heard = []
        driver = Driver(session, run_dir, fake_cluster(), spec=fake_spec(), clock=clock, watch=lambda *said: heard.append(said))
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
