"""Megatron's and DeepSpeed's conventions in closed form: bytes a parameter, bytes a token, workspaces, loss."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.plan.plan_values import gpus, llama, plan_of

from fullstride.model.families.megatron_gpt import ExpertSizes, LatentSizes, MegatronShape, megatron_spec
from fullstride.plan.ledger.allocator import waste
from fullstride.plan.ledger.cuts import padded_vocabulary
from fullstride.plan.ledger.local import local_of
from fullstride.plan.ledger.table import ledger, moments_of
from fullstride.plan.ledger.totals import static_bytes
from fullstride.plan.plan import (
    Batch,
    Comm,
    Compile,
    Kernels,
    Layout,
    Loss,
    Overlap,
    Pipeline,
    Precision,
    Recompute,
    Shard,
    Workload,
)

GPUS = gpus()
MIB = 2**20
STATES = ("weights", "master", "gradients", "optimizer")
BF16 = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", gradient="fp32")
SHAPE = MegatronShape(layers=4, hidden=256, heads=4, vocab=1000, positions=128)


def plan_for(stage=1, layout=None, micro=2, accumulation=1, **parts):
    layout = layout or Layout(dp_shard=4, sequence_parallel=False)
    base = {
        "workload": Workload(sequence_length=128, samples_per_step=micro * accumulation * layout.data_parallel),
        "layout": layout,
        "shard": Shard(carrier="megatron", stage=stage),
        "batch": Batch(micro_batch=micro, accumulation=accumulation),
        "precision": BF16,
    }
    return plan_of(**{**base, **parts})


def rows_of(plan, spec, *kinds, moment=None, name=""):
    rows = ledger(plan, spec, GPUS)
    return sum(r.bytes for r in rows if r.kind in kinds and (moment is None or moment in r.moments) and r.name.startswith(name))


def padded(spec, tp=1):
    """Parameters with the vocabulary padded to 128 x tp."""
    extra = -(-spec.vocab_size // (128 * tp)) * 128 * tp - spec.vocab_size
    return spec.num_parameters + extra * spec.hidden_size * (1 if spec.tied_embeddings else 2)


def test_a_gpt_has_the_parameters_that_it_should():
    hidden, ffn = 256, 1024
    block = (3 * hidden + 1) * hidden + 2 * hidden + (hidden + 1) * hidden + (hidden + 1) * ffn + (ffn + 1) * hidden
    block += 4 * hidden  # two norms; and qkv's bias has 3 hidden, of which one is counted above
    spec = megatron_spec(SHAPE, "gpt")
    assert spec.num_parameters == 4 * block + (1000 + 128) * hidden + 2 * hidden
    modern = replace_shape(rotary=True, gated=True, rms_norm=True, bias=False, untied=True, kv_heads=2, ffn=512)
    block = 2 * hidden * hidden + 2 * hidden * 128 + 3 * 512 * hidden + 2 * hidden
    assert megatron_spec(modern, "llama").num_parameters == 4 * block + 2 * 1000 * hidden + hidden


def replace_shape(**parts):
    from dataclasses import replace as change

    return change(SHAPE, **parts)


@settings(max_examples=40, deadline=None)
@given(ranks=st.sampled_from([1, 2, 4, 8]), cp=st.sampled_from([1, 2]), stage=st.sampled_from([0, 1]))
def test_bytes_of_a_parameter(ranks, cp, stage):
    """6 + 12/d with the distributed optimizer, 18 without (Megatron-LM's docs/source/api-guide/dist_optimizer.md)."""
    spec = megatron_spec(SHAPE, "gpt")
    plan = plan_for(stage, Layout(dp_shard=ranks, cp=cp, sequence_parallel=False))
    each = 6 + 12 / (ranks * cp) if stage else 18
    rounding = rows_of(plan, spec, "optimizer", name="rounding")
    assert rows_of(plan, spec, *STATES, moment="checkpoint") - rounding == pytest.approx(each * padded(spec), abs=4)
    assert rows_of(plan, spec, "optimizer", moment="load") == 0  # moments are made in the first step


def test_fp16_sums_in_fp16_and_keeps_wide_copies_between_steps():
    spec = megatron_spec(SHAPE, "gpt")
    narrow = replace(BF16, embedding="fp16", block="fp16", head="fp16", gradient="fp16")
    plan = plan_for(precision=narrow)
    count = padded(spec)
    assert rows_of(plan, spec, *STATES, moment="forward_end") == pytest.approx((4 + 12 / 4) * count, abs=4)
    assert rows_of(plan, spec, *STATES, moment="checkpoint") == pytest.approx((4 + 16 / 4) * count, abs=4)


@settings(max_examples=30, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
    attention=st.sampled_from(["sdpa", "fused_softmax"]),
    micro=st.integers(1, 4),
)
def test_activations_are_korthikantis(tp, sp, attention, micro):
    """Table 2 of arXiv 2205.05198, with the statistics of norms and softmax that it leaves out."""
    spec, h, s, a = megatron_spec(SHAPE, "gpt"), 256, 128, 4
    plan = plan_for(layout=Layout(tp=tp, sequence_parallel=sp), micro=micro, kernels=Kernels(attention=attention))
    part = local_of(plan, spec).blocks[0]
    found = sum(local_of(plan, spec).kept(sublayer) for sublayer in part.sublayers)
    scores = 5 * a * s / h if attention != "sdpa" else 0.0
    law = s * micro * h * (34 + scores) / tp if sp or tp == 1 else s * micro * h * (10 + 24 / tp + scores / tp)
    statistics = s * micro * (2 * 2 * 4 / (tp if sp else 1) + 4 * a / tp)
    assert found == pytest.approx(law + statistics)


@pytest.mark.parametrize(("fused", "each"), [("no", 6), ("script", 10), ("native", 2)])
def test_cross_entropy_keeps_by_kind(fused, each):
    spec = megatron_spec(SHAPE, "gpt")
    plan = plan_for(layout=Layout(tp=2, sequence_parallel=False), loss=Loss(fused=fused))
    count = 2 * 128 * padded_vocabulary(plan, 1000) // 2
    assert padded_vocabulary(plan, 1000) == 1024
    assert rows_of(plan, spec, "logits", moment="forward_end") == count * each


def test_deferred_gradients_of_the_head_wait_on_the_last_stage():
    spec = megatron_spec(SHAPE, "gpt")
    base = plan_for(layout=Layout(pp=2, dp_shard=2), pipeline=Pipeline(schedule="1f1b"), accumulation=4)
    late = replace(base, overlap=Overlap(deferred_head=2))
    more = rows_of(late, spec, "logits", moment="loss") - rows_of(base, spec, "logits", moment="loss")
    assert more == 2 * 2 * 128 * (1024 + 256) * 2


def test_workspaces_follow_the_device_and_the_environment():
    spec = megatron_spec(SHAPE, "gpt")
    assert rows_of(plan_for(), spec, "workspace") == (2 * 32 + 32) * MIB
    small = plan_for(comm=Comm(env={"CUBLAS_WORKSPACE_CONFIG": ":16:8"}))
    assert rows_of(small, spec, "workspace") == 2 * 128 * 1024 + 32 * MIB
    overlapped = plan_for(overlap=Overlap(tensor=True))
    assert rows_of(overlapped, spec, "workspace") == (2 * 32 + 3 * 32) * MIB
    local = megatron_spec(replace_shape(implementation="local"), "gpt")
    plan = plan_for(kernels=Kernels(attention="fused_softmax"))
    assert rows_of(plan, local, "workspace") == 2 * 32 * MIB
    assert rows_of(plan, local, "temporary", name="score buffer") == 2 * 4 * 128 * 128 * 2


def test_the_head_has_a_stand_in_as_every_fused_weight_has():
    spec = megatron_spec(SHAPE, "gpt")
    plan = plan_for(layout=Layout(tp=2), kernels=Kernels(gradient_fusion=True))
    block = (3 * 256 * 256 + 256 * 256 + 2 * 256 * 1024) // 2  # four matrices of different shapes, cut in two
    assert rows_of(plan, spec, "temporary", name="stand-ins") == 2 * (block + 1024 * 256 // 2)
    assert not rows_of(plan_for(layout=Layout(tp=2)), spec, "temporary", name="stand-ins")


def test_graphs_hold_the_inputs_of_each_layer_in_flight():
    spec = megatron_spec(SHAPE, "gpt")
    plan = plan_for(layout=Layout(pp=2, dp_shard=2), pipeline=Pipeline(schedule="1f1b"), accumulation=4)
    rows = ledger(replace(plan, compile=Compile(graphs=True)), spec, GPUS)
    found = {r.stage: r.bytes for r in rows if r.name == "inputs of CUDA graphs"}
    each = 2 * 128 * 256 * 2 + 2 * 2 * 128 * 128
    assert found == {0: 2 * 2 * each, 1: 2 * each}  # two layers a stage; two micro-batches in flight on the first
    assert not any(r.name == "inputs of CUDA graphs" for r in ledger(plan, spec, GPUS))


def test_each_stage_sums_to_the_model_and_both_ends_have_a_tied_table():
    spec = megatron_spec(SHAPE, "gpt")
    plan = plan_for(layout=Layout(pp=2, dp_shard=2), pipeline=Pipeline(schedule="1f1b"), accumulation=4)
    weights = [sum(r.bytes for r in ledger(plan, spec, GPUS) if r.kind == "weights" and r.stage == rank) for rank in range(2)]
    assert sum(weights) == 2 * (padded(spec) + 1024 * 256)


def test_recompute_of_attention_saves_what_stands_of_scores():
    spec = megatron_spec(SHAPE, "gpt")
    whole = plan_for(kernels=Kernels(attention="fused_softmax"))
    core = replace(whole, recompute=Recompute(mode="attention"))
    saved = rows_of(whole, spec, "activations") - rows_of(core, spec, "activations")
    assert saved == 4 * 5 * 4 * 128 * 128 * 2


def test_mixtures_latent_attention_and_further_predictions():
    moe = replace_shape(
        experts=ExpertSizes(count=8, per_token=2, ffn=128, shared_ffn=128),
        expert_layers=(False, True, True, True),
        latent=LatentSizes(q_rank=64, kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32),
        bias=False,
        gated=True,
        untied=True,
        predictions=1,
    )
    spec = megatron_spec(moe, "deepseek")
    assert [stack.count for stack in spec.stacks] == [1, 3]
    plan = plan_for(layout=Layout(dp_shard=4, ep=4))
    local = local_of(plan, spec)
    assert local.experts == 4 * 2 * 3 * 128 * 256  # the layer that predicts further has experts too
    every = local_of(plan_for(layout=Layout(dp_shard=4)), spec)
    assert every.count - local.count == 3 * local.experts
    plain = megatron_spec(replace_shape(untied=True), "plain")
    one, two = (rows_of(plan, one, "logits", moment="loss") for one in (plain, spec))
    assert two == 2 * one


def test_static_bytes_count_what_the_pipeline_leaves():
    spec = megatron_spec(SHAPE, "gpt")
    plan = plan_for(layout=Layout(pp=2, dp_shard=2), pipeline=Pipeline(schedule="1f1b"), accumulation=4)
    rows = ledger(plan, spec, GPUS)
    left = sum(r.bytes for r in rows if r.name == "left by the pipeline" and r.stage == 1)
    assert left == 2 * 2 * 128 * 256 * 2 + 2 * 128 * 128
    at = {m.name: m.bytes for m in moments_of(rows, inside=True, stage=1)}
    assert static_bytes(rows, 1) == at["checkpoint"]


@given(st.lists(st.integers(1, 30 * MIB), max_size=30))
def test_allocator_waste_is_bounded(sizes):
    assert 0 <= waste(sizes) <= len(sizes) * MIB
    assert waste([4 * MIB] * 10) == 0  # five fill a segment
    assert waste([int(19.5 * MIB)]) == 0.5 * MIB


@settings(max_examples=30, deadline=None)
@given(stage=st.sampled_from([0, 1, 2, 3]), ranks=st.sampled_from([1, 2, 8]))
def test_deepspeed_shares_out_by_stage(stage, ranks):
    """16P, 4P + 12P/d, 2P + 14P/d, 16P/d (arXiv 1910.02054, figure 1)."""
    spec = llama()
    narrow = replace(BF16, gradient="bf16")
    plan = plan_for(stage, Layout(dp_shard=ranks), precision=narrow, shard=Shard(carrier="deepspeed", stage=stage))
    each = {0: 16, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}[stage]
    assert rows_of(plan, spec, *STATES, moment="optimizer") == pytest.approx(each * spec.num_parameters, abs=6)
    assert (rows_of(plan, spec, "gathered") > 0) == (stage == 3)
    before = rows_of(plan, spec, "temporary", moment="load")
    assert before == 4 * spec.num_parameters if stage < 3 else before < 4 * spec.num_parameters


def test_deepspeed_keeps_narrow_gradients_beside_those_it_sums():
    spec = llama()
    plan = plan_for(1, Layout(dp_shard=4), shard=Shard(carrier="deepspeed", stage=1))  # fp32 sums of bf16 gradients
    assert rows_of(plan, spec, "gradients", moment="backward_end") == (4 + 2) * spec.num_parameters
    assert rows_of(plan, spec, "gradients", moment="checkpoint") == 2 * spec.num_parameters
