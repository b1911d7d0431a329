from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import cpus, gpus, llama, plan_of, whole_rows

from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.facts import made_again, num_parameters
from fullstride.plan.ledger.reserved import FRAGMENTATION
from fullstride.plan.ledger.table import ledger, moments_of, peak_of
from fullstride.plan.plan import Batch, Compile, Loss, Optimizer, Recompute, Shard, Workload

SPEC, GPUS = llama(), gpus()
P = num_parameters(SPEC)
STATES = ("weights", "master", "gradients", "optimizer")


def plan_for(stage=0, ranks=1, micro=2, accumulation=1, **parts):
    layout, shard = layout_for(stage, ranks)
    work = Workload(sequence_length=64, samples_per_step=micro * accumulation * ranks)
    batch = Batch(micro_batch=micro, accumulation=accumulation)
    base = {"workload": work, "layout": layout, "shard": shard, "batch": batch}
    return plan_of(**{**base, "precision": weights_cast(accumulation, shard.carrier), **parts})


def rows_of(plan, *kinds, moment=None, cluster=GPUS, spec=SPEC):
    rows = ledger(plan, spec, cluster)
    return sum(r.bytes for r in rows if r.kind in kinds and (moment is None or moment in r.moments))


def test_hand_counted_parameters():
    assert SPEC.num_parameters == P
    assert SPEC.num_parameters == 2 * 101 * 64 + 64 + 4 * (2 * 64 + 128 * 64 + 64 * 64 + 256 * 64 + 64 * 128)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 64), st.integers(1, 3).map(lambda k: 16 * k), st.integers(1, 6))
def test_states_of_each_zero_stage_in_closed_form(ranks, hidden, blocks):
    """16 bytes a parameter with fp32 gradients beside fp32 masters, over the ranks that share them (arXiv 1910.02054)."""
    spec = llama(hidden=hidden, blocks=blocks, ffn=2 * hidden)
    count = num_parameters(spec)
    states = partial(rows_of, spec=spec, moment="optimizer")
    for stage in (1, 2, 3):
        plan = plan_for(stage, ranks)
        share = whole_rows(spec, ranks)
        assert states(plan, *STATES) == 16 * share
        assert count / ranks <= share < count / ranks + sum(p.count for p in spec.tail[1].parameters)
        whole = rows_of(plan, "gathered", moment="backward", spec=spec)
        assert whole == 2 * count if stage < 3 else whole < 2 * count or blocks <= 2
    assert states(plan_for(0, ranks, precision=AUTOCAST), *STATES) == 16 * count
    assert states(plan_for(0, 1), *STATES) == 16 * count  # 2 + 4 + 8, and 2 for gradients in bf16
    assert states(plan_for(0, 1, accumulation=2), *STATES) == 18 * count  # gradients summed in fp32
    assert states(plan_for(0, 1, precision=FP32), *STATES) == 16 * count


def test_gradients_stand_throughout_where_they_are_summed():
    for plan, there in [
        (plan_for(0, 1, precision=FP32), False),
        (plan_for(0, 1, accumulation=2, precision=FP32), True),
        (plan_for(3, 4), False),
        (plan_for(3, 4, accumulation=2), True),
    ]:
        rows = [r for r in ledger(plan, SPEC, GPUS) if r.name.startswith("gradients") and r.kind == "gradients"]
        assert any("forward_end" in r.moments for r in rows) is there
    whole = rows_of(plan_for(1, 4, accumulation=2), "gradients", moment="backward")
    assert whole == 4 * P  # without reduction FSDP2 keeps whole gradients


def test_activations_by_hand_eager_and_compiled():
    tokens = 2 * 64
    stream = {"eager": 2 + 4, "compiled": 2}  # a norm's input, and its fp32 copy when eager
    products = 64 + (2 * 64 + 2 * 32) + 64 + 64 + 256 + 128
    for mode, silu in (("off", 128), ("block", 0)):
        norms = 2 * stream["eager" if mode == "off" else "compiled"] * 64
        block = norms + 2 * (products + silu)
        ends = norms // 2 + 2 * 64
        plan = plan_for(compile=Compile(mode=mode))
        assert rows_of(plan, "activations") == tokens * (4 * block + ends)


def test_recompute_keeps_inputs_and_makes_one_block_again():
    tokens, plan = 2 * 64, plan_for(recompute=Recompute(mode="full"))
    rows = {r.name: r for r in ledger(plan, SPEC, GPUS)}
    assert rows["block inputs"].bytes == 4 * tokens * 64 * 2
    assert "mlp.activation" not in rows
    every = plan_for(recompute=Recompute(mode="full", every=2))
    assert {r.name: r for r in ledger(every, SPEC, GPUS)}["block inputs"].bytes == 2 * tokens * 64 * 2
    modes = [plan_for(recompute=Recompute(mode=mode)) for mode in ("none", "norm_activation", "full")]
    none, some, full = (rows_of(p, "activations") for p in modes)
    assert none > some > full
    assert rows_of(modes[0], "recompute") == 0
    assert rows_of(modes[2], "recompute") > rows_of(modes[1], "recompute") > 0


