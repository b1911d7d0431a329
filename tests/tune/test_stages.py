"""The levers of pipelines: schedules, blocks and micro-batches by stage, on a model with a head as heavy as several blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.measure.measurement import Interval, Measurement, MemoryUse, Share
from fullstride.plan.pipeline import plan_timeline
from fullstride.plan.plan import Batch, Layout, Pipeline, Precision, Shard, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import check
from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.placement import placement_of
from fullstride.plan.schedule.text import Schedule, write_schedule
from fullstride.tune.choose import Choice, Passed, Situation, weigh
from fullstride.tune.learned import Learned, calibrate, predict
from fullstride.tune.levers import LEVERS, with_micro_batch
from fullstride.tune.smaller import smaller
from fullstride.tune.stages import SCHEDULES, refused

SPEC = llama(hidden=1024, blocks=12, heads=16, kv_heads=8, ffn=2816, vocab=50_000, positions=8192)
EVEN = llama(hidden=1024, blocks=12, heads=16, kv_heads=8, ffn=2816, vocab=101, positions=8192)
"""A head of nothing: all stages alike."""
WEIGHTS = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16")


def piped(micro=1, many=8, dp=1, shard=None, pp=4, **pipeline):
    """A pipeline over `pp` ranks."""
    return plan_of(
        layout=Layout(pp=pp, dp_shard=dp),
        shard=shard or Shard(),
        pipeline=Pipeline(**{"schedule": "1f1b", **pipeline}),
        batch=Batch(micro_batch=micro, accumulation=many),
        workload=Workload(sequence_length=1024, samples_per_step=micro * many * dp),
        precision=WEIGHTS,
    )


def moves(name, plan, spec=SPEC):
    lever = next(lever for lever in LEVERS if lever.name == name)
    return list(lever.changes(plan, spec, gpus()))


def words(name, plan, spec=SPEC):
    return [move.words for move in moves(name, plan, spec)]


def situation(plan, spec=SPEC, **learned):
    return Situation(plan=plan, spec=spec, cluster=gpus(), learned=Learned(**learned))


def judged(plan, spec=SPEC, **learned):
    """Lever -> choice or reason, in the order in which they would be tried."""
    choices, passed = weigh(situation(plan, spec, **learned), LEVERS, price)
    return {found.lever: found for found in (*choices, *passed)}


def test_without_a_pipeline_there_is_nothing_to_pull():
    plan = plan_of()
    for name in ("schedule", "balance", "sizes"):
        assert moves(name, plan) == []
        assert "needs several pipeline stages" in judged(plan)[name].reason


def test_every_other_schedule_is_proposed_and_even_blocks_stay_even():
    assert words("schedule", piped(pp=2), EVEN) == [
        "schedule 1f1b -> zb-h1",
        "schedule 1f1b -> zb-v",
        "schedule 1f1b -> interleaved with 2 chunks",
        "schedule 1f1b -> bfs with 2 chunks",
        "schedule 1f1b -> gpipe",
    ]
    assert words("schedule", piped(pp=2, schedule="zb-v", chunks=2), EVEN)[0] == "schedule zb-v -> 1f1b"
    assert words("schedule", piped(pp=2, schedule="interleaved", chunks=3), EVEN)[3:5] == [
        "schedule interleaved with 3 chunks -> interleaved with 2 chunks",
        "schedule interleaved with 3 chunks -> bfs with 2 chunks",
    ]
    assert all(not move.plan.pipeline.layers_per_stage for move in moves("schedule", piped(pp=2), EVEN))


def test_blocks_that_do_not_come_out_even_are_laid_by_cost():
    found = {move.plan.pipeline.schedule: move for move in moves("schedule", piped())}
    assert found["zb-h1"].plan.pipeline.layers_per_stage == (), "as many stages as before: blocks stay where they are"
    layers = found["zb-v"].plan.pipeline.layers_per_stage
    assert (len(layers), sum(layers)) == (8, 12)
    assert layers[-1] == 1, "the head is heavy"
    assert found["zb-v"].words == f"schedule 1f1b -> zb-v, with {' '.join(map(str, layers))} blocks by stage"
    even = moves("schedule", piped(pp=2, many=6, layers_per_stage=(7, 5)), EVEN)[1]
    assert even.words == "schedule 1f1b -> zb-v, with equal stages"
    assert even.plan.pipeline.layers_per_stage == (), "by cost they come out even"
    own = moves("schedule", piped(pp=2, layers_per_stage=(7, 5)))
    assert own[0].plan.pipeline.layers_per_stage == (7, 5)
    by_cost = next(m.plan.pipeline for m in own if m.plan.pipeline.chunks == 2)
    assert len(by_cost.layers_per_stage) == 4, "who laid blocks unevenly does not want them even"


def test_long_runs_of_equal_stages_are_counted():
    plan = piped(pp=6, layers_per_stage=(7, 1, 1, 1, 1, 1))
    assert moves("balance", plan, EVEN)[0].words == "blocks by stage 7 1(x5) -> 2(x6)"


def test_schedules_that_fsdp2_cannot_serve_come_with_flat_buffers():
    plan = piped(dp=2, pp=2, shard=Shard(carrier="fsdp2", stage=1))
    found = {move.plan.pipeline.schedule: move for move in moves("schedule", plan)}
    assert found["gpipe"].plan.shard.carrier == "fsdp2"
    assert found["zb-h1"].plan.shard == Shard(carrier="flat", stage=1)
    assert found["zb-h1"].words == "schedule 1f1b -> zb-h1, ZeRO by flat buffers"
    assert all(
        move.plan.shard.carrier == "flat" for move in moves("schedule", replace(plan, shard=Shard(carrier="flat", stage=1)))
    )


def test_a_pipeline_is_never_proposed_ddp():
    plan = piped(dp=2, pp=2, shard=Shard(carrier="flat", stage=1))
    assert words("zero", plan) == ["ZeRO-1 -> ZeRO-2", "ZeRO-1 -> ZeRO-3"]


def test_what_the_rules_or_the_schedule_refuse_is_not_tried():
    plan = piped(many=3, pp=2)
    kinds = {move.plan.pipeline.schedule: refused(move.plan, SPEC, gpus()) for move in moves("schedule", plan)}
    assert "3 micro-batches in turns of 2" in kinds["interleaved"]
    assert kinds["zb-h1"] == kinds["bfs"] == ""
    large = piped(many=2, pp=2, schedule="zb-v", chunks=2, micro_batch_per_stage=(1, 1, 1, 2))
    (dealt,) = [move.plan for move in moves("schedule", large) if move.plan.pipeline.schedule == "interleaved"]
    assert check(dealt, SPEC, gpus()) == (), "the rules count micro-batches of the plan's size"
    why = "1 micro-batches, schedule interleaved on 2 ranks needs 2"
    assert why in refused(dealt, SPEC, gpus())
    others = {move.plan.plan_hash for move in moves("schedule", large)} - {dealt.plan_hash}
    left = judged(large, tried=frozenset(others))["schedule"]
    assert isinstance(left, Passed)
    assert left.reason.startswith(f"not allowed: {why}")


def test_more_stages_than_blocks_is_a_reason():
    narrow = llama(blocks=2, positions=8192)
    plan = piped(pp=2)
    assert {move.plan.pipeline.schedule for move in moves("schedule", plan, narrow) if refused(move.plan, narrow, gpus())} == {
        "zb-v", "interleaved", "bfs"
    }  # fmt: skip


def test_blocks_move_from_the_stage_with_the_heavy_head():
    (move,) = moves("balance", piped())
    layers = move.plan.pipeline.layers_per_stage
    assert layers[-1] < 3
    assert move.words == f"blocks by stage 3 3 3 3 -> {' '.join(map(str, layers))}"
    before, after = (price(plan, SPEC, gpus()).step_seconds for plan in (piped(), move.plan))
    assert after < 0.98 * before
    assert moves("balance", move.plan) == []
    assert moves("balance", piped(), EVEN) == []
    assert "do not lie by their cost" in judged(piped(), EVEN)["balance"].reason


def test_sizes_by_stage_are_the_simulators_and_go_back_to_one():
    plan = piped()
    (move,) = moves("sizes", plan)
    sizes = move.plan.pipeline.micro_batch_per_stage
    assert len(set(sizes)) > 1
    assert move.words == f"micro-batch by stage 1 1 1 1 -> {' '.join(map(str, sizes))}"
    seconds = [plan_timeline(each, SPEC, gpus(), record=False).step_seconds for each in (plan, move.plan)]
    assert seconds[1] < seconds[0]
    (back,) = moves("sizes", move.plan)
    assert (back.plan, back.words) == (plan, f"micro-batch by stage {' '.join(map(str, sizes))} -> 1 on all")


def test_another_micro_batch_is_for_all_stages():
    plan = piped(micro=2, many=4, micro_batch_per_stage=(2, 2, 1, 1))
    move = with_micro_batch(plan, 4)
    assert move.plan.pipeline.micro_batch_per_stage == ()
    assert move.words == "micro-batch 2 2 1 1 -> 4 on all stages, accumulation 4 -> 2"
    assert with_micro_batch(piped(), 2).words == "micro-batch 1 -> 2, accumulation 8 -> 4"
    assert smaller(piped(micro=2, many=4, micro_batch_per_stage=(4, 4, 4, 4)), SPEC, gpus()).plan.batch.micro_batch == 2


def test_a_schedule_from_a_file_gives_way_and_keeps_its_own_sizes(tmp_path):
    path = tmp_path / "mine.schedule"
    actions = generate("1f1b", 4, 1, 8, 1)
    write_schedule(Schedule(name="mine", placement=placement_of("1f1b", 4, 1), samples=8, actions=actions), path)
    plan = piped(schedule_file=str(path))
    assert refused(plan, SPEC, gpus()) == ""
    found = moves("schedule", plan)
    assert found[0].words == f"schedule {path} -> 1f1b"
    assert len(found) == len(SCHEDULES)
    assert all(move.plan.pipeline.schedule_file == "" for move in found)
    assert moves("sizes", plan) == []
    other = with_micro_batch(plan, 2).plan
    assert "has micro-batches of up to [1, 1, 1, 1] samples" in refused(other, SPEC, gpus())


def test_where_the_bubble_is_the_largest_loss_the_schedule_comes_first():
    found = judged(piped(many=4, pp=4), EVEN)
    first = next(iter(found.values()))
    assert isinstance(first, Choice)
    assert first.lever == "schedule"
    assert first.move.plan.pipeline.schedule == "zb-v"
    terms = {term.name: term.exposed_seconds for term in price(piped(many=4), EVEN, gpus()).terms}
    assert terms["pipeline bubble"] == max(terms.values())
    long = next(iter(judged(piped(many=512), EVEN).values()))
    assert long.lever != "schedule", "where it is small, something else does"


@pytest.mark.parametrize("computed", [0.8, 0.3], ids=["busy rank", "idle rank"])
def test_what_a_rank_computes_and_waits_is_learned_together(computed):
    """Which rank of a pipeline was profiled is chance: one that computes less waits longer."""
    plan = piped(many=4)
    estimate = price(plan, EVEN, gpus())
    kinds = ("compute", "attention", "memory_bound", "recompute", "loss", "comm", "bubble")
    predicted = sum(term.exposed_seconds for term in estimate.terms if term.kind in kinds)
    whole = 3 * predicted
    shares = (Share(name="forward", seconds=computed * whole), Share(name="exposed_comm", seconds=(1 - computed) * whole))
    factors = calibrate(estimate, measured_as(plan, shares))
    assert factors == {"compute": pytest.approx(3), "comm": pytest.approx(3)}
    told = predict(plan, EVEN, gpus(), Learned(factors=factors), price)
    assert told.seconds == pytest.approx(whole + estimate.step_seconds - predicted)


def test_without_a_bubble_computing_and_communication_are_learned_apart():
    plan = plan_of(layout=Layout(dp_shard=8), shard=Shard(carrier="fsdp2", stage=3), precision=WEIGHTS)
    estimate = price(plan, EVEN, gpus())
    comm = sum(term.exposed_seconds for term in estimate.terms if term.kind == "comm")
    shares = (Share(name="backward", seconds=comm), Share(name="exposed_comm", seconds=2 * comm))
    factors = calibrate(estimate, measured_as(plan, shares))
    assert factors["comm"] == pytest.approx(2)
    assert factors["compute"] != pytest.approx(2)


def measured_as(plan, shares):
    step = sum(share.seconds for share in shares)
    return Measurement(
        plan_hash=plan.plan_hash,
        work_hash=plan.work_hash,
        cluster="c",
        device="d",
        versions={},
        form="short",
        started="now",
        world_size=plan.layout.world_size,
        warmup_steps=0,
        rounds=(),
        step_seconds=Interval(value=step, low=step, high=step, confidence=0.99),
        samples_per_step=1,
        tokens_per_step=1,
        tokens_per_second=1.0,
        shares=shares,
        memory=MemoryUse(peak_allocated_bytes=0, peak_reserved_bytes=0, static_bytes=0),
    )


PLANS = st.builds(
    lambda schedule, cut, count, by_stage, zero: piped(
        micro=cut,
        many=count,
        pp=2,
        dp=2 if zero else 1,
        shard=zero,
        schedule=schedule[0],
        chunks=schedule[1],
        micro_batch_per_stage=(cut,) * (2 * schedule[1] - 1) + (2 * cut,) if by_stage else (),
    ),
    st.sampled_from(SCHEDULES),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
    st.sampled_from([None, Shard(carrier="flat", stage=1), Shard(carrier="fsdp2", stage=2), Shard(carrier="flat", stage=3)]),
)


@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_moves_keep_the_work_differ_and_are_legal_but_for_the_number_of_micro_batches(plan):
    if refused(plan, SPEC, gpus()):
        return
    for lever in LEVERS:
        for move in lever.changes(plan, SPEC, gpus()):
            assert move.plan.work_hash == plan.work_hash
            assert move.plan.plan_hash != plan.plan_hash
            assert move.plan.layout.pp == 2
            codes = {violation.code for violation in check(move.plan, SPEC, gpus())}
            known = {"pipeline.rounds"} | ({"pipeline.fsdp2"} if lever.name == "carrier" else set())
            assert all(code.startswith("precision.") or code in known for code in codes), (move.words, codes)
            if not codes and (why := refused(move.plan, SPEC, gpus())):
                assert "micro-batches" in why or "samples" in why, (move.words, why)
