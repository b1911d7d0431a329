"""Our own measurements on H200, priced from the catalogue alone: no table that was measured there, no calibration."""

import json
from pathlib import Path

import pytest

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.files import convert
from fullstride.model.source import load_spec
from fullstride.plan.cost.table import terms
from fullstride.tune.trial import Ladder

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*-tune-llama3-*.json"))


FULL = 0.98
"""A device fuller than this spends time on giving memory back and taking it anew, which is not priced."""


def runs(path):
    """(plan, measured seconds) of a ladder's baseline and trials, on devices with room left."""
    ladder = convert(json.loads(path.read_bytes())["ladder"], Ladder, path.name)
    tried = [(trial.plan, trial.comparison.other) for trial in ladder.trials if trial.comparison]
    capacity = assumed_cluster("h200-sxm", 1).device.memory_bytes.value
    found = [(ladder.baseline_plan, ladder.baseline), *tried]
    return [(plan, measured) for plan, measured in found if (measured.memory.device_used_bytes or 0) < FULL * capacity]


def test_there_are_records():
    assert len(RECORDS) >= 3


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_measured_step_is_predicted_within_a_tenth(path):
    for plan, measured in runs(path):
        cluster = assumed_cluster("h200-sxm", measured.world_size)
        said = sum(term.exposed_seconds for term in terms(plan, load_spec(plan.model.source), cluster))
        assert said == pytest.approx(measured.step_seconds.value, rel=0.10)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_plan_ranked_first_is_within_a_twentieth_of_the_best(path):
    found = []
    for plan, measured in runs(path):
        cluster = assumed_cluster("h200-sxm", measured.world_size)
        said = sum(term.exposed_seconds for term in terms(plan, load_spec(plan.model.source), cluster))
        found.append((said / plan.workload.samples_per_step, measured.step_seconds.value / plan.workload.samples_per_step))
    assert min(found)[1] <= 1.05 * min(seconds for _, seconds in found)
