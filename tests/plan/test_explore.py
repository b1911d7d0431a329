import pytest
from msgspec.structs import replace
from tests.plan.plan_values import experts, gpus, llama

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.cluster.cluster import Figure
from fullstride.errors import BadInput, DoesNotFit, RuleBroken
from fullstride.files import from_json, to_json
from fullstride.model.presets import PRESETS
from fullstride.model.source import load_spec
from fullstride.plan import axes, explore, limits
from fullstride.plan.axes import all_degrees, build, layers_for, options_for
from fullstride.plan.defaults import default_workload
from fullstride.plan.plan import ModelRef, Recipe, Workload
from fullstride.plan.price import price, score
from fullstride.plan.rules import check
from fullstride.plan.search import Ranking, search
from fullstride.plan.space import work_plan

MODEL, RECIPE = ModelRef(source="x"), Recipe()
SPEC = llama(hidden=512, blocks=6, heads=8, kv_heads=4, ffn=2048, vocab=4000, positions=16384)
WORK = Workload(sequence_length=1024, samples_per_step=16)


def wide(spec=SPEC, cluster=None, work=WORK, **options):
    return search(spec, cluster or gpus(4), MODEL, work, RECIPE, to_run=False, **options)


def everything(spec, cluster, work, wishes=None):
    """All plans of the wide space, by brute force."""
    wishes = wishes or {}
    base, ranks = work_plan(spec, cluster, MODEL, work, RECIPE)
    for degrees in all_degrees(base, ranks, spec, cluster, wishes):
        options = options_for(base, degrees, spec, cluster, wishes)
        for pick in options.picks():
            if plan := build(base, degrees, options, pick, spec, cluster, wishes):
                yield plan


def shrunk(monkeypatch):
    """A space small enough to be priced whole many times."""
    monkeypatch.setattr(axes, "SCHEDULES", ("1f1b", "interleaved"))
    monkeypatch.setattr(axes, "LARGEST_MICRO_BATCH", 2)


def with_memory(cluster, size):
    device = replace(cluster.device, memory_bytes=Figure(value=size, source="assumed"))
    return replace(cluster, groups=tuple(replace(group, device=device) for group in cluster.groups))


@pytest.mark.parametrize("spec", [SPEC, experts(8, hidden=256, blocks=4, positions=4096)], ids=["dense", "experts"])
def test_every_plan_of_the_space_obeys_the_rules(spec, monkeypatch):
    shrunk(monkeypatch)
    plans = list(everything(spec, gpus(4, nodes=2), replace(WORK, samples_per_step=32)))
    assert len({plan.plan_hash for plan in plans}) == len(plans)
    assert all(plan.layout.world_size == 8 for plan in plans)
    assert [check(plan, spec, gpus(4, nodes=2), to_run=False) for plan in plans[::7]] == [()] * len(plans[::7])
    assert {plan.layout.tp for plan in plans} >= {1, 2, 4}
    assert {plan.layout.pp for plan in plans} >= {1, 2, 4}
    assert {plan.shard.stage for plan in plans} == {0, 1, 2, 3}
    if limits.num_experts(spec):
        assert {plan.layout.ep for plan in plans} == {1, 2, 4, 8}


@pytest.mark.parametrize("memory", [80e9, 2.6e9, 2.2e9])
def test_an_exhaustive_search_finds_the_minimum_and_a_bounded_one_comes_near(memory, monkeypatch):
    shrunk(monkeypatch)
    cluster = with_memory(gpus(2), memory)
    plans = list(everything(SPEC, cluster, WORK))
    scores = [score(plan, SPEC, cluster) for plan in plans]
    fastest = min(s.seconds for s in scores)
    whole, bounded = wide(cluster=cluster, exhaustive=True), wide(cluster=cluster, exhaustive=False)
    assert (whole.considered, whole.num_fitting) == (len(plans), sum(s.fits for s in scores))
    assert whole.exhaustive
    assert whole.estimates[0].step_seconds == pytest.approx(fastest)
    assert not bounded.exhaustive
    assert bounded.considered < whole.considered
    assert bounded.estimates[0].step_seconds <= fastest * 1.02
    assert "Bounded" in bounded.space
    assert "Exhaustive" in whole.space


def test_a_score_is_the_total_of_a_price():
    cluster = gpus(2)
    for plan in list(everything(SPEC, cluster, WORK))[::97]:
        told, full = score(plan, SPEC, cluster), price(plan, SPEC, cluster)
        assert (told.peak_bytes, told.fits) == (full.peak_device_bytes, full.fits)
        if told.fits:
            assert told.seconds == full.step_seconds
        assert score(plan, SPEC, cluster, bar=full.step_seconds) is None
        assert score(plan, SPEC, cluster, bar=full.step_seconds * 1.01) == told


def test_a_ranking_says_what_runs_and_can_be_written():
    ranking = wide()
    assert from_json(to_json(ranking), Ranking, "memory") == ranking == wide()
    assert len(ranking.runs) == len(ranking.best)
    for plan, runs in zip(ranking.best, ranking.runs, strict=True):
        assert runs == (not check(plan, SPEC, gpus(4)))
    assert ranking.best_runnable is not None
    assert not check(ranking.best_runnable, SPEC, gpus(4))
    times = [estimate.step_seconds for estimate in ranking.estimates]
    assert times == sorted(times)
    assert ranking.neighbours
    for near in ranking.neighbours:
        assert near.lost_by


