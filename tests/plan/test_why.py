import re

import pytest
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.errors import BadInput, UsageError
from fullstride.files import from_json, to_json
from fullstride.plan.neighbours import changes_of, neighbours, vary
from fullstride.plan.plan import Batch, Layout, ModelRef, Pipeline, Recipe, Shard, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import check, not_run
from fullstride.plan.search import search
from fullstride.plan.why import SHORT, Answer, parse_wishes, why, why_document

SPEC = llama(hidden=256, blocks=30, heads=8, kv_heads=4, ffn=1024, vocab=4000, positions=4096)
CLUSTER = assumed_cluster("h100-sxm", 8, 8)
WORK = Workload(sequence_length=512, samples_per_step=256)
RANKING = search(SPEC, CLUSTER, ModelRef(source="x"), WORK, Recipe(), to_run=False)


def ask(text):
    answer = why(text, RANKING, SPEC, CLUSTER)
    assert from_json(to_json(answer), Answer, "memory") == answer
    document = why_document(answer, RANKING, SPEC, CLUSTER)
    assert document.title.endswith(text)
    assert [block.text for block in document.blocks[: len(answer.words)]] == list(answer.words)
    return answer


def test_wishes_are_read_as_the_plan_file_has_them():
    found = parse_wishes("tp=8, pp=4,zero=3,recompute=full, pipeline.layers_per_stage=[8,8,7,7],sequence_parallel=false")
    assert found == {
        "layout.tp": 8,
        "layout.pp": 4,
        "shard.stage": 3,
        "recompute.mode": "full",
        "pipeline.layers_per_stage": (8, 8, 7, 7),
        "layout.sequence_parallel": False,
    }
    for name, key in SHORT.items():
        part, _, entry = key.partition(".")
        assert hasattr(getattr(plan_of(), part), entry), name


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("tp", UsageError, "entry=value"),
        ("", UsageError, "says nothing"),
        ("workload.sequence_length=4", UsageError, "the work, not the plan"),
        ("size=4", BadInput, "no such entry"),
        ("layout.size=4", BadInput, "no such entry"),
        ("tp=many", BadInput, "int"),
        ("recompute=some", BadInput, "some"),
    ],
)
def test_what_cannot_be_read_is_refused(text, error, words):
    with pytest.raises(error, match=words):
        parse_wishes(text)


def test_a_choice_that_can_be_says_which_term_loses_it():
    answer = ask("tp=8")
    assert answer.possible
    assert answer.fits
    assert answer.plan.layout.tp == 8
    assert re.search(r"The best plan with it takes .* slower. What loses it: .*: .* against ", answer.words[0])
    assert any("does not run it" in words for words in answer.words) == bool(not_run(answer.plan, None, CLUSTER))


def test_overlap_of_tensor_parallelism_is_a_step_away_where_it_can_hide_and_goes_with_it():
    spec = llama()
    plan = plan_of(layout=Layout(tp=2))
    asked = {words: wishes for words, wishes in changes_of(plan, spec, gpus(4)) if "overlap.tensor" in wishes}
    assert asked == {"tensor parallelism beside its products": {"overlap.tensor": True}}
    assert not any("overlap.tensor" in wishes for _, wishes in changes_of(plan_of(), spec, gpus(4)))
    beside = vary(plan, {"overlap.tensor": True}, spec)
    assert beside.overlap.tensor and not vary(beside, {"layout.tp": 1}, spec).overlap.tensor
    slow, quick = (price(p, spec, gpus(4)).step_seconds for p in (plan, beside))
    assert quick < slow
    ordered = search(spec, gpus(4), ModelRef(source="x"), plan.workload, Recipe(), to_run=False, wishes={"layout.tp": 2})
    assert ordered.best[0].overlap.tensor


