"""Flat buffers in planning: sizes, what they move, copy and hide, and where plans with them are proposed."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.model.source import load_spec
from fullstride.plan.cost.comm import volumes
from fullstride.plan.cost.table import terms
from fullstride.plan.defaults import FP32, layout_for, weights_cast
from fullstride.plan.facts import num_parameters
from fullstride.plan.flat import ALIGN, aligned, flat_size
from fullstride.plan.neighbours import changes_of, vary
from fullstride.plan.plan import Batch, Loss, Optimizer, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import check
from fullstride.plan.space import layouts, summary
from fullstride.tune.levers import LEVERS

SPEC, GPUS = llama(), gpus()
P = num_parameters(SPEC)
TABLE = SPEC.vocab_size * SPEC.hidden_size


def plan_for(stage, carrier="flat", micro_batches=1, ranks=8, **parts):
    layout, shard = layout_for(stage, ranks)
    return plan_of(
        **{
            "workload": Workload(sequence_length=64, samples_per_step=2 * micro_batches * ranks),
            "layout": layout,
            "shard": replace(shard, carrier=carrier),
            "batch": Batch(micro_batch=2, accumulation=micro_batches),
            "precision": weights_cast(micro_batches, carrier),
            **parts,
        }
    )


def by_name(plan):
    return {term.name: term for term in terms(plan, SPEC, GPUS)}


@given(st.lists(st.integers(1, 10_000), min_size=1), st.integers(1, 512))
def test_buffers_hold_all_and_divide(counts, shards):
    size = flat_size(counts, shards)
    assert size % (shards * ALIGN) == 0
    assert sum(counts) <= sum(map(aligned, counts)) <= size < sum(counts) + ALIGN * (len(counts) + shards)


def test_what_a_step_moves():
    """As FSDP2, but an embedding's weights are not gathered for its backward."""
    for micro in (1, 3):
        total = {stage: volumes(plan_for(stage, micro_batches=micro), SPEC).total for stage in (1, 2, 3)}
        assert total == {1: 2 * P, 2: (micro + 1) * P, 3: micro * (3 * P - TABLE)}


def test_one_copy_of_gradients_and_a_cast_of_shards_that_the_optimizer_did_not_make():
    small = by_name(plan_for(2, precision=FP32))["copies of flat buffers"].seconds
    torchs = Optimizer(implementation="foreach")
    for parts, cast in (({}, 0), ({"optimizer": torchs}, P / 8 * 6)):
        found = by_name(plan_for(2, **parts))["copies of flat buffers"].seconds
        assert found / small == pytest.approx((P * 6 + cast) / (P * 8), rel=1e-6)
    assert "FSDP2's copies" not in by_name(plan_for(2))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 4])
def test_less_is_copied_and_no_more_stands_outside_than_under_fsdp2(stage, micro):
    flat, other = by_name(plan_for(stage, micro_batches=micro)), by_name(plan_for(stage, "fsdp2", micro))
    if stage > 1 or micro == 1:  # sums over micro-batches are passes of flat buffers, and autograd's own under FSDP2
        assert flat["copies of flat buffers"].seconds < other["FSDP2's copies"].seconds
    assert flat["all-gather of weights"].exposed_seconds <= other["all-gather of weights"].exposed_seconds
    assert flat["reduce-scatter of gradients"].seconds == other["reduce-scatter of gradients"].seconds


def test_they_are_among_the_plans_and_one_step_away():
    found = [(layout, shard) for layout, shard in layouts(8, GPUS) if shard.carrier == "flat"]
    assert sorted(shard.stage for _, shard in found) == [1, 2, 3]
    plan = plan_for(2, "fsdp2")
    change = dict(changes_of(plan, SPEC, GPUS))["flat buffers"]
    flat = vary(plan, change, SPEC)
    assert flat.shard.carrier == "flat" and flat.layout == plan.layout and not check(flat)
    assert vary(flat, {"shard.stage": 3}, SPEC).shard.carrier == "flat"
    assert "flat zero 2" in summary(flat)


def test_the_lever_goes_both_ways_and_the_stage_stays_on_flat_buffers():
    lever, zero = (next(lever for lever in LEVERS if lever.name == name) for name in ("carrier", "zero"))
    plan = plan_for(2, "fsdp2")
    (there,) = lever.changes(plan, SPEC, GPUS)
    (back,) = lever.changes(there.plan, SPEC, GPUS)
    assert there.plan.shard.carrier == "flat" and back.plan == plan
    assert there.words == "ZeRO by FSDP2 -> flat buffers"
    assert {move.plan.shard.carrier for move in zero.changes(there.plan, SPEC, GPUS)} == {"ddp", "flat"}
    ddp = replace(plan, layout=layout_for(0, 8)[0], shard=layout_for(0, 8)[1])
    assert not list(lever.changes(ddp, SPEC, GPUS))


def test_the_documented_bytes_are_the_ledgers():
    page = (Path(__file__).parents[2] / "docs" / "zero.md").read_text()
    spec, found = load_spec("llama3-8b"), {}
    for stage in (1, 2, 3):
        layout, shard = layout_for(stage, 2)
        plan = plan_of(
            workload=Workload(sequence_length=8192, samples_per_step=2),
            layout=layout,
            shard=replace(shard, carrier="flat"),
            precision=weights_cast(1, "flat"),
            loss=Loss(kind="chunked"),
        )
        found[stage] = {row.name: row.bytes for row in price(plan, spec, assumed_cluster("h200-sxm", 2, 2)).rows}
    rows = re.findall(r"^\| ([^|]+?) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    assert len(rows) == 7
    for name, *told in rows:
        assert [int(value.replace(",", "")) for value in told] == [found[stage].get(name, 0) for stage in (1, 2, 3)], name
