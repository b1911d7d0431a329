"""The price of a pipeline with its waiting simulated: the closed form where that holds, the simulator where it does not."""

import pytest
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.plan.pipeline import num_passes, plan_timeline
from fullstride.plan.plan import Batch, Layout, Pipeline, Precision, Workload
from fullstride.plan.price import price
from fullstride.plan.refine import MOST_PASSES
from fullstride.plan.simulated import simulated_price

SPEC = llama(hidden=1024, blocks=8, heads=16, kv_heads=8, ffn=2816, vocab=101, positions=8192)


def piped(many=8, pp=2, micro=1, **pipeline):
    return plan_of(
        layout=Layout(pp=pp),
        pipeline=Pipeline(**{"schedule": "1f1b", **pipeline}),
        batch=Batch(micro_batch=micro, accumulation=many),
        workload=Workload(sequence_length=2048, samples_per_step=micro * many),
        precision=Precision(cast="weights", embedding="bf16", block="bf16", head="bf16"),
    )


def exposed(estimate, name):
    return sum(term.exposed_seconds for term in estimate.terms if term.name == name)


def both(plan):
    return price(plan, SPEC, gpus()), simulated_price(plan, SPEC, gpus())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_it_is_the_closed_form_where_that_holds(schedule):
    closed, simulated = both(piped(schedule=schedule))
    assert simulated.step_seconds == pytest.approx(closed.step_seconds, rel=0.01)
    assert exposed(simulated, "pipeline bubble") == pytest.approx(exposed(closed, "pipeline bubble"), rel=0.15)


def test_few_micro_batches_leave_zb_v_idle():
    """Its closed form wants 2p - 1 of them."""
    closed, simulated = both(piped(many=2, schedule="zb-v", chunks=2))
    assert exposed(simulated, "pipeline bubble") > 1.5 * exposed(closed, "pipeline bubble")
    names = [term.name for term in simulated.terms]
    assert len(names) == len(set(names))
    assert next(term.source for term in simulated.terms if term.name == "pipeline bubble") == "simulated, zb-v"


def test_with_few_micro_batches_the_first_stage_may_hold_more():
    """1F1B over two stages with two micro-batches: 3 blocks' backward behind 5 is a shorter way than 4 behind 4."""
    even, uneven = (piped(many=2, layers_per_stage=layers) for layers in ((4, 4), (5, 3)))
    assert price(uneven, SPEC, gpus()).step_seconds > price(even, SPEC, gpus()).step_seconds
    assert simulated_price(uneven, SPEC, gpus()).step_seconds < simulated_price(even, SPEC, gpus()).step_seconds


@pytest.mark.parametrize(
    "plan", [piped(), piped(many=2, schedule="zb-v", chunks=2), piped(pp=4, layers_per_stage=(1, 1, 1, 5))]
)
def test_terms_sum_to_the_step_and_waiting_to_what_is_simulated(plan):
    closed, simulated = both(plan)
    assert sum(term.exposed_seconds for term in simulated.terms) == pytest.approx(simulated.step_seconds)
    timeline = plan_timeline(plan, SPEC, gpus(), record=False)
    idle = timeline.span_seconds - max(rank.busy_seconds for rank in timeline.ranks)
    waited = exposed(simulated, "pipeline bubble") + exposed(simulated, "messages between stages")
    assert waited == pytest.approx(idle)
    ratio = closed.step_seconds / simulated.step_seconds
    assert simulated.tokens_per_second == pytest.approx(closed.tokens_per_second * ratio)
    assert simulated.mfu_full == pytest.approx(closed.mfu_full * ratio)
    assert simulated.rows == closed.rows
    assert simulated.plan_hash == plan.plan_hash


def test_a_busiest_rank_that_never_waits_has_a_bubble_of_nothing():
    closed, simulated = both(piped(layers_per_stage=(7, 1)))
    (bubble,) = (term for term in simulated.terms if term.kind == "bubble")
    assert bubble.seconds == bubble.exposed_seconds == 0.0
    assert exposed(closed, "pipeline bubble") > 0, "the closed form fills and drains all the same"


def test_what_cannot_be_simulated_has_the_closed_form():
    long = piped(many=MOST_PASSES)
    assert num_passes(long) > MOST_PASSES
    few = piped(many=2, schedule="interleaved", chunks=2, micro_batch_per_stage=(1, 1, 1, 2))
    for plan in (plan_of(), long, few, piped(schedule_file="nowhere.schedule")):
        closed, simulated = both(plan)
        assert simulated == closed
