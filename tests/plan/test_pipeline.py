import pytest
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.plan.ledger.table import ledger, moments_of
from fullstride.plan.pipeline import RUNNING, balanced_layers, choose_sizes, plan_durations, plan_schedule, plan_timeline
from fullstride.plan.plan import Batch, Layout, Pipeline, Workload
from fullstride.plan.schedule.checker import faults
from fullstride.plan.schedule.text import schedule_text
from fullstride.plan.sizes_page import sizes_blocks
from fullstride.units import format_seconds

SPEC = llama(hidden=2048, blocks=16, heads=16, kv_heads=8, ffn=8192, vocab=32_000, positions=8192)
WIDE = llama(hidden=1024, blocks=12, heads=16, kv_heads=8, ffn=2816, vocab=200_000, positions=8192)


def piped(schedule="1f1b", pp=4, chunks=1, micro=1, many=8, length=2048, **pipeline):
    return plan_of(
        layout=Layout(pp=pp),
        pipeline=Pipeline(schedule=schedule, chunks=chunks, **pipeline),
        batch=Batch(micro_batch=micro, accumulation=many),
        workload=Workload(sequence_length=length, samples_per_step=micro * many),
    )


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("bfs", 2), ("zb-h1", 1), ("zb-v", 2)]
)
def test_every_schedule_has_a_timeline_whose_peaks_are_the_ledgers(schedule, chunks):
    plan = piped(schedule, chunks=chunks, micro=2)
    timeline = plan_timeline(plan, SPEC, gpus())
    rows = ledger(plan, SPEC, gpus())

    assert 0 < timeline.bubble_share < 1
    for rank in timeline.ranks:
        moments = {moment.name: moment.bytes for moment in moments_of(rows, stage=rank.rank)}
        assert rank.peak_bytes == pytest.approx(max(moments[name] for name in RUNNING), rel=1e-6)


def ledgers(plan, spec, cluster):
    rows = ledger(plan, spec, cluster)
    found = [{m.name: m.bytes for m in moments_of(rows, stage=rank)} for rank in range(plan.layout.pp)]
    return tuple(max(moments[name] for name in RUNNING) for moments in found)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("sizes", [(4, 2, 2, 2), (1, 1, 1, 2), (2, 1, 2, 4)])
def test_with_a_size_for_each_stage_peaks_are_the_ledgers_too(schedule, sizes):
    plan = piped(schedule, micro=2, micro_batch_per_stage=sizes)
    timeline = plan_timeline(plan, SPEC, gpus())

    assert tuple(rank.peak_bytes for rank in timeline.ranks) == pytest.approx(ledgers(plan, SPEC, gpus()), rel=1e-6)


def test_sizes_are_chosen_by_what_the_ledger_says_of_them():
    choice = choose_sizes(piped(pp=2, many=8), SPEC, gpus())
    for trial in (choice.best, choice.uniform, choice.proportional):
        own = piped(pp=2, many=8, micro_batch_per_stage=trial.sizes)
        assert trial.peak_bytes == pytest.approx(ledgers(own, SPEC, gpus()), rel=1e-6)


def test_the_page_sets_chosen_sizes_beside_one_size_and_the_formula():
    plan = piped(pp=2, micro=4, many=2)
    timeline = plan_timeline(plan, SPEC, gpus())
    heading, table = sizes_blocks(plan, SPEC, gpus(), timeline)
    choice = choose_sizes(plan, SPEC, gpus())
    assert heading.text == "Micro-batch sizes by stage"
    assert [row.cells[0] for row in table.rows] == ["this plan", "best of one size", "chosen by simulation", "proportional"]
    told = [row.cells[1] for row in table.rows]
    found = [sizes.sizes for sizes in (choice.uniform, choice.best, choice.proportional)]
    assert told == ["4 4", *(" ".join(map(str, sizes)) for sizes in found)]
    assert table.rows[2].cells[2] == format_seconds(choice.best.step_seconds)
    (_, small_text) = sizes_blocks(plan, SPEC, small(gpus(), 2**30), timeline)
    assert small_text.text.startswith("no micro-batch sizes fit: the closest, (")
    one = piped(pp=2, micro=1, many=1)
    assert sizes_blocks(one, SPEC, gpus(), plan_timeline(one, SPEC, gpus())) == ()


def test_the_actions_of_a_plan_can_be_run():
    schedule = plan_schedule(piped("zb-v", chunks=2, micro=2, many=9))

    assert schedule.samples == 18
    assert faults(schedule.actions, schedule.placement, schedule.samples) == ()


def filed(tmp_path, plan, text=None, **changes):
    """The plan with its own schedule in a file, or with another text there."""
    path = tmp_path / "mine.schedule"
    path.write_text(text or schedule_text(plan_schedule(plan)))
    return replace(plan, pipeline=replace(plan.pipeline, schedule_file=str(path), **changes))


