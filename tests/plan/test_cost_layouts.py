"""Terms of layouts beyond data parallelism: closed forms, and what must rise or fall."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import llama, plan_of

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.cluster.cluster import Coefficients
from fullstride.plan.cost.exchanges import bytes_a_step
from fullstride.plan.cost.inside import ranks_inside
from fullstride.plan.cost.lanes import counts, host_seconds, ranks
from fullstride.plan.cost.pieces import pieces
from fullstride.plan.cost.stage_times import stage_seconds
from fullstride.plan.cost.table import terms
from fullstride.plan.defaults import weights_cast
from fullstride.plan.facts import num_parameters
from fullstride.plan.plan import (
    Adapter,
    Batch,
    Compile,
    Kernels,
    Layout,
    Optimizer,
    Overlap,
    Pipeline,
    Recompute,
    Shard,
    Workload,
)
from fullstride.plan.schedule.bubble import bubble_share
from fullstride.plan.validation.networks import Network, spec_of

SPEC = llama(hidden=4096, blocks=32, heads=32, kv_heads=8, ffn=14336, vocab=128_256, positions=8192)
GPUS = assumed_cluster("h100-sxm", 64)
MIXTURE = spec_of(
    Network(16, 2048, 4096, 16, 16, 32_000, 0, gated=True, bias=False, rms=True, experts=64, per_token=8, expert_ffn=1024),
    "mixture",
)


def plan_for(accumulation=8, carrier="megatron", stage=1, micro=1, sequence=8192, **parts):
    layout = parts.pop("layout", Layout(dp_shard=64))
    work = Workload(sequence_length=sequence, samples_per_step=micro * accumulation * layout.data_parallel)
    base = {
        "workload": work,
        "layout": layout,
        "shard": Shard(carrier=carrier, stage=stage),
        "batch": Batch(micro_batch=micro, accumulation=accumulation),
        "precision": weights_cast(accumulation, "fsdp2"),
    }
    if layout.pp > 1:
        base["pipeline"] = Pipeline(schedule="1f1b")
    return plan_of(**{**base, **parts})


def by_name(plan, spec=SPEC, cluster=GPUS):
    return {term.name: term for term in terms(plan, spec, cluster)}


def step(plan, spec=SPEC, cluster=GPUS):
    return sum(term.exposed_seconds for term in terms(plan, spec, cluster))


@settings(max_examples=20, deadline=None)
@given(stages=st.sampled_from([2, 4, 8]), micro=st.integers(2, 64))
def test_the_bubble_in_closed_form(stages, micro):
    """What the other stages take for 1F1B, over the chunks where they interleave, a third for ZB-H1."""
    layout = Layout(pp=stages, dp_shard=64 // stages)
    plan = plan_for(micro, layout=layout)
    seconds = ranks(plan, SPEC, GPUS).seconds
    plain = by_name(plan)["pipeline bubble"].seconds
    assert plain == pytest.approx(sum(seconds) - max(seconds))
    halves = by_name(replace(plan, pipeline=Pipeline(schedule="interleaved", chunks=2)))["pipeline bubble"].seconds
    assert halves == pytest.approx(plain / 2, rel=0.05)
    assert by_name(replace(plan, pipeline=Pipeline(schedule="zb-h1")))["pipeline bubble"].seconds == pytest.approx(plain / 3)
    same = by_name(replace(plan, pipeline=Pipeline(schedule="gpipe")))["pipeline bubble"].seconds
    assert same == pytest.approx(plain)  # 1F1B bounds memory, not the bubble


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("bfs", 4)])
def test_the_bubble_is_the_schedules_own(schedule, chunks):
    """Over stages that are alike, the term is what the schedules' closed forms say; a slower one is the work itself."""
    plan = plan_for(16, layout=Layout(pp=4, dp_shard=16), pipeline=Pipeline(schedule=schedule, chunks=chunks))
    lost = by_name(plan)["pipeline bubble"].seconds
    seconds = ranks(plan, SPEC, GPUS).seconds
    alike = lost * 3 * max(seconds) / (sum(seconds) - max(seconds))
    work = 16 * max(seconds)
    assert alike / (work + alike) == pytest.approx(bubble_share(schedule, 4, chunks, 16))


def test_more_nodes_wait_longer_for_the_slowest():
    plan, slow = plan_for(), replace(GPUS, coefficients=Coefficients(straggle=0.02))
    assert "the slowest node" not in by_name(plan)
    rest = sum(term.exposed_seconds for name, term in by_name(plan, cluster=slow).items() if name != "the slowest node")
    assert by_name(plan, cluster=slow)["the slowest node"].seconds == pytest.approx(0.02 * 3 * rest)  # eight nodes


def test_every_block_stands_on_one_stage_and_the_busiest_paces():
    plan = plan_for(layout=Layout(pp=4, dp_shard=16), pipeline=Pipeline(schedule="interleaved", chunks=4))
    held = counts(plan, SPEC)
    assert [sum(row) for row in zip(*held, strict=True)] == [1, 32, 1]
    assert held[0][0] == 1 and held[-1][-1] == 1
    assert max(ranks(plan, SPEC, GPUS).seconds) == ranks(plan, SPEC, GPUS).seconds[-1]  # the head is heavy
    uneven = replace(plan, pipeline=Pipeline(schedule="1f1b", layers_per_stage=(9, 8, 8, 7)))
    assert [row[1] for row in counts(uneven, SPEC)] == [9, 8, 8, 7]