def test_thirty_layers_on_four_stages():
    answer = ask("pp=4")
    assert not answer.possible
    assert answer.broken[0].code == "pipeline.even"
    assert answer.words[0].startswith("30 layers on 4 stages, 30 / 4 = 7.5 a stage")
    assert "stages of 7, 8, 8, 7 blocks" in answer.words[1]
    assert "the longest holds 8 where 7.5 would be even" in answer.words[1]
    assert "even, 6.7% more:" in answer.words[1]
    assert sum(answer.plan.pipeline.layers_per_stage) == 30
    given = ask("pp=4,layers_per_stage=[9,7,7,7]")
    assert given.possible
    assert given.plan.pipeline.layers_per_stage == (9, 7, 7, 7)


def test_blocks_lie_where_the_head_leaves_room_also_where_they_do_not_come_out_even():
    spec = llama(hidden=512, blocks=7, heads=8, kv_heads=4, ffn=1408, vocab=100_000, positions=1024)
    work = Workload(sequence_length=1024, samples_per_step=64)
    found = search(spec, gpus(2), ModelRef(source="x"), work, Recipe(), num_ranks=2, to_run=False)
    answer = why("pp=2", found, spec, gpus(2))
    assert answer.broken[0].code == "pipeline.even"
    layers = answer.plan.pipeline.layers_per_stage
    assert layers[0] > layers[-1] + 1  # by number of blocks alone it would be 4 and 3
    told = " ".join(answer.words)
    assert f"Its stages hold {layers[0]}, {layers[-1]} blocks, since embedding, head and loss take time" in told
    even = why("pp=2,layers_per_stage=[4,3]", found, spec, gpus(2))
    assert answer.estimate.step_seconds < 0.95 * even.estimate.step_seconds


def test_samples_without_the_right_accumulation():
    answer = ask("dp_shard=8,micro_batch=4,accumulation=5")
    assert not answer.possible
    assert "micro_batch 4 x accumulation 5 x data parallel 8 = 160, samples_per_step = 256" in answer.words[0]
    assert "256 / 8 = 32 a rank, accumulation would be 8" in answer.words[0]
    assert answer.words[1] == "With accumulation 8 it can be done:"
    assert answer.plan.batch == Batch(micro_batch=4, accumulation=8)
    answer = ask("dp_shard=8,micro_batch=5")
    assert "32 / 5 = 6.4 is not whole" in answer.words[0]
    assert answer.plan is None


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("tp=3", "layout.world", "8 / 3 = 2.667"),
        ("pp=6", "layout.world", "8 / 6 = 1.333"),
        ("ep=2", "layout.experts", "has no experts"),
        ("pp=2,schedule=zb-v,chunks=3", "pipeline.chunks", "chunks = 3 with schedule zb-v"),
        ("tp=2,zero=0,carrier=fsdp2", "shard.fsdp2", "fsdp2 with shard.stage = 0"),
    ],
)
def test_what_cannot_be_says_the_arithmetic(text, code, words):
    answer = ask(text)
    assert not answer.possible
    assert code in {v.code for v in answer.broken}
    assert any(words in sentence for sentence in answer.words)


def test_heads_and_stages_have_their_limits():
    big = assumed_cluster("h100-sxm", 64, 8)
    ranking = search(SPEC, big, ModelRef(source="x"), WORK, Recipe(), to_run=False)
    assert "8 / 16 = 0.5 heads a rank" in why("tp=16", ranking, SPEC, big).words[0]
    assert "32 stages for 30 blocks" in " ".join(why("pp=32", ranking, SPEC, big).words)
    assert "512 / 128 = 4" not in " ".join(why("cp=64", ranking, SPEC, big).words)


def test_what_does_not_fit_says_by_how_much():
    spec = llama(hidden=8192, blocks=30, heads=64, kv_heads=8, ffn=28672, vocab=32000, positions=4096)
    work = Workload(sequence_length=4096, samples_per_step=64)
    cluster = assumed_cluster("h100-sxm", 64, 8)
    ranking = search(spec, cluster, ModelRef(source="x"), work, Recipe(), to_run=False)
    answer = why("zero=0,tp=1,pp=1,cp=1", ranking, spec, cluster)
    assert answer.possible
    assert not answer.fits
    assert "too much" in answer.words[0]
    assert "would fit" in answer.words[0]


