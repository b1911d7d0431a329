import re

import pytest
from msgspec.structs import replace
from tests.plan.plan_values import cpus, gpus, llama, plan_of

from fullstride.cluster.cluster import Figure
from fullstride.errors import BadInput, DoesNotFit, RuleBroken
from fullstride.files import from_json, to_json
from fullstride.plan.baseline import baseline_plan
from fullstride.plan.defaults import AUTOCAST, FP32, default_workload
from fullstride.plan.explain import explain_plan, explain_ranking
from fullstride.plan.plan import Batch, Compile, Data, Loss, ModelRef, Recipe, Recompute, Shard, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import check
from fullstride.plan.search import Ranking, search
from fullstride.plan.space import micro_batches, space, summary, work_plan
from fullstride.report.document import Document, Table, Text

SPEC = llama()
LARGE = llama(hidden=2048, blocks=16, heads=16, kv_heads=8, ffn=8192, vocab=32_000, positions=8192)
MODEL, RECIPE = ModelRef(source="tiny"), Recipe()
WORK = Workload(sequence_length=64, samples_per_step=16)


def with_memory(cluster, size):
    group = cluster.groups[0]
    device = replace(group.device, memory_bytes=Figure(value=size, source="assumed"))
    return replace(cluster, groups=(replace(group, device=device),))


def find(spec=SPEC, cluster=None, workload=WORK, **options):
    return search(spec, cluster or gpus(), MODEL, workload, RECIPE, **options)


def test_the_search_is_exhaustive_and_its_best_is_the_minimum():
    ranking = find()
    base, ranks = work_plan(SPEC, gpus(), MODEL, WORK, RECIPE)
    everything = list(space(base, ranks, SPEC, gpus()))
    prices = [price(plan, SPEC, gpus()) for plan in everything]
    assert ranking.considered == len(everything) == len({plan.plan_hash for plan in everything})
    assert ranking.num_fitting == sum(estimate.fits for estimate in prices)
    assert ranking.estimates[0].step_seconds == min(e.step_seconds for e in prices if e.fits)
    assert [e.plan_hash for e in ranking.estimates] == [p.plan_hash for p in ranking.best]
    times = [e.step_seconds for e in ranking.estimates]
    assert times == sorted(times)
    assert {p.shard.stage for p in everything} == {0, 1, 2, 3}
    assert all(not check(plan, SPEC, gpus()) for plan in everything)


def test_a_ranking_can_be_written_and_is_the_same_each_time():
    ranking = find()
    assert from_json(to_json(ranking), Ranking, "memory") == ranking == find()


def test_runners_up_say_what_lost_them():
    ranking = find()
    first, *others = ranking.candidates
    assert first.lost_by == ""
    for other in others:
        assert re.search(r": .* against |does not fit: .* too much|same time, ", other.lost_by), other
    assert any(c.summary.startswith("ddp") for c in ranking.candidates)
    assert any(c.summary.startswith("zero 3") for c in ranking.candidates)


def test_plans_name_their_work_and_their_machine():
    best = find().best[0]
    assert best.workload == WORK
    assert best.model.digest == SPEC.digest
    assert best.made_for.cluster == gpus().digest


def test_fewer_ranks_than_devices():
    assert find(num_ranks=1).best[0].shard.carrier == "none"
    assert find(num_ranks=4).best[0].layout.world_size == 4


def test_several_nodes_bring_sharding_inside_a_node():
    cluster = gpus(num=4, nodes=2)
    base, ranks = work_plan(SPEC, cluster, MODEL, WORK, RECIPE)
    assert {(p.layout.dp_replicate, p.layout.dp_shard) for p in space(base, ranks, SPEC, cluster)} == {(8, 1), (1, 8), (2, 4)}


def test_cpu_hosts_compute_in_fp32_and_compile_only_with_a_compiler():
    for known, modes in ((True, {"off", "block"}), (False, {"off"}), (None, {"off"})):
        cluster = cpus(has_compiler=known)
        base, ranks = work_plan(SPEC, cluster, MODEL, WORK, RECIPE)
        plans = list(space(base, ranks, SPEC, cluster))
        assert {p.compile.mode for p in plans} == modes
        assert {p.precision.cast for p in plans} == {"none"}


