import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import cpus, gpus, llama, plan_of

from fullstride.cluster.cluster import CollectivePoint, Figure, MatmulPoint
from fullstride.cluster.rates import TRAFFIC
from fullstride.plan.cost.comm import volumes
from fullstride.plan.cost.host import STEP_SECONDS
from fullstride.plan.cost.pieces import pieces, thread_factor
from fullstride.plan.cost.table import terms
from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.facts import num_parameters
from fullstride.plan.plan import Batch, Compile, Data, Layout, Loss, Optimizer, Overlap, Recompute, Shard, Threads, Workload
from fullstride.plan.price import price

SPEC, GPUS = llama(), gpus()
LARGE = llama(hidden=2048, blocks=8, heads=16, kv_heads=8, ffn=8192, vocab=32_000, positions=8192)
P = num_parameters(SPEC)


def plan_for(stage=0, ranks=1, micro=2, accumulation=1, sequence=64, **parts):
    layout, shard = layout_for(stage, ranks)
    work = Workload(sequence_length=sequence, samples_per_step=micro * accumulation * ranks)
    batch = Batch(micro_batch=micro, accumulation=accumulation)
    base = {"workload": work, "layout": layout, "shard": shard, "batch": batch}
    precision = AUTOCAST if shard.carrier == "ddp" else weights_cast(accumulation, shard.carrier)
    return plan_of(**{**base, "precision": precision, **parts})


def by_name(plan, cluster=GPUS, spec=SPEC):
    return {term.name: term for term in terms(plan, spec, cluster)}


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 512), micro=st.integers(1, 8))
def test_volumes_in_closed_form(ranks, micro):
    """DDP and ZeRO-1 2P, ZeRO-2 (m + 1)P, ZeRO-3 3mP (arXiv 1910.02054, section 7, with m micro-batches)."""
    total = {stage: volumes(plan_for(stage, ranks, accumulation=micro), SPEC).total for stage in (0, 1, 2, 3)}
    assert total == {0: 2 * P, 1: 2 * P, 2: (micro + 1) * P, 3: 3 * micro * P}
    kept = plan_for(
        3, ranks, shard=Shard(carrier="fsdp2", stage=3, reshard={"embedding": False, "blocks": False, "head": False})
    )
    assert volumes(kept, SPEC).total == 2 * P
    assert volumes(plan_for(), SPEC).total == 0


def test_zero_2_does_not_double_the_volume():
    assert volumes(plan_for(2, 8), SPEC).total == volumes(plan_for(0, 8), SPEC).total


def test_hybrid_sharding_adds_an_all_reduce_of_the_shards():
    plan = plan_for(3, 8, layout=Layout(dp_replicate=2, dp_shard=4))
    assert volumes(plan, SPEC).all_reduced == 2 * P / 4


def test_ten_billion_parameters_on_sixteen_cards_move_75_gb():
    """Not 640: a ring moves 2 (n - 1) / n of the gradients over each link."""
    assert TRAFFIC["all_reduce"](16) * 4 * 10e9 == pytest.approx(75e9)


def test_products_are_forward_and_twice_that_in_backward():
    """At a rate that is equal for all shapes, time is 6 FLOP a weight and token."""
    points = tuple(MatmulPoint(dtype="bf16", m=m, n=512, k=512, seconds=2.0 * m * 512 * 512 / 1e14) for m in (64, 4096))
    cluster = replace(GPUS, matmuls=points)
    weights = num_parameters(LARGE) - 32_000 * 2048 - 17 * 2048
    plan = plan_for(micro=1, sequence=4096)
    term = by_name(plan, cluster, LARGE)["matrix products"]
    assert term.seconds == pytest.approx(6 * weights * 4096 / 1e14, rel=0.01)
    assert term.confidence == "modelled"
    assert by_name(plan, GPUS, LARGE)["matrix products"].confidence == "assumed"


def test_recompute_costs_what_it_repeats():
    none, some, full = (
        by_name(plan_for(micro=8, sequence=4096, recompute=Recompute(mode=m)), GPUS, LARGE)
        for m in ("none", "norm_activation", "full")
    )
    assert "recompute" not in none
    blocks = [(part, piece) for part, piece in pieces(plan_for(micro=8, sequence=4096), LARGE, GPUS) if part.group == "blocks"]
    assert full["recompute"].seconds == pytest.approx(sum(part.count * piece.forward for part, piece in blocks))
    assert some["recompute"].seconds == pytest.approx(sum(part.count * piece.bound_forward for part, piece in blocks))
    half = by_name(plan_for(micro=8, sequence=4096, recompute=Recompute(mode="full", every=2)), GPUS, LARGE)
    assert half["recompute"].seconds == pytest.approx(full["recompute"].seconds / 2)


def test_compilation_moves_fewer_bytes_and_launches_fewer_kernels():
    eager, compiled = (
        by_name(plan_for(micro=8, sequence=4096, compile=Compile(mode=m)), GPUS, LARGE) for m in ("off", "block")
    )
    assert compiled["memory-bound operators"].seconds < eager["memory-bound operators"].seconds
    assert compiled["host launches"].seconds < eager["host launches"].seconds
    assert compiled["matrix products"] == eager["matrix products"]


def test_a_step_is_not_faster_than_its_host():
    small = price(plan_for(micro=1), SPEC, GPUS)
    host = next(term for term in small.terms if term.name == "host launches")
    assert small.step_seconds >= host.seconds
    large = by_name(plan_for(micro=8, sequence=4096), GPUS, LARGE)["host launches"]
    assert STEP_SECONDS <= large.exposed_seconds < 1.1 * STEP_SECONDS < large.seconds  # far from balance nothing is lost


