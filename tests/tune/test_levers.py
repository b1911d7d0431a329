import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tune.fakes import AUTOCAST, fake_cluster, fake_plan, fake_spec

from fullstride.plan.plan import Batch, Compile, Data, Layout, Overlap, Precision, Shard, Workload
from fullstride.plan.rules import check
from fullstride.tune.levers import LEVERS, micro_batches, replaced, with_micro_batch
from fullstride.tune.smaller import smaller

ZERO3 = {"layout": Layout(dp_shard=2), "shard": Shard(carrier="fsdp2", stage=3)}
NARROW = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", gradient="bf16", reduction="bf16")


def moves(name, plan, cluster=None):
    lever = next(lever for lever in LEVERS if lever.name == name)
    return list(lever.changes(plan, fake_spec(), cluster or fake_cluster()))


def words(name, plan, cluster=None):
    return [move.words for move in moves(name, plan, cluster)]


def test_micro_batch_keeps_the_work():
    assert micro_batches(fake_plan()) == [1, 2, 4]
    assert words("micro-batch", fake_plan()) == [
        "micro-batch 1 -> 2, accumulation 4 -> 2",
        "micro-batch 1 -> 4, accumulation 4 -> 1",
    ]


def test_zero_moves_the_ranks_between_the_axes():
    (first, *_rest) = moves("zero", fake_plan())
    assert first.words == "DDP -> ZeRO-1"
    assert first.plan.layout == Layout(dp_shard=2)
    back = moves("zero", fake_plan(precision=NARROW, **ZERO3))[0]
    assert back.plan.shard.carrier == "ddp"
    assert back.plan.precision.cast == "autocast", "DDP takes no cast copy"
    assert moves("zero", fake_plan(layout=Layout(), shard=Shard(), batch=Batch(micro_batch=8))) == []


def test_levers_that_hang_on_zero_3():
    assert words("prefetch", fake_plan()) == words("reshard", fake_plan()) == []
    plan = fake_plan(**ZERO3, overlap=Overlap(prefetch=2))
    assert words("prefetch", plan) == ["weights gathered 2 -> 3 blocks ahead"]
    assert words("reshard", plan)[0] == "keep the gathered blocks weights after forward"
    assert moves("zero", plan)[0].plan.overlap == Overlap(), "prefetch goes with ZeRO-3"
    assert words("buckets", plan) == []


def test_tensor_parallelism_keeps_its_ranks_and_may_overlap():
    assert words("tensor overlap", fake_plan()) == []
    plan = fake_plan(layout=Layout(dp_replicate=2, tp=2))
    (move,) = moves("tensor overlap", plan)
    assert (move.plan.overlap, move.words) == (Overlap(tensor=True), "exchange of tensor parallelism beside products")
    assert [m.plan.overlap for m in moves("tensor overlap", move.plan)] == [Overlap()]
    assert {m.plan.layout.world_size for m in moves("zero", plan)} == {4}


def test_data_workers_pin_only_for_gpus():
    assert words("data workers", fake_plan())[0] == "data workers 0 -> 1, pinned memory"
    assert not moves("data workers", fake_plan(), fake_cluster(kind="cpu"))[0].plan.data.pin
    assert moves("data workers", fake_plan(data=Data(workers=2, pin=True))) == []


def test_threads_share_the_cores():
    assert words("cpu threads", fake_plan()) == ["CPU threads of a rank 1 -> 2", "CPU threads of a rank 1 -> 4"]


def test_narrow_gradients_go_when_micro_batches_add_up():
    plan = fake_plan(precision=NARROW, batch=Batch(micro_batch=4, accumulation=1), **ZERO3)
    assert with_micro_batch(plan, 2).plan.precision.gradient == "fp32"


def test_each_lever_can_be_pulled_both_ways_where_there_are_two():
    assert words("compile", fake_plan(compile=Compile(mode="block"))) == ["compile each block -> off"]
    assert "full" in words("recompute", fake_plan())[-1]
    assert words("chunked loss", fake_plan()) == ["head and loss by chunks of tokens"]


PLANS = st.builds(
    lambda zero, cast, size: replaced(fake_plan(**zero), precision=cast, batch=Batch(micro_batch=size, accumulation=4 // size)),
    st.sampled_from([{}, ZERO3, {**ZERO3, "shard": Shard(carrier="fsdp2", stage=1)}]),
    st.sampled_from([Precision(), AUTOCAST, NARROW]),
    st.sampled_from([1, 2, 4]),
)


@given(PLANS, st.sampled_from(LEVERS))
def test_no_move_changes_the_work_or_proposes_what_stands(plan, lever):
    for move in lever.changes(plan, fake_spec(), fake_cluster()):
        assert move.plan.work_hash == plan.work_hash
        assert move.plan.plan_hash != plan.plan_hash
        assert move.words


@given(PLANS)
def test_what_is_not_allowed_is_only_ever_the_precision(plan):
    """Dependent parts are brought along, so that a lever is not refused for what it could have set itself."""
    if check(plan, fake_spec(), fake_cluster()):
        return
    for lever in LEVERS:
        for move in lever.changes(plan, fake_spec(), fake_cluster()):
            broken = check(move.plan, fake_spec(), fake_cluster())
            assert all(violation.code.startswith("precision.") for violation in broken), (lever.name, move.words, broken)


def test_smaller_plans_after_running_out_of_memory():
    plan = fake_plan(batch=Batch(micro_batch=4, accumulation=1))
    steps = []
    while (move := smaller(plan, fake_spec(), fake_cluster())) is not None:
        steps.append(move.words)
        plan = move.plan
    assert steps == [
        "micro-batch 4 -> 2, accumulation 1 -> 2",
        "micro-batch 2 -> 1, accumulation 2 -> 4",
        "recompute none -> full",
        "DDP -> ZeRO-3",
    ]


@pytest.mark.parametrize("samples", [6, 12, 18])
def test_micro_batches_of_odd_sizes_divide_the_samples(samples):
    plan = fake_plan(workload=Workload(sequence_length=64, samples_per_step=samples), batch=Batch(accumulation=samples // 2))
    for size in micro_batches(plan):
        assert check(with_micro_batch(plan, size).plan, fake_spec(), fake_cluster()) == ()