def test_what_does_not_fit_says_by_how_much_and_what_would():
    work = Workload(sequence_length=8192, samples_per_step=1)
    cluster = with_memory(gpus(num=1), 9e9)
    with pytest.raises(DoesNotFit) as caught:
        search(LARGE, cluster, MODEL, work, RECIPE)
    assert re.search(r"needs [\d.]+ GiB a device of 8.38 GiB, [\d.]+ [GM]iB too much", caught.value.message)
    devices = int(re.search(r"(\d+) devices of this kind", caught.value.fix)[1])
    assert caught.value.exit_code == 4
    more = with_memory(gpus(num=devices), 9e9)
    assert search(LARGE, more, MODEL, replace(work, samples_per_step=devices), RECIPE).num_fitting > 0
    with pytest.raises(DoesNotFit):
        half = with_memory(gpus(num=devices // 2), 9e9)
        search(LARGE, half, MODEL, replace(work, samples_per_step=devices // 2), RECIPE)


def test_a_shorter_sequence_may_fit():
    spec, work = llama(hidden=256, blocks=8, ffn=1024, positions=8192), Workload(sequence_length=8192, samples_per_step=1)
    base, ranks = work_plan(spec, gpus(1), MODEL, replace(work, sequence_length=2048), RECIPE)
    need = min(price(plan, spec, gpus(1)).peak_device_bytes for plan in space(base, ranks, spec, gpus(1)))
    tight = with_memory(gpus(num=1), 1.001 * need)
    with pytest.raises(DoesNotFit, match="samples of 2048 tokens"):
        search(spec, tight, MODEL, work, RECIPE)
    assert search(spec, tight, MODEL, replace(work, sequence_length=2048), RECIPE).num_fitting > 0


def test_samples_that_cannot_be_shared_out_and_work_that_breaks_a_rule():
    for call in (search, baseline_plan):
        with pytest.raises(BadInput, match="15 over 8 ranks"):
            call(SPEC, gpus(), MODEL, replace(WORK, samples_per_step=15), RECIPE)
        with pytest.raises(RuleBroken, match="256 positions"):
            call(SPEC, gpus(), MODEL, replace(WORK, sequence_length=512), RECIPE)
        with pytest.raises(RuleBroken, match="16 ranks on 8 devices"):
            call(SPEC, gpus(), MODEL, WORK, RECIPE, num_ranks=16)


def test_micro_batches_are_powers_of_two_that_divide():
    assert micro_batches(12) == [1, 2, 4]
    assert micro_batches(1) == [1]
    assert micro_batches(7) == [1]


# The baseline


def test_the_baseline_is_what_one_writes_by_hand():
    plan = baseline_plan(SPEC, gpus(), MODEL, WORK, RECIPE)
    assert (plan.shard.carrier, plan.precision, plan.recompute) == ("ddp", AUTOCAST, Recompute())
    assert (plan.compile, plan.loss, plan.data, plan.threads.compute) == (Compile(), Loss(), Data(), 0)
    assert plan.batch == Batch(micro_batch=2, accumulation=1)
    assert check(plan, SPEC, gpus()) == ()
    one = baseline_plan(SPEC, gpus(), MODEL, WORK, RECIPE, num_ranks=1)
    assert (one.shard.carrier, one.batch.micro_batch) == ("none", 16)
    on_cpu = baseline_plan(SPEC, cpus(), MODEL, WORK, RECIPE)
    assert (on_cpu.shard.carrier, on_cpu.precision) == ("ddp", FP32)


def test_the_baseline_steps_down_as_memory_shrinks():
    work = Workload(sequence_length=4096, samples_per_step=32)
    seen = []
    for size in (200e9, 60e9, 30e9, 14e9, 8e9):
        cluster = with_memory(gpus(), size)
        plan = baseline_plan(LARGE, cluster, MODEL, work, RECIPE)
        assert price(plan, LARGE, cluster).fits
        seen.append((plan.shard.carrier, plan.recompute.mode, plan.batch.micro_batch))
        if plan.shard.carrier == "fsdp2":
            assert (plan.shard.stage, plan.precision.cast) == (3, "weights")
    order = [("ddp", "none"), ("fsdp2", "none"), ("fsdp2", "full")]
    ways = [order.index((carrier, mode)) for carrier, mode, _ in seen]
    assert ways == sorted(ways)
    assert set(ways) == {0, 1, 2}
    with pytest.raises(DoesNotFit, match="too much"):
        baseline_plan(LARGE, with_memory(gpus(), 3e9), MODEL, work, RECIPE)


def test_the_baseline_takes_the_largest_micro_batch_that_fits():
    work = Workload(sequence_length=4096, samples_per_step=64)
    cluster = with_memory(gpus(), 60e9)
    plan = baseline_plan(LARGE, cluster, MODEL, work, RECIPE)
    larger = replace(plan, batch=Batch(micro_batch=2 * plan.batch.micro_batch, accumulation=plan.batch.accumulation // 2))
    assert not price(larger, LARGE, cluster).fits


# Defaults


def test_defaults_of_the_workload():
    assert default_workload(SPEC, gpus()) == Workload(sequence_length=256, samples_per_step=8 * 32)
    assert default_workload(LARGE, gpus()) == Workload(sequence_length=8192, samples_per_step=8)
    assert default_workload(replace(LARGE, max_sequence=0), gpus(), num_ranks=2).sequence_length == 8192
    assert default_workload(LARGE, gpus(), sequence_length=3000).samples_per_step == 8 * 3
    assert default_workload(LARGE, gpus(), samples_per_step=24, data="here").samples_per_step == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_length": 9000}, "8192 positions"),
        ({"sequence_length": 1}, "at least 2 tokens"),
        ({"samples_per_step": 12}, "12 samples a step over 8 ranks"),
        ({"samples_per_step": 0}, "0 samples"),
        ({"num_ranks": 0}, "0 ranks"),
    ],
)
def test_impossible_defaults_are_refused(options, words):
    with pytest.raises(BadInput, match=words):
        default_workload(LARGE, gpus(), **options)


# Explanations


def texts(document):
    return [block.text for block in document.blocks if isinstance(block, Text)]


def tables(document):
    return {block.title: block for block in document.blocks if isinstance(block, Table)}


def test_an_assumed_cluster_is_said_first():
    assumed = replace(gpus(), assumed=True)
    document = explain_ranking(find(cluster=assumed), SPEC, assumed)
    assert texts(document)[0].startswith("Assumed cluster, nobody probed it")
    assert document.blocks[0].tone == "warn"
    assert not texts(explain_ranking(find(), SPEC, gpus()))[0].startswith("Assumed")
    assert from_json(to_json(document), Document, "memory") == document


def test_tables_hold_every_row_and_term_and_their_totals():
    ranking = find()
    plan, estimate = ranking.best[0], ranking.estimates[0]
    document = explain_plan(plan, estimate, SPEC, gpus(), ranking.candidates)
    found = tables(document)
    assert {row.cells[0] for row in found["Time of one step"].rows} == {t.name for t in estimate.terms} | {"step"}
    assert {row.cells[0] for row in found["Memory of the fullest rank"].rows} == {r.name for r in estimate.rows} | {"peak"}
    assert len(found["Memory through a step"].rows) == len(estimate.moments)
    assert sum(row.tone == "warn" for row in found["Memory through a step"].rows) == 1
    assert len(found["Plans by predicted step"].rows) == len(ranking.candidates)
    for table in found.values():
        assert all(len(row.cells) == len(table.columns) for row in table.rows)
    assert any("P elements a rank" in text for text in texts(document))


def test_a_plan_that_does_not_fit_and_one_with_an_inert_setting():
    cluster = with_memory(gpus(num=1), 1e9)
    plan = plan_of(loss=Loss(chunk_tokens=7))
    told = " ".join(texts(explain_plan(plan, price(plan, LARGE, cluster), LARGE, cluster)))
    assert re.search(r"Does not fit: [\d.]+ GiB too much", told)
    assert "what shrinks it" in told
    assert "loss.chunk_tokens = 7 has no effect" in told


def test_summary_tells_what_sets_a_plan_apart():
    plan = plan_of(shard=Shard(carrier="fsdp2", stage=3, reshard={"blocks": False}), recompute=Recompute(mode="full", every=2))
    told = "zero 3 keeping blocks, micro-batch 8 x 1, recompute full every 2, eager, fp32, model's loss"
    assert summary(plan) == told
