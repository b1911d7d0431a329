"""Which products adapters are put beside, and what a step with them comes to."""

import pytest
from msgspec.structs import replace
from tests.plan.plan_values import experts, llama, plan_of

from fullstride.model.flops import forward_flops_per_token, train_flops_per_token
from fullstride.plan.adapted import adapted, is_target, listed, step_flops_per_token, targets_met, unmet
from fullstride.plan.cost.comm import volumes
from fullstride.plan.facts import num_parameters
from fullstride.plan.plan import Adapter, Batch, Layout, Shard

PRODUCTS = (("attn.qkv", "self_attn.q_proj"), ("attn.qkv", "self_attn.v_proj"), ("mlp.up", "mlp.fc1"))


@pytest.mark.parametrize(
    ("target", "meant"),
    [("qkv", [True, True, False]), ("v_proj", [False, True, False]), ("gate_up", [False, False, True]), ("attn", [False] * 3)],
)
def test_a_target_is_the_end_of_a_sublayer_s_name_or_of_the_product_s(target, meant):
    assert [is_target((target,), *product) for product in PRODUCTS] == meant


def test_what_names_nothing_is_told_but_for_the_default():
    assert unmet(("qkv", "fc2", "down"), PRODUCTS) == "'fc2'"
    assert unmet(Adapter().targets, PRODUCTS) == ""
    assert unmet(Adapter().targets, (("a.to_q", "a.to_q"),)) == "'qkv', 'out', 'gate_up', 'down'"
    assert unmet((), PRODUCTS) == "nothing"
    assert listed(PRODUCTS) == "qkv (q_proj, v_proj), up (fc1)"


def test_experts_have_no_adapter():
    plan = plan_of(adapter=Adapter(rank=2, targets=("experts",)))
    spec = experts(4)
    assert not any(adapted(plan, s) for stack in spec.stacks for s in stack.sublayers)
    assert "experts joined into one tensor have no product" in targets_met(plan, spec, None)


def test_frozen_products_have_no_product_for_their_weight_s_gradient():
    spec = llama()
    plain = plan_of()
    plan = replace(plain, adapter=Adapter(rank=2, targets=("qkv",)))
    length = plan.workload.sequence_length
    whole = train_flops_per_token(spec, length, "full")
    assert step_flops_per_token(plain, spec, "full") == whole
    ends = (*spec.embedding, *spec.tail)
    products = sum(m.n * m.k for s in ends for m in s.matmuls)
    products += sum(stack.count * m.n * m.k for stack in spec.stacks for s in stack.sublayers for m in s.matmuls)
    blocks = sum(stack.count for stack in spec.stacks)
    thin = blocks * 2 * (64 + 128)  # qkv: 64 in, 64 + 2 x 32 out
    assert step_flops_per_token(plan, spec, "full") == pytest.approx(whole - 2 * products + 6 * thin)
    assert forward_flops_per_token(spec, length, "full") * 2 < step_flops_per_token(plan, spec, "full") < whole


@pytest.mark.parametrize(("carrier", "stage"), [("ddp", 0), ("fsdp2", 2), ("fsdp2", 3), ("flat", 1), ("flat", 2), ("flat", 3)])
def test_what_travels_with_adapters(carrier, stage):
    spec = llama()
    layout = Layout(dp_shard=4) if stage else Layout(dp_replicate=4)
    plan = plan_of(
        layout=layout, shard=Shard(carrier=carrier, stage=stage), batch=Batch(micro_batch=2),
        adapter=Adapter(rank=2, targets=("qkv",)),
    )  # fmt: skip
    blocks = sum(stack.count for stack in spec.stacks)
    trained = blocks * 2 * (64 + 128)
    moved, whole = volumes(plan, spec), num_parameters(spec) + trained
    assert moved.reduced + moved.all_reduced == (2 * trained if carrier == "ddp" else trained)
    if carrier == "ddp":
        assert moved.gathered == 0
    elif carrier == "flat" and stage < 3:  # frozen weights stay whole on every rank
        assert moved.gathered == trained
    else:
        assert moved.gathered >= whole