def test_a_file_is_named_with_the_pair_at_fault(tmp_path):
    plan = piped("1f1b", pp=2, many=2)
    text = schedule_text(plan_schedule(plan))
    assert plan_schedule(filed(tmp_path, plan, "\ufeff" + text)) == plan_schedule(plan)  # some editors begin a file so
    lines = text.splitlines()
    one, two = lines.index("1:forward c0 [0,1)"), lines.index("1:backward c0 [0,1)")
    lines[one], lines[two] = lines[two], lines[one]
    with pytest.raises(RuleBroken) as refused:
        plan_schedule(filed(tmp_path, plan, "\n".join(lines)))
    assert refused.value.message == (
        f"pipeline.schedule_file {tmp_path / 'mine.schedule'}: 1:forward c0 [0,1) and 1:backward c0 [0,1): "
        "backward stands before forward"
    )


def test_a_file_and_its_plan_are_of_one_mind_on_sizes_and_on_there_being_a_pipeline(tmp_path):
    plan = piped("1f1b", pp=2, micro=2, many=2, micro_batch_per_stage=(4, 2))
    plan_schedule(filed(tmp_path, plan))
    with pytest.raises(RuleBroken, match=r"up to \[4, 2\] samples on its stages, the plan \[2, 2\]") as refused:
        plan_schedule(filed(tmp_path, plan, micro_batch_per_stage=()))
    assert refused.value.fix == "set pipeline.micro_batch_per_stage = [4, 2]"
    one = replace(filed(tmp_path, plan, schedule="none", micro_batch_per_stage=()), layout=Layout())
    with pytest.raises(RuleBroken, match=r"mine.schedule with layout.pp = 1: one stage takes no turns"):
        plan_schedule(one)


def test_the_order_of_schedules_is_that_of_their_bubbles():
    shares = [
        plan_timeline(piped(schedule, chunks=chunks), SPEC, gpus(), record=False).bubble_share
        for schedule, chunks in (("zb-v", 2), ("interleaved", 2), ("1f1b", 1))
    ]

    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_all_work_is_done_whatever_the_sizes():
    one = plan_durations(piped(micro=2), SPEC, gpus())
    two = plan_durations(piped(micro=2, micro_batch_per_stage=(2, 2, 2, 1)), SPEC, gpus())

    assert one.stages[0] == two.stages[0]
    assert two.stages[3].forward_seconds > one.stages[3].forward_seconds  # small products are less efficient
    timeline = plan_timeline(piped(micro=2, micro_batch_per_stage=(2, 2, 2, 1)), SPEC, gpus())
    assert timeline.ranks[3].peak_samples == (1,)


def test_a_large_head_takes_blocks_from_the_last_stage():
    plan = piped()
    even, balanced = plan, replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=balanced_layers(plan, WIDE, gpus())))
    layers = balanced.pipeline.layers_per_stage

    assert sum(layers) == 12 and layers[-1] < layers[0]
    slow, fast = (plan_timeline(each, WIDE, gpus(), record=False) for each in (even, balanced))
    assert fast.span_seconds < slow.span_seconds


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-v", 2), ("interleaved", 2)])
def test_the_simulator_moves_blocks_where_the_fastest_slowest_stage_is_not_the_best(schedule, chunks):
    plan = piped(schedule, pp=2, chunks=chunks)
    exact, moved = (balanced_layers(plan, WIDE, gpus(), most_actions=most) for most in (0, 100_000))
    slow, fast = (
        plan_timeline(replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=layers)), WIDE, gpus(), record=False)
        for layers in (exact, moved)
    )

    assert sum(moved) == sum(exact) == 12
    assert fast.span_seconds <= slow.span_seconds
    if schedule == "zb-v":  # embedding and head lie on one rank
        assert moved != exact and fast.span_seconds < 0.99 * slow.span_seconds


def small(cluster, size):
    group = cluster.groups[0]
    memory = replace(group.device.memory_bytes, value=size)
    return replace(cluster, groups=(replace(group, device=replace(group.device, memory_bytes=memory)),))


def peaks(plan, spec):
    rows = ledger(plan, spec, gpus())
    return [max(moment.bytes for moment in moments_of(rows, stage=rank)) for rank in range(plan.layout.pp)]


def test_layers_move_away_from_a_rank_that_does_not_fit():
    plan = piped(micro=4)
    free = balanced_layers(plan, SPEC, gpus())
    most = peaks(replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=free)), SPEC)
    tight = small(gpus(), max(most) - 1)
    moved = balanced_layers(plan, SPEC, tight)

    assert moved != free and sum(moved) == 16
    assert max(peaks(replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=moved)), SPEC)) < max(most)
    with pytest.raises(DoesNotFit):
        balanced_layers(plan, SPEC, small(gpus(), min(most) / 4))


def test_sizes_are_chosen_by_simulation_within_memory():
    plan = piped(pp=2, many=64, length=128)
    free = choose_sizes(plan, WIDE, gpus())
    limit = 0.8 * max(free.best.peak_bytes)
    tight = choose_sizes(plan, WIDE, small(gpus(), limit))

    assert free.exhaustive and free.best.excess_bytes == 0 and max(free.best.sizes) > 1
    assert max(tight.best.peak_bytes) <= limit
    assert tight.best.sizes[1] < free.best.sizes[1]  # the stage with the logits
    assert tight.uniform is not None and tight.best.step_seconds <= tight.uniform.step_seconds


def test_a_schedule_that_cannot_work_is_refused():
    with pytest.raises(RuleBroken, match="2 micro-batches, schedule interleaved on 4 ranks needs 4"):
        plan_timeline(piped("interleaved", chunks=2, many=2), SPEC, gpus())
