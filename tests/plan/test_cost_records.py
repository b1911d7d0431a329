"""Our own measurements on H200, priced from the catalogue alone: no table that was measured there, no calibration."""

import json
from pathlib import Path

import pytest

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.files import convert
from fullstride.model.source import load_spec
from fullstride.plan.cost import comm, compute
from fullstride.plan.ledger import flat, states
from fullstride.plan.plan import Plan
from fullstride.plan.price import price
from fullstride.tune.trial import Ladder

HALF = Path(__file__).parents[2] / "benchmarks/results/2026-11-30-one-rank-llama3-8b-half.json"
RECORDS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*-tune-llama3-*.json"))


def runs(path):
    """(seconds a sample predicted, measured, whether the device was full) of a ladder's baseline and trials."""
    ladder = convert(json.loads(path.read_bytes())["ladder"], Ladder, path.name)
    tried = [(trial.plan, trial.comparison.other) for trial in ladder.trials if trial.comparison]
    for plan, measured in ((ladder.baseline_plan, ladder.baseline), *tried):
        estimate = price(plan, load_spec(plan.model.source), assumed_cluster("h200-sxm", measured.world_size))
        full = any(term.name == "allocator at its limit" for term in estimate.terms)
        samples = plan.workload.samples_per_step
        yield estimate.step_seconds / samples, measured.step_seconds.value / samples, full


@pytest.fixture
def torchs_adamw(monkeypatch):
    """The ladders were stepped by torch's kernel, beside which gradients are widened and weights copied."""
    for room in (compute, comm, states, flat):
        monkeypatch.setattr(room, "steps_in_one_pass", lambda plan, cluster: False)


def test_there_are_records():
    assert len(RECORDS) >= 3


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("torchs_adamw")
def test_every_measured_step_is_predicted_within_a_tenth_and_on_a_full_device_within_a_seventh(path):
    for said, measured, full in runs(path):
        assert said == pytest.approx(measured, rel=1 / 7 if full else 0.10)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("torchs_adamw")
def test_the_plan_ranked_first_is_within_a_twentieth_of_the_best(path):
    found = [(said, measured) for said, measured, _ in runs(path)]
    assert min(found)[1] <= 1.05 * min(seconds for _, seconds in found)


def test_a_device_that_was_full_is_among_them():
    assert any(full for path in RECORDS for _, _, full in runs(path))


def test_one_rank_of_a_large_model_to_a_few_per_cent():
    row = json.loads(HALF.read_bytes())["plans"]["one rank"]
    plan = convert(row["plan"], Plan, HALF.name)
    estimate = price(plan, load_spec(plan.model.source), assumed_cluster("h200-sxm", 1))
    optimizer = next(term.seconds for term in estimate.terms if term.name == "optimizer")
    assert estimate.step_seconds == pytest.approx(row["step_seconds"], rel=0.02)
    assert estimate.peak_allocated_bytes == pytest.approx(row["peak_bytes"], rel=0.02)
    assert optimizer * 1e3 == pytest.approx(row["shares"]["optimizer"], rel=0.06)