def test_the_best_that_runs_is_what_a_search_for_it_finds():
    for memory in (80e9, 3e9):
        cluster = with_memory(gpus(4), memory)
        runnable = wide(cluster=cluster).best_runnable
        found = search(SPEC, cluster, MODEL, WORK, RECIPE)
        assert price(runnable, SPEC, cluster).step_seconds <= found.estimates[0].step_seconds * 1.01


def test_wishes_hold_in_every_plan():
    for wishes in (
        {"layout.tp": 2},
        {"layout.pp": 2, "pipeline.schedule": "gpipe"},
        {"batch.micro_batch": 3, "layout.tp": 4},
        {"shard.stage": 3, "recompute.mode": "full"},
        {"batch.accumulation": 4},
        {"precision.fp8": "rowwise"},
        {"layout.sequence_parallel": False, "layout.tp": 4},
        {"shard.carrier": "megatron"},
    ):
        cluster = assumed_cluster("h100-sxm", 4, 4)
        work = replace(WORK, samples_per_step=48)
        for plan in wide(cluster=cluster, work=work, wishes=wishes).best:
            for key, value in wishes.items():
                part, _, entry = key.partition(".")
                assert getattr(getattr(plan, part), entry) == value, key


def test_samples_need_not_be_a_multiple_of_the_ranks():
    with pytest.raises(BadInput, match="2 over 4 ranks"):
        search(SPEC, gpus(4), MODEL, replace(WORK, samples_per_step=2), RECIPE)
    for plan in wide(work=replace(WORK, samples_per_step=2)).best:
        assert plan.layout.data_parallel <= 2
    ranking = wide(work=replace(WORK, samples_per_step=2))
    assert ranking.runs == tuple(not check(plan, SPEC, gpus(4)) for plan in ranking.best)
    assert ranking.best_runnable is None or not check(ranking.best_runnable, SPEC, gpus(4))


def test_work_that_breaks_a_rule_and_samples_that_no_layout_shares():
    with pytest.raises(RuleBroken, match="16384 positions"):
        wide(work=replace(WORK, sequence_length=20000))
    odd = llama(hidden=7 * 8, heads=7, kv_heads=7, blocks=1, ffn=49)
    with pytest.raises(BadInput, match=r"3 / 4 = 0.75"):
        search(odd, gpus(4), MODEL, Workload(sequence_length=63, samples_per_step=3), RECIPE, to_run=False)


def test_what_does_not_fit_is_offloaded_and_then_refused_with_the_cheapest_change():
    need = min(price(plan, SPEC, gpus(1)).peak_device_bytes for plan in everything(SPEC, gpus(1), WORK))
    tight = with_memory(gpus(1), 0.5 * need)
    with pytest.raises(DoesNotFit) as caught:
        wide(cluster=tight, work=replace(WORK, sequence_length=16384, samples_per_step=1))
    assert "would fit" in caught.value.fix
    assert "too much" in caught.value.message


def test_layers_lie_as_even_as_they_can_with_the_ends_lighter():
    assert layers_for(30, 4) == (7, 8, 8, 7)
    assert layers_for(126, 16) == (7, *[8] * 14, 7)
    assert layers_for(32, 4) == (8,) * 4
    assert layers_for(7, 4) == (2, 2, 2, 1)
    for blocks in range(1, 40):
        for stages in range(1, blocks + 1):
            layers = layers_for(blocks, stages)
            assert (sum(layers), len(layers)) == (blocks, stages)
            assert max(layers) - min(layers) <= 1


def test_less_memory_never_makes_the_best_faster():
    work, wishes = replace(WORK, samples_per_step=4), {"layout.cp": 1, "layout.pp": 1}
    rankings = [
        wide(cluster=with_memory(gpus(4), size), exhaustive=True, work=work, wishes=wishes) for size in (80e9, 4e9, 2.5e9)
    ]
    times = [ranking.estimates[0].step_seconds for ranking in rankings]
    assert times == sorted(times)


@pytest.mark.parametrize("name", PRESETS[::4])
def test_no_preset_and_no_cluster_size_crashes(name):
    spec = load_spec(name)
    for kind, num, per_node in (("h100-sxm", 1, 1), ("a100-sxm-80", 24, 8)):
        cluster = assumed_cluster(kind, num, per_node)
        work = default_workload(spec, cluster, to_run=False, sequence_length=min(4096, spec.max_sequence))
        try:
            ranking = search(spec, cluster, MODEL, work, RECIPE, to_run=False)
        except DoesNotFit as error:
            assert "would fit" in error.fix or "smaller model" in error.fix
            continue
        assert ranking.estimates[0].fits


def test_large_spaces_are_bounded():
    base, ranks = work_plan(SPEC, gpus(8), MODEL, WORK, RECIPE)
    found = explore.explore(base, ranks, SPEC, gpus(8), {})
    assert not found.exhaustive
    assert len(found.found) < 0.2 * found.size