def test_optimizer_is_bytes_over_bandwidth_and_shared_by_ranks():
    def seconds(**parts):
        return by_name(plan_for(**parts))["optimizer"].seconds

    assert seconds(stage=3, ranks=8) == pytest.approx(seconds(stage=0, ranks=8) / 8)
    assert seconds(precision=FP32) == pytest.approx(P * 32 / (3.35e12 * 0.85))
    assert seconds(precision=FP32, optimizer=Optimizer(implementation="foreach")) > 2 * seconds(precision=FP32)


def test_ddp_reduces_beside_backward_but_for_the_last_bucket():
    plan = plan_for(0, 8, micro=8, sequence=4096)
    term = by_name(plan, GPUS, LARGE)["all-reduce of gradients"]
    assert 0 < term.exposed_seconds < 0.5 * term.seconds
    one = replace(plan, overlap=Overlap(bucket_bytes=2**40))
    alone = by_name(one, GPUS, LARGE)["all-reduce of gradients"]
    assert alone.exposed_seconds == pytest.approx(alone.seconds)  # a single bucket waits for all of backward


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_communication_hides_on_gpus_and_not_on_cpus(stage):
    plan = plan_for(stage, 2, micro=8, sequence=4096)
    for name in ("all-gather of weights", "reduce-scatter of gradients"):
        assert by_name(plan, GPUS, LARGE)[name].exposed_seconds < by_name(plan, GPUS, LARGE)[name].seconds
        on_cpu = by_name(replace(plan, precision=FP32), cpus(), LARGE)[name]
        assert on_cpu.exposed_seconds == pytest.approx(on_cpu.seconds)


def test_faster_links_never_make_a_step_slower():
    plan = plan_for(3, 8, micro=1, sequence=1024)
    times = []
    for rate in (10e9, 50e9, 450e9):
        link = replace(GPUS.groups[0].link, bandwidth=Figure(value=rate, source="measured"))
        cluster = replace(GPUS, groups=(replace(GPUS.groups[0], link=link),))
        times.append(price(plan, LARGE, cluster).step_seconds)
    assert times[0] > times[1] > times[2]


def test_measured_collectives_are_used():
    points = tuple(
        CollectivePoint(op=op, ranks=8, bytes=b, seconds=b / 1e9)
        for op in ("all_gather", "reduce_scatter")
        for b in (2**10, 2**30)
    )
    plan = plan_for(3, 8)
    found = by_name(plan, replace(GPUS, collectives=points))
    assert found["reduce-scatter of gradients"].seconds == pytest.approx(4 * P / 1e9, rel=1e-3)
    assert "measured" in found["all-gather of weights"].source


def test_chunked_loss_moves_fewer_bytes_when_compiled():
    model, chunked = (
        by_name(plan_for(micro=4, sequence=4096, compile=Compile(mode="block"), loss=Loss(kind=k)), GPUS, LARGE)
        for k in ("model", "chunked")
    )
    assert chunked["logits and loss"].seconds < model["logits and loss"].seconds


def test_workers_hide_preparation_where_a_core_is_free():
    def exposed(cluster, **parts):
        return by_name(plan_for(**{"precision": FP32, **parts}), cluster)["data"].exposed_seconds

    worker = Data(workers=1)
    assert exposed(cpus(num=1, cores=4), data=worker) == 0
    assert exposed(cpus(num=1, cores=4)) > 0
    assert exposed(cpus(num=1, cores=1), data=worker) == exposed(cpus(num=1, cores=1))


def test_threads_of_a_cpu_rank():
    ddp = plan_for(0, 2, precision=FP32)
    assert thread_factor(ddp, cpus(num=2, cores=2)) == 1.0
    assert thread_factor(ddp, cpus(num=2, cores=8)) == 4.0  # torchrun gives one thread of a share of four
    assert thread_factor(replace(ddp, threads=Threads(compute=4)), cpus(num=2, cores=8)) == 1.0
    assert thread_factor(ddp, GPUS) == 1.0


def test_step_is_the_sum_of_what_is_exposed_and_mfu_needs_a_peak():
    plan = plan_for(3, 8)
    estimate = price(plan, SPEC, GPUS)
    assert estimate.step_seconds == pytest.approx(sum(term.exposed_seconds for term in estimate.terms))
    assert estimate.tokens_per_second == pytest.approx(16 * 64 / estimate.step_seconds)
    assert 0 < estimate.mfu_causal < estimate.mfu_full < 1
    assert estimate.plan_hash == plan.plan_hash
    on_cpu = price(replace(plan_for(0, 2), precision=FP32), SPEC, cpus())
    assert on_cpu.mfu_full is None
    assert on_cpu.fits


@settings(max_examples=40, deadline=None)
@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    mode=st.sampled_from(["none", "norm_activation", "full"]),
    compiled=st.sampled_from(["off", "block"]),
    accumulation=st.integers(1, 4),
)
def test_terms_are_positive_and_exposed_in_bounds(stage, mode, compiled, accumulation):
    plan = plan_for(stage, 8, accumulation=accumulation, recompute=Recompute(mode=mode), compile=Compile(mode=compiled))
    for term in terms(plan, SPEC, GPUS):
        assert term.seconds > 0
        assert 0 <= term.exposed_seconds <= term.seconds * (1 + 1e-12)
        assert term.source
