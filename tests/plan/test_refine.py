"""Stages of a pipeline that the simulator chose: kept where they are better by simulation and by the terms, and fit."""

import pytest
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.plan.cost.lanes import ranks
from fullstride.plan.cost.table import terms
from fullstride.plan.pipeline import plan_timeline
from fullstride.plan.plan import Batch, Layout, Pipeline, Workload
from fullstride.plan.price import price
from fullstride.plan.refine import refined
from fullstride.plan.space import summary

HEAVY = llama(hidden=1024, blocks=12, heads=16, kv_heads=8, ffn=2816, vocab=200_000, positions=8192)
"""A head that takes as long as several blocks."""


def piped(micro=1, many=8, **pipeline):
    return plan_of(
        layout=Layout(pp=4),
        pipeline=Pipeline(schedule="1f1b", **pipeline),
        batch=Batch(micro_batch=micro, accumulation=many),
        workload=Workload(sequence_length=2048, samples_per_step=micro * many),
    )


def test_blocks_leave_the_stage_with_the_heavy_head():
    plan = piped()
    before = price(plan, HEAVY, gpus())
    ((after, told),) = refined([(plan, before)], HEAVY, gpus(), {"batch.micro_batch": 1})
    layers = after.pipeline.layers_per_stage
    assert sum(layers) == 12 and layers[-1] < 3 <= max(layers)
    assert told.fits and told.step_seconds < 0.9 * before.step_seconds
    assert told.step_seconds == price(after, HEAVY, gpus()).step_seconds
    seconds = [plan_timeline(each, HEAVY, gpus(), record=False).step_seconds for each in (plan, after)]
    assert seconds[1] < seconds[0]
    assert "blocks " in summary(after) and "blocks " not in summary(plan)


def test_what_a_user_fixed_and_what_no_move_betters_stays():
    plan = piped()
    item = (plan, price(plan, HEAVY, gpus()))
    fixed = {"pipeline.layers_per_stage": (3, 3, 3, 3), "batch.micro_batch": 1}
    assert refined([item], HEAVY, gpus(), fixed) == [item]
    flat = plan_of(layout=Layout(dp_shard=4))
    alone = (flat, price(flat, HEAVY, gpus()))
    assert refined([alone], HEAVY, gpus(), {}) == [alone]


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (2, 2, 2, 1), (4, 4, 2, 2)])
def test_terms_follow_the_sizes_of_stages(sizes):
    """The sum of the terms is near the simulated step, whatever the sizes."""
    plan = piped(micro=2, many=8, micro_batch_per_stage=sizes)
    said = sum(term.exposed_seconds for term in terms(plan, HEAVY, gpus()))
    simulated = plan_timeline(plan, HEAVY, gpus(), record=False).step_seconds
    assert said == pytest.approx(simulated, rel=0.12)


def test_equal_sizes_cost_what_one_size_does():
    plan = piped(micro=2, many=8)
    same = replace(plan, pipeline=replace(plan.pipeline, micro_batch_per_stage=(2, 2, 2, 2)))
    assert ranks(same, HEAVY, gpus()).seconds == pytest.approx(ranks(plan, HEAVY, gpus()).seconds)
    one, other = (sum(term.seconds for term in terms(each, HEAVY, gpus())) for each in (plan, same))
    assert one == pytest.approx(other)