def test_a_share_of_products_is_made_again_evenly():
    assert [made_again(index, 0.5) for index in range(7)] == [False, True] * 3 + [False]
    assert [made_again(index, 1 / 3) for index in range(6)] == [False, False, True] * 2
    assert not any(made_again(index, 0.0) for index in range(9))
    assert all(made_again(index, 1.0) for index in range(9))
    tokens, width = 2 * 64, 2
    some = Recompute(mode="norm_activation", products=0.5)
    rows = {r.name: r.bytes for r in ledger(plan_for(recompute=some), SPEC, GPUS)}
    # of qkv, out, gate and up, down: the second and the fourth are made again
    assert rows["attn.qkv"] == 4 * tokens * 128 * width
    assert rows["mlp.gate_up"] == 4 * tokens * 256 * width
    assert "attn.out" not in rows
    assert "mlp.down" not in rows


def test_a_compiled_block_does_not_keep_what_closes_it():
    mode = Recompute(mode="norm_activation")
    eager, compiled = (rows_of(plan_for(recompute=mode, compile=Compile(mode=m)), "activations") for m in ("off", "block"))
    ends = 2 * 64 * 64 * 4  # the final norm's fp32 copy, which compilation drops too
    assert eager - compiled - ends == 4 * 2 * 64 * 64 * 2


def test_the_allocator_holds_blocks_that_do_not_fit_and_pools_of_other_streams():
    tokens = 2 * 64

    def beyond(plan):
        return {r.name: r.bytes for r in ledger(plan, SPEC, GPUS) if r.kind == "fragmentation"}

    one = beyond(plan_for())
    assert one["block of narrow logits"] == tokens * 101 * 2
    assert set(one) == {"block of narrow logits", "fragmentation"}
    assert set(beyond(plan_for(precision=FP32))) == set(beyond(plan_for(loss=Loss(kind="chunked")))) == {"fragmentation"}
    many = replace(plan_for(3, 2, loss=Loss(kind="chunked")), workload=Workload(sequence_length=1024, samples_per_step=4))
    rows, found = ledger(many, SPEC, GPUS), beyond(many)
    assert peak_of(moments_of(rows, inside=True)).name != "backward_end"
    assert found["pool of gradient shards"] == 4 * whole_rows(SPEC, 2)  # the peak has none of them
    block = (P - 2 * 101 * 64 - 64) // 4
    assert found["pool of all-gathers"] >= 2 * 2 * block - 2 * block