def test_the_best_plan_is_recognised():
    best = RANKING.best[0]
    answer = ask(f"tp={best.layout.tp},pp={best.layout.pp},micro_batch={best.batch.micro_batch}")
    assert answer.words[0] == "This is what the best plan does."


# Neighbours


def test_a_varied_plan_keeps_its_ranks_and_counts_its_batch_again():
    plan = plan_of(
        layout=Layout(dp_shard=8),
        shard=Shard(carrier="fsdp2", stage=3),
        batch=Batch(micro_batch=4, accumulation=8),
        workload=WORK,
    )
    other = vary(plan, {"layout.tp": 2, "layout.pp": 2}, SPEC)
    assert (other.layout.dp_shard, other.layout.world_size) == (2, 8)
    assert other.batch == Batch(micro_batch=4, accumulation=32)
    assert other.pipeline == Pipeline(schedule="1f1b")
    assert check(other, SPEC, gpus(8), to_run=False) == ()
    alone = vary(plan, {"layout.tp": 8}, SPEC)
    assert (alone.shard, alone.batch.accumulation) == (Shard(), 64)
    assert vary(alone, {"layout.tp": 4}, SPEC).shard.stage == 1
    assert vary(plan, {"shard.stage": 0}, SPEC).shard == Shard(carrier="ddp")
    assert vary(plan, {"layout.pp": 4}, SPEC).pipeline.layers_per_stage == (7, 8, 8, 7)
    assert vary(plan, {"layout.pp": 4}, SPEC, lay_out=False).pipeline.layers_per_stage == ()


def test_neighbours_are_allowed_and_one_step_away():
    plan, estimate = RANKING.best[0], RANKING.estimates[0]
    found = neighbours(plan, estimate, SPEC, CLUSTER, to_run=False)
    assert {c.summary for c in found} <= {words for words, _ in changes_of(plan, SPEC, CLUSTER)}
    assert len({c.plan_hash for c in found}) == len(found) >= 6
    runnable = neighbours(plan, estimate, SPEC, CLUSTER, to_run=True)
    assert {c.plan_hash for c in runnable} <= {c.plan_hash for c in found}
    for candidate in found:
        assert re.search(r": .* against |does not fit: |same time, |nothing: ", candidate.lost_by)


# Facts that hold whatever the figures


def grown(**parts):
    plan = plan_of(
        layout=Layout(dp_shard=8),
        shard=Shard(carrier="fsdp2", stage=1),
        batch=Batch(micro_batch=2, accumulation=16),
        workload=WORK,
    )
    return price(replace(plan, **parts), SPEC, CLUSTER)


def test_memory_rises_with_the_micro_batch_and_falls_with_recompute_and_sharding():
    sizes = [grown(batch=Batch(micro_batch=n, accumulation=32 // n)).peak_device_bytes for n in (1, 2, 4, 8)]
    assert sizes == sorted(sizes)
    base = vary(RANKING.best[0], {"layout.tp": 1, "layout.pp": 1, "layout.cp": 1, "shard.stage": 1}, SPEC)

    def peak(**wishes):
        return price(vary(base, {key.replace("__", "."): value for key, value in wishes.items()}, SPEC), SPEC, CLUSTER)

    modes = [peak(recompute__mode=mode).peak_device_bytes for mode in ("full", "norm_activation", "none")]
    assert modes == sorted(modes)
    stages = [peak(shard__stage=stage).peak_device_bytes for stage in (3, 1, 0)]
    assert stages == sorted(stages)
    assert peak(recompute__mode="full").step_seconds > peak(recompute__mode="none").step_seconds