def test_stages_add_up_to_the_whole():
    whole = plan_for(layout=Layout(dp_shard=64))
    cut = plan_for(layout=Layout(pp=4, dp_shard=16))
    (one,) = stage_seconds(whole, SPEC, GPUS)
    four = stage_seconds(cut, SPEC, GPUS)
    for name in ("forward", "input_grad", "weight_grad"):
        assert sum(getattr(stage, name) for stage in four) == pytest.approx(getattr(one, name))
    assert one.bytes_sent == 0 and four[0].bytes_sent == 8192 * 4096 * 2 and four[-1].bytes_sent == 0
    assert one.recompute == 0
    (full,) = stage_seconds(replace(whole, recompute=Recompute(mode="full")), SPEC, GPUS)
    assert 0.9 * one.forward < full.recompute < one.forward


def test_tensor_parallel_communication_does_not_shrink_with_its_degree():
    """About four all-reduces of the activations a block and micro-batch, whatever the number of ranks."""
    seconds = {}
    for tp in (2, 4, 8):
        plan = plan_for(layout=Layout(tp=tp, dp_shard=64 // tp, sequence_parallel=False), accumulation=8)
        seconds[tp] = by_name(plan)["sums over tensor ranks"].seconds
    assert seconds[2] < seconds[8] < 2 * seconds[2]
    size = 8192 * 4096 * 2
    ideal = 8 * 32 * 4 * (2 * 7 / 8 * size) / (450e9 * 0.8)
    assert 0.6 * ideal < seconds[8] < 1.4 * ideal


def test_sequence_parallelism_moves_as_much_and_cuts_memory_traffic():
    plan = plan_for(layout=Layout(tp=4, dp_shard=16))
    whole = replace(plan, layout=replace(plan.layout, sequence_parallel=False))
    split, plain = by_name(plan), by_name(whole)
    assert split["sums over tensor ranks"].seconds == pytest.approx(plain["sums over tensor ranks"].seconds, rel=0.5)
    assert split["memory-bound operators"].seconds < plain["memory-bound operators"].seconds


def test_tensor_parallelism_across_nodes_is_slow():
    inside = plan_for(layout=Layout(tp=8, dp_shard=8))
    across = plan_for(layout=Layout(tp=16, dp_shard=4))
    slow, quick = (by_name(p)["sums over tensor ranks"].seconds for p in (across, inside))
    assert slow > 1.1 * quick
    poor = assumed_cluster("a100-sxm-80", 64, 2)
    assert by_name(inside, cluster=poor)["sums over tensor ranks"].seconds > 2 * quick


def test_overlap_hides_a_part():
    plan = plan_for(layout=Layout(tp=8, dp_shard=8))
    hidden = replace(plan, overlap=Overlap(tensor=True))
    one, other = by_name(plan)["sums over tensor ranks"], by_name(hidden)["sums over tensor ranks"]
    assert one.seconds == other.seconds and other.exposed_seconds < one.exposed_seconds
    late = replace(plan, overlap=Overlap(gradients=False))
    assert step(late) > step(plan)


def test_what_selective_recomputation_gathers_again_it_does_not_gather_in_backward():
    plan = plan_for(layout=Layout(tp=8, dp_shard=8), carrier="fsdp2")
    none, selective, full = (replace(plan, recompute=Recompute(mode=mode)) for mode in ("none", "norm_activation", "full"))
    moved = [bytes_a_step(each, SPEC) for each in (none, selective, full)]
    assert moved[0] == moved[1], "its sums are kept, its inputs gathered once more either way"
    assert moved[2]["all_gather"] == moved[0]["all_gather"] and moved[2]["reduce_scatter"] > moved[0]["reduce_scatter"]
    assert 0 < by_name(selective)["recompute"].seconds < by_name(full)["recompute"].seconds


def test_ranks_of_an_axis_on_a_node():
    plan = plan_for(layout=Layout(tp=4, cp=2, dp_shard=2, pp=4))
    assert [ranks_inside(plan, GPUS, axis) for axis in ("tp", "cp", "dp_shard", "pp")] == [4, 2, 1, 1]


def test_context_ranks_share_the_tokens_and_pass_keys_and_values():
    long = {"sequence": 65536, "accumulation": 4}
    one = plan_for(layout=Layout(dp_shard=64), **long)
    cut = plan_for(layout=Layout(cp=8, dp_shard=8), **long)
    whole, part = by_name(one), by_name(cut)
    assert part["attention"].seconds == pytest.approx(whole["attention"].seconds / 8, rel=0.05)
    assert part["ring of keys and values"].seconds > 0 and "ring of keys and values" not in whole


def test_experts_are_reached_through_an_exchange_that_grows_across_nodes():
    inside = plan_for(layout=Layout(dp_shard=64, ep=8), sequence=4096)
    across = plan_for(layout=Layout(dp_shard=64, ep=64), sequence=4096)
    near, far = (by_name(p, MIXTURE)["exchange between experts"] for p in (inside, across))
    assert far.seconds > 1.5 * near.seconds
    assert by_name(across, MIXTURE)["optimizer"].seconds > 0
    beside = replace(inside, overlap=Overlap(experts=True))
    assert by_name(beside, MIXTURE)["exchange between experts"].exposed_seconds < near.exposed_seconds
    plain = plan_for(layout=Layout(dp_shard=64, ep=64), sequence=4096, carrier="fsdp2", stage=3)
    assert by_name(plain, MIXTURE)["exchange between experts"].seconds > far.seconds  # once a node, or once an expert


def test_a_distributed_optimizer_reduces_once_a_step_and_deepspeed_zero_2_each_time():
    sharded = by_name(plan_for(overlap=Overlap(gradients=False)))["reduction of gradients"].seconds
    plan = plan_for(carrier="deepspeed", stage=2)
    often = by_name(plan)["reduction of gradients"].seconds
    assert often > 3 * sharded
    whole = plan_for(stage=0, layout=Layout(dp_replicate=64))
    assert by_name(whole)["optimizer"].seconds > 20 * by_name(plan_for())["optimizer"].seconds


def test_fp8_is_quicker_and_pays_for_quantising():
    plan = plan_for()
    narrow = replace(plan, precision=replace(plan.precision, fp8="tensorwise"))
    wide, fp8 = by_name(plan), by_name(narrow)
    assert fp8["matrix products"].seconds < 0.7 * wide["matrix products"].seconds
    assert fp8["memory-bound operators"].seconds > wide["memory-bound operators"].seconds
    old = assumed_cluster("a100-sxm-80", 64)
    assert by_name(narrow, cluster=old)["matrix products"].seconds == by_name(plan, cluster=old)["matrix products"].seconds


def test_scores_that_stand_whole_cost_more_than_flash():
    times = [
        by_name(replace(plan_for(), kernels=Kernels(attention=kind)))["attention"].seconds
        for kind in ("sdpa", "fused_softmax", "unfused")
    ]
    assert times[0] < 0.5 * times[1] < times[1] < times[2]


def test_adapters_have_no_gradients_of_weights_and_little_to_reduce():
    plan = plan_for()
    adapted = by_name(replace(plan, adapter=Adapter(rank=8)))
    whole = by_name(plan)
    assert adapted["matrix products"].seconds == pytest.approx(2 / 3 * whole["matrix products"].seconds, rel=0.1)
    assert adapted["reduction of gradients"].seconds < 0.05 * whole["reduction of gradients"].seconds
    assert adapted["optimizer"].seconds < 0.05 * whole["optimizer"].seconds


def test_offload_costs_travel_and_the_hosts_own_adam():
    plan = plan_for(accumulation=1)
    away = replace(plan, optimizer=Optimizer(cpu_share=1.0))
    count = num_parameters(SPEC) / 64
    term = by_name(away)["offload"]
    assert term.seconds >= count * 28 / 20e9
    disk = replace(plan, optimizer=Optimizer(nvme_share=1.0))
    assert by_name(disk)["offload"].seconds > term.seconds
    assert "offload" not in by_name(plan)
    kept = replace(plan, recompute=Recompute(mode="full", offload="cpu"))
    assert by_name(kept)["offload"].seconds > 0


def test_small_models_are_paced_by_the_host_and_graphs_lift_that():
    small = llama(hidden=256, blocks=24, heads=4, kv_heads=4, ffn=512, vocab=512, positions=512)
    plan = plan_for(layout=Layout(dp_replicate=8), stage=0, sequence=512)
    eight = assumed_cluster("h100-sxm", 8)
    held = ranks(plan, small, eight).busiest
    assert step(plan, small, eight) > 8 * host_seconds(plan, eight, held)
    recorded = replace(plan, compile=Compile(graphs=True))
    assert step(recorded, small, eight) < 0.8 * step(plan, small, eight)
    drifting = replace(eight, coefficients=Coefficients(drift=0.2))
    split = plan_for(layout=Layout(tp=8), stage=0, sequence=512)
    assert step(split, small, drifting) > step(split, small, eight)


def test_recompute_modes_in_order():
    plan = plan_for(carrier="fsdp2", stage=3)
    modes = (
        Recompute(),
        Recompute(mode="norm_activation"),
        Recompute(mode="norm_activation", products=0.5),
        Recompute(mode="full"),
    )
    times = [step(replace(plan, recompute=mode)) for mode in modes]
    assert times == sorted(times) and len(set(times)) == 4
    some = replace(plan, recompute=Recompute(mode="full", blocks=8))
    quarter = by_name(some)["recompute"].seconds
    assert quarter == pytest.approx(by_name(replace(plan, recompute=modes[-1]))["recompute"].seconds / 4)


def test_pieces_are_remembered():
    plan = plan_for(layout=Layout(tp=2, dp_shard=32))
    assert pieces(plan, SPEC, GPUS) is pieces(replace(plan, optimizer=Optimizer(implementation="foreach")), SPEC, GPUS)