def test_the_fullest_rank_of_fsdp2_has_whole_rows():
    """101 tokens over two ranks are 51 and 50 rows."""
    plan = plan_for(2, 2)
    rows = 2 * 51 * 64 + 32 + 4 * (2 * 32 + (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) // 2)
    assert rows == whole_rows(SPEC, 2)
    assert rows_of(plan, "master", moment="checkpoint") == 4 * rows
    assert rows_of(plan, "optimizer") == 8 * rows


def test_the_chunked_head_keeps_a_gradient_and_no_input():
    plan = plan_for(loss=Loss(kind="chunked"))
    (head,) = [r for r in ledger(plan, SPEC, GPUS) if r.name == "head: head"]
    assert {m for m in head.moments if m != "first_step"} == {"forward_end"}
    (whole,) = [r for r in ledger(plan_for(), SPEC, GPUS) if r.name == "head: head"]
    assert "loss" in whole.moments


def test_flat_buffers_by_hand():
    """Units of 101 x 64, of blocks, of the final norm and the head; each parameter and shard on a multiple of 64 elements."""
    block, table, head = 2 * 64 + 128 * 64 + 64 * 64 + 256 * 64 + 64 * 128, 101 * 64, 64 + 101 * 64
    sizes = [-(-size // 128) * 128 for size in (table, *[block] * 4, head)]

    def flat(stage, **parts):
        return replace(plan_for(2, 2, **parts), shard=Shard(carrier="flat", stage=stage))

    for stage in (1, 2, 3):
        plan = flat(stage)
        assert rows_of(plan, "weights", moment="checkpoint") == (2 * sum(sizes) if stage < 3 else 0)
        assert rows_of(plan, "master", "optimizer") == 12 * sum(sizes) // 2
        assert rows_of(plan, "gradients", moment="optimizer") == 4 * sum(sizes) // 2
    assert rows_of(flat(1, precision=FP32), "weights", "master") == 4 * sum(sizes)  # masters are places in the weights
    assert rows_of(flat(3, precision=FP32), "weights", "master") == 4 * sum(sizes) // 2
    assert rows_of(flat(1, accumulation=2), "gradients", moment="backward") == 4 * sum(sizes)
    assert rows_of(flat(2, accumulation=2), "gradients", moment="backward") == 4 * sum(sizes) // 2
    assert rows_of(flat(3), "gathered", moment="backward") == 2 * 2 * sizes[1]  # one in use, one ahead
    assert rows_of(flat(3), "gathered", moment="forward_end") == 2 * sizes[-1]


def test_logits_whole_and_by_chunks():
    spec, tokens = llama(vocab=50_001, positions=8192), 4 * 4096
    work = Workload(sequence_length=4096, samples_per_step=4)
    plan = plan_for(micro=4, workload=work)
    assert rows_of(plan, "logits", moment="forward_end", spec=spec) == tokens * 50_001 * (2 + 4 + 4)
    assert rows_of(plan, "logits", moment="loss", spec=spec) == tokens * 50_001 * 12
    chunked = replace(plan, loss=Loss(kind="chunked", chunk_tokens=1024))
    weight, hidden = 50_001 * 64 * 4, tokens * 64 * 2
    assert rows_of(chunked, "logits", moment="forward_end", spec=spec) == 1024 * 50_001 * 8 + weight + hidden


def test_gathered_weights_of_zero_3_follow_the_reshard_rule():
    base = plan_for(3, 4, compile=Compile(mode="block"))
    sizes = []
    ends = {"head": False, "embedding": False}
    for reshard in ({}, {"model.layers.3": False}, ends, {"blocks": False, **ends}):
        plan = replace(base, shard=Shard(carrier="fsdp2", stage=3, reshard=reshard))
        sizes.append(rows_of(plan, "gathered", moment="backward"))
    assert sizes[0] < sizes[1]
    assert sizes[0] < sizes[2] < sizes[3] == 2 * P


def test_autocast_copies_the_weights_of_products():
    products = P - 101 * 64 - 9 * 64  # neither the embedding nor norms
    plan = plan_for(precision=AUTOCAST)
    copies = [r for r in ledger(plan, SPEC, GPUS) if r.name.startswith("autocast")]
    assert [r.bytes for r in copies] == [2 * products, 2 * products]
    full = replace(plan, recompute=Recompute(mode="full"))
    saved = [r.bytes for r in ledger(full, SPEC, GPUS) if r.name == "autocast's copies, saved"]
    assert saved == [2 * 101 * 64]  # the head's alone


def test_optimizer_temporaries():
    def temporary(cluster=GPUS, **parts):
        return rows_of(plan_for(**parts), "temporary", moment="optimizer", cluster=cluster)

    foreach = Optimizer(implementation="foreach")
    assert temporary(precision=FP32) == temporary() == 0
    assert temporary(cluster=cpus()) == 4 * P  # bf16 gradients widened, less than one piece
    assert temporary(optimizer=foreach) == 4 * P + 4 * P
    assert temporary(precision=FP32, optimizer=foreach) == 4 * P
    assert temporary(precision=FP32, optimizer=Optimizer(implementation="loop")) == 2 * 4 * 256 * 64


@settings(max_examples=40, deadline=None)
@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    ranks=st.sampled_from([1, 2, 8]),
    accumulation=st.integers(1, 3),
    mode=st.sampled_from(["none", "norm_activation", "full"]),
    kind=st.sampled_from(["model", "chunked"]),
    compiled=st.sampled_from(["off", "block"]),
)
def test_more_samples_take_more_memory_and_moments_are_sums(stage, ranks, accumulation, mode, kind, compiled):
    parts = {"recompute": Recompute(mode=mode), "loss": Loss(kind=kind), "compile": Compile(mode=compiled)}
    if stage == 0 and ranks > 1:
        parts["precision"] = AUTOCAST
    peaks = []
    for micro in (1, 2, 4):
        rows = ledger(plan_for(stage if ranks > 1 else 0, ranks, micro, accumulation, **parts), SPEC, GPUS)
        for moment in moments_of(rows):
            assert moment.bytes == sum(r.bytes for r in rows if moment.name in r.moments)
        assert all(r.bytes >= 0 and r.moments and r.source for r in rows)
        peak = peak_of(moments_of(rows, inside=True)).bytes
        assert rows[-1].bytes == round(FRAGMENTATION * peak)
        peaks.append(peak)
    assert peaks[0] <= peaks[1] <= peaks[2]  # equal where the optimizer's step is the peak


def test_what_the_driver_takes_is_assumed_and_not_allocated():
    rows = [r for r in ledger(plan_for(3, 2), SPEC, GPUS) if r.kind == "context"]
    assert {r.name for r in rows} == {"CUDA context", "NCCL buffers"}
    assert all(r.confidence == "assumed" for r in rows)
    assert [r.name for r in ledger(plan_for(), SPEC, cpus()) if r.kind == "context"] == ["Python, torch and libraries"]
    assert [r.name for r in ledger(plan_for(), SPEC, GPUS) if r.kind == "context"] == ["CUDA context"]
