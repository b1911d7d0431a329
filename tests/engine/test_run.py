"""A Run on one rank: refusals, skipped steps, documents kept apart, weights from a folder, lower dtypes."""

import math

import pytest
import torch
from torch import nn

from fullstride.engine import compiling
from fullstride.engine.anatomy import find, head_is_last, logits_of, units
from fullstride.engine.build import build_model, from_config, parameters_on_meta
from fullstride.engine.memory.recompute import chosen
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.parity_models import FAMILIES, PlainModel
from fullstride.engine.run import positions_in_documents, prepare
from fullstride.engine.schedule import learning_rate
from fullstride.errors import BadInput, EnvironmentFault, RuleBroken
from fullstride.plan.plan import Batch, Compile, Loss, ModelRef, Optimizer, Precision, Recipe, Recompute, Workload

REPLACE = __import__("msgspec").structs.replace
BF16 = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", gradient="bf16")


def batch(plan, seed=0):
    ids = torch.randint(0, 61, (plan.workload.samples_per_step, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def plan_of(family="plain", **changes):
    plan = make_case(family, dtype="fp32").plan
    return REPLACE(plan, **changes)


def build(family, **more):
    return model_of(make_case(family, **more))


# ------------------------------------------------------------------ parts


@pytest.mark.filterwarnings("ignore:.*eager attention keeps whole score matrices")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_anatomy_finds_the_parts(family):
    model = build(family, tied=True)
    found = find(model)
    assert found.tied
    assert len(found.blocks) == 3
    assert isinstance(model.get_submodule(found.embedding), nn.Embedding)
    assert isinstance(model.get_submodule(found.head), nn.Linear)
    assert "norm" in type(model.get_submodule(found.final_norm)).__name__.lower()
    assert not find(build(family)).tied or family == "gemma"  # gemma ties always


def test_units_cover_each_parameter_once_and_tied_ones_together():
    names = [unit.name for unit in units(build("llama"), find(build("llama")))]
    assert names == ["embedding", "model.layers.0", "model.layers.1", "model.layers.2", "head", "root"]
    model = build("llama", tied=True)
    assert [unit.name for unit in units(model, find(model))][-2:] == ["model.layers.2", "root"]


def test_a_model_without_blocks_or_embedding_is_refused_by_name():
    with pytest.raises(BadInput, match=r"no ModuleList.*among only"):
        find(_Wrap(only=nn.Linear(2, 2)))
    with pytest.raises(BadInput, match=r"no nn\.Embedding"):
        find(_Wrap(layers=nn.ModuleList([nn.Linear(2, 2)]), top=nn.Linear(2, 2)))


class _Wrap(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


@pytest.mark.filterwarnings("ignore:.*eager attention")
@pytest.mark.parametrize(("family", "more", "last"), [
    ("llama", {}, True), ("gpt2", {}, True), ("plain", {}, True),
    ("gemma2", {"final_logit_softcapping": 30.0}, False), ("granite", {"logits_scaling": 8.0}, False),
])  # fmt: skip
def test_whether_logits_are_the_heads_output(family, more, last):
    config = FAMILIES.get(family) or {**FAMILIES["gemma"], "model_type": family, **more}
    model = build("plain") if family == "plain" else from_config(config, family)
    assert head_is_last(model, find(model)) is last


def test_chunked_loss_is_refused_where_logits_are_changed():
    model = from_config({**FAMILIES["gemma"], "model_type": "granite", "logits_scaling": 8.0}, "granite")
    with pytest.raises(RuleBroken, match="changes its logits after the head"):
        prepare(model, plan_of("gemma", loss=Loss(kind="chunked")))


def test_unknown_sources_are_refused():
    with pytest.raises(BadInput):
        build_model("no-such-model")
    with pytest.raises(BadInput, match="model_type 'nonsense'"):
        from_config({"model_type": "nonsense"}, "config.json")
    with pytest.raises(BadInput, match="has no model_type"):
        from_config({"hidden_size": 3}, "config.json")


def test_parameters_are_on_meta_buffers_are_real_and_ties_survive():
    model = build("llama", tied=True)
    assert all(p.is_meta for p in model.parameters())
    assert all(not b.is_meta for b in model.buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ------------------------------------------------------------------ weights


def test_weights_depend_on_the_seed_and_the_name_alone():
    one, two = (prepare(build("gpt2"), plan_of("gpt2")).state() for _ in range(2))
    assert all(torch.equal(one[key], two[key]) for key in one)
    other = prepare(build("gpt2"), plan_of("gpt2", recipe=Recipe(seed=1))).state()
    assert not torch.equal(one["weights/transformer.wte.weight"], other["weights/transformer.wte.weight"])
    first, second = (one[f"weights/transformer.h.{i}.mlp.c_fc.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    # GPT-2 scales the projections into the residual stream by 1/sqrt(2 x layers): its own code did that
    assert one["weights/transformer.h.0.mlp.c_proj.weight"].std() == pytest.approx(0.2 / math.sqrt(6), rel=0.1)


def test_parameters_without_a_way_to_make_them_are_refused():
    class Bare(PlainModel):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3))

    with parameters_on_meta():
        model = Bare()
    with pytest.raises(BadInput, match=r"the model .Bare. has parameters that nothing initialises: shift"):
        prepare(model, plan_of())


def test_a_users_own_weights_are_kept():
    model = PlainModel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = prepare(model, plan_of()).state()
    assert all(torch.equal(before[name], state[f"weights/{name}"]) for name in before)


def test_weights_come_from_a_model_directory(tmp_path):
    trained = prepare(build("llama", tied=True), plan_of("llama"))
    trained.module.save_pretrained(tmp_path)
    run = prepare(build_model(str(tmp_path)), plan_of("llama", model=ModelRef(source=str(tmp_path)), recipe=Recipe(seed=9)))
    assert all(torch.equal(value, run.state()[key]) for key, value in trained.state().items())
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(BadInput, match="cannot be read"):
        prepare(build_model(str(tmp_path)), plan_of("llama", model=ModelRef(source=str(tmp_path))))


# ------------------------------------------------------------------ steps


def test_step_says_loss_tokens_norm_and_rate_and_learns():
    plan = plan_of("llama", recipe=Recipe(steps=10, learning_rate=1e-2, warmup_steps=2))
    run = prepare(build("llama"), plan)
    results = [run.step(batch(plan)) for _ in range(6)]
    assert results[0].tokens == 2 * 11
    assert results[0].lr == pytest.approx(5e-3)
    assert results[-1].loss < results[0].loss - 0.5
    assert run.step_index == 6
    assert not results[0].skipped
    assert results[0].grad_norm > 0
    total, tokens = run.evaluate(batch(plan))
    assert tokens == 22
    assert total / tokens < results[0].loss


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_a_norm_that_is_not_finite_skips_the_update(implementation):
    plan = plan_of(optimizer=Optimizer(implementation=implementation))
    run = prepare(build("plain"), plan)
    run.step(batch(plan))
    before = {key: value.clone() for key, value in run.state().items()}
    held = run.module.to_vocab.weight.detach().clone()
    with torch.no_grad():
        run.module.to_vocab.weight.fill_(float("inf"))
    assert run.step(batch(plan)).skipped
    with torch.no_grad():
        run.module.to_vocab.weight.copy_(held)
    assert all(torch.equal(before[key], value) for key, value in run.state().items())
    assert not run.step(batch(plan)).skipped


def test_implementations_agree_and_frozen_parameters_stay():
    ends = []
    for implementation in ("fused", "foreach", "loop"):
        recipe = Recipe(eps=1e-3)  # entries whose gradient is rounding noise move by rounding noise then
        model, plan = build("plain"), plan_of(optimizer=Optimizer(implementation=implementation), recipe=recipe)
        model.table.weight.requires_grad_(False)
        run = prepare(model, plan)
        start = run.state()["weights/table.weight"].clone()
        for seed in range(3):
            run.step(batch(plan, seed))
        assert torch.equal(run.state()["weights/table.weight"], start)
        assert "exp_avg/table.weight" not in run.state()
        ends.append(run.state())
    for other in ends[1:]:
        assert all(torch.allclose(ends[0][key], other[key], atol=1e-6) for key in other)


def test_samples_where_nothing_counts_change_nothing_but_decay():
    plan = plan_of(recipe=Recipe(weight_decay=0.0))
    run = prepare(build("plain"), plan)
    before = {key: value.clone() for key, value in run.state().items()}
    out = run.step({**batch(plan), "labels": torch.full((2, 12), -100)})
    assert (out.loss, out.tokens, out.skipped) == (0.0, 0, False)
    assert all(torch.equal(before[key], value) for key, value in run.state().items())


def test_wrong_batches_are_refused():
    run = prepare(build("plain"), plan_of())
    with pytest.raises(BadInput, match="no 'labels'"):
        run.step({"input_ids": torch.zeros(2, 12, dtype=torch.int64)})
    with pytest.raises(BadInput, match="holds 3 samples, the plan takes 2"):
        run.step({name: torch.zeros(3, 12, dtype=torch.int64) for name in ("input_ids", "labels")})


def test_a_resumed_run_is_bit_equal():
    plan = plan_of("llama", precision=BF16)
    straight = prepare(build("llama"), plan)
    for seed in range(4):
        straight.step(batch(plan, seed))
    first = prepare(build("llama"), plan)
    for seed in range(2):
        first.step(batch(plan, seed))
    saved = {key: value.clone() for key, value in first.state().items()}
    second = prepare(build("llama"), REPLACE(plan, made_for=plan.made_for))
    for key, value in second.state().items():
        value.copy_(saved[key])
    second.after_load(2)
    for seed in (2, 3):
        second.step(batch(plan, seed))
    assert all(torch.equal(value, second.state()[key]) for key, value in straight.state().items())


# ------------------------------------------------------------------ documents


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_separate_documents_do_not_see_each_other(family):
    plan = plan_of(family, workload=Workload(sequence_length=12, samples_per_step=2, documents="separate"))
    run = prepare(build(family), plan)
    documents = torch.tensor([[0] * 5 + [1] * 1 + [2] * 6, [7] * 12])
    data = batch(plan)
    positions = positions_in_documents(documents)
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]
    with torch.no_grad():
        packed = logits_of(run.module(input_ids=data["input_ids"], position_ids=positions))
        for row, begin, end in ((0, 0, 5), (0, 5, 6), (0, 6, 12), (1, 0, 12)):
            alone = logits_of(run.module(input_ids=data["input_ids"][row : row + 1, begin:end]))
            assert torch.allclose(packed[row, begin:end], alone[0], atol=1e-5)
    across = run.step({**data, "document_ids": torch.zeros(2, 12, dtype=torch.int64)})
    again = prepare(build(family), plan).step({**data, "document_ids": documents})
    assert across.loss != pytest.approx(again.loss, rel=1e-6)


def test_separate_documents_need_a_model_that_can_be_told():
    plan = plan_of(workload=Workload(sequence_length=12, samples_per_step=2, documents="separate"))
    with pytest.raises(RuleBroken, match="documents is separate"):
        prepare(build("plain"), plan)


# ------------------------------------------------------------------ precision, recompute, compile


@pytest.mark.parametrize("kind", ["model", "chunked"])
@pytest.mark.parametrize("precision", [
    BF16,
    Precision(cast="weights", embedding="fp32", block="bf16", head="bf16"),
    Precision(cast="autocast", embedding="bf16", block="bf16", head="bf16"),
], ids=["bf16", "mixed", "autocast"])  # fmt: skip
def test_lower_dtypes_stay_close_and_masters_stay_wide(precision, kind):
    loss = Loss(kind=kind, chunk_tokens=5)
    plain = plan_of("llama", recipe=Recipe(learning_rate=1e-3, warmup_steps=0))
    lower = REPLACE(plain, precision=precision, loss=loss)
    if precision.gradient == "fp32":
        changes = {"workload": Workload(sequence_length=12, samples_per_step=4), "batch": Batch(micro_batch=2, accumulation=2)}
        plain, lower = REPLACE(plain, **changes), REPLACE(lower, **changes)
    wide, narrow = prepare(build("llama"), plain), prepare(build("llama"), lower)
    for seed in range(3):
        one, two = wide.step(batch(plain, seed)), narrow.step(batch(plain, seed))
        assert two.loss == pytest.approx(one.loss, rel=0.02)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=0.05)
    assert all(value.dtype == torch.float32 for value in narrow.state().values())
    block = next(narrow.module.model.layers[0].parameters())
    assert block.dtype == (torch.float32 if precision.cast == "autocast" else torch.bfloat16)


def test_one_block_in_every_is_recomputed_the_first_ones_being_kept():
    assert chosen(4, Recompute(mode="none")) == []
    assert chosen(4, Recompute(mode="full")) == [0, 1, 2, 3]
    assert chosen(5, Recompute(mode="full", every=2)) == [1, 3]


def test_full_recompute_keeps_less():
    kept = {}
    for used in ("none", "full"):
        run = prepare(build("llama"), plan_of("llama", recompute=Recompute(mode=used)))
        kept[used] = _kept_bytes(run.module)
    assert 0 < kept["full"] <= 0.4 * kept["none"]


def _kept_bytes(module):
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.zeros(2, 12, dtype=torch.int64)
    skip = {p.untyped_storage().data_ptr() for p in module.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = module.model.embed_tokens(ids)
        angles = module.model.rotary_emb(hidden, torch.arange(12)[None])
        for block in module.model.layers:
            hidden = block(hidden, position_embeddings=angles)
    return sum(size for pointer, size in seen.items() if pointer not in skip)


def test_a_host_without_a_compiler_is_told_so(monkeypatch):
    monkeypatch.setattr(compiling.shutil, "which", lambda _name: None)
    assert "C++ compiler" in compiling.compile_available(torch.device("cpu"))
    with pytest.raises(EnvironmentFault, match="no C\\+\\+ compiler"):
        prepare(build("plain"), plan_of(compile=Compile(mode="block")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "norm_activation", "full"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_blocks_compute_the_same_and_compile_once(mode):
    if compiling.compile_available(torch.device("cpu")):
        pytest.skip("no compiler on this host")
    torch._dynamo.reset()
    plan = plan_of("llama", recompute=Recompute(mode=mode), loss=Loss(kind="chunked", chunk_tokens=11))
    plain, run = prepare(build("llama"), plan), prepare(build("llama"), REPLACE(plan, compile=Compile(mode="block")))
    counts = []
    for seed in range(3):
        one, two = plain.step(batch(plan, seed)), run.step(batch(plan, seed))
        assert two.loss == pytest.approx(one.loss, rel=1e-5)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        counts.append(compiling.recompile_count())
    assert counts[0] == counts[-1]


# ------------------------------------------------------------------ schedule


def test_learning_rates():
    recipe = Recipe(steps=12, warmup_steps=2, learning_rate=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(step, recipe) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    linear = REPLACE(recipe, schedule="linear")
    assert learning_rate(2, linear) - learning_rate(3, linear) == pytest.approx(0.9 / 9)
    assert learning_rate(9, REPLACE(recipe, schedule="constant")) == 1.0
    assert learning_rate(99, recipe) == pytest.approx(0.1)
