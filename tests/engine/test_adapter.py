"""Low-rank adapters: the numbers of a loop with adapters written by hand, whoever carries the frozen weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fullstride.engine.build import from_config
from fullstride.engine.checkpoint import load_run, save_run
from fullstride.engine.export import export
from fullstride.engine.parity import batches, fresh_model, run_cases
from fullstride.engine.parity_adapters import adapt_by_hand
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.parity_models import FAMILIES
from fullstride.engine.run import prepare
from fullstride.errors import BadInput, RuleBroken
from fullstride.model.config import spec_from_config
from fullstride.plan.defaults import weights_cast
from fullstride.plan.plan import Adapter, Loss, Recompute
from fullstride.plan.rules import check

FULL, PART = Recompute(mode="full"), Recompute(mode="norm_activation")
CHUNKS = Loss(kind="chunked", chunk_tokens=7)
ALL, QV = Adapter(rank=3, alpha=6), Adapter(rank=2, targets=("q_proj", "v_proj"))
SOME = Adapter(rank=4, targets=("to_q", "back"))


def sharded(carrier, other):
    """Each stage with each kind of recomputation and loss over both carriers together."""
    return (
        make_case("gpt2", tied=True, ranks=2, stage=1, carrier=carrier, adapter=ALL, accumulation=3, recompute=other),
        make_case("llama", ranks=2, stage=2, carrier=carrier, adapter=ALL, accumulation=3, loss=CHUNKS),
        make_case("llama", tied=True, ranks=2, stage=3, carrier=carrier, adapter=ALL, accumulation=3, recompute=FULL),
        make_case("llama", ranks=2, stage=3, carrier=carrier, dtype="fp32", adapter=QV, recompute=PART, loss=CHUNKS),
        make_case("plain", ranks=2, stage=3, carrier=carrier, adapter=ALL, reshard={"blocks": False}),
        make_case("modular", ranks=2, stage=2, carrier=carrier, adapter=SOME, micro_batch=1),
        make_case("mixtral", ranks=2, stage=3, carrier=carrier, adapter=ALL, dtype="fp32"),
    )


CASES = {
    1: (
        make_case("llama", adapter=ALL, accumulation=3),
        make_case("gpt2", tied=True, adapter=ALL, recompute=FULL),
        make_case("gpt2", adapter=ALL, loss=CHUNKS, recompute=PART),
        make_case("llama", dtype="fp32", adapter=QV, loss=CHUNKS, accumulation=3, recompute=FULL),
        make_case("phi3", adapter=ALL),
    ),
    2: (
        make_case("llama", ranks=2, adapter=ALL, accumulation=3),
        make_case("gpt2", tied=True, ranks=2, adapter=ALL, recompute=FULL),
        *sharded("fsdp2", PART),
        *sharded("flat", FULL),
    ),
    4: (
        make_case("llama", ranks=4, stage=3, replicate=2, adapter=ALL, micro_batch=1, recompute=FULL),
        make_case("gpt2", tied=True, ranks=4, stage=1, replicate=2, carrier="flat", adapter=ALL, micro_batch=1),
        make_case("llama", ranks=4, stage=3, replicate=2, carrier="flat", adapter=QV, micro_batch=1, accumulation=3),
    ),
}


@pytest.mark.timeout(900)
@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(CASES))
def test_plans_with_adapters_equal_adapters_by_hand(ranks):
    """Frozen weights among it, which must be equal to the last bit, and the norm before clipping."""
    outcomes = run_cases(CASES[ranks], ranks, timeout_seconds=600)
    assert len(outcomes) == len(CASES[ranks])
    assert not [(o.name, o.errors) for o in outcomes if o.errors]


def steps(run, case, count=2):
    return [run.step(batch) for batch in batches(case)[:count]]


def adapters_of(run):
    return {name: value.clone() for name, value in run.state().items()}


def test_recomputation_with_a_frozen_embedding_still_gives_every_adapter_a_gradient():
    """Nothing that enters the first block asks for a gradient: some ways of recomputing then give none at all."""
    for mode in (FULL, PART):
        case = make_case("llama", adapter=ALL, recompute=mode)
        run = prepare(model_of(case), case.plan, device="cpu")
        before = adapters_of(run)
        results = steps(run, case)
        assert all(result.grad_norm > 0 for result in results)
        moved = [name for name, value in run.state().items() if not torch.equal(before[name], value)]
        assert set(moved) == set(before)  # A's from the second step on, and their moments
        run.close()


def test_nothing_is_computed_or_kept_for_frozen_weights():
    case = make_case("llama", adapter=ALL, dtype="fp32")
    plan = replace(case.plan, precision=weights_cast(1, "none"))
    run = prepare(model_of(case), plan, device="cpu")
    steps(run, case)
    for name, param in run.module.named_parameters():
        trained = "lora_" in name
        assert param.requires_grad is trained
        assert param.grad is None
        assert param.dtype == torch.bfloat16
        assert (f"exp_avg/{name}" in run.state()) is trained
        assert (name in run.frozen()) is not trained
        if not trained:
            assert run.frozen()[name].data_ptr() == param.data_ptr()  # held once
    assert {value.dtype for value in run.state().values()} == {torch.float32}
    run.close()


def test_names_and_initial_values_are_those_of_peft():
    case = make_case("gpt2", adapter=ALL, dtype="fp32")
    run = prepare(model_of(case), case.plan, device="cpu")
    a, b = (run.module.get_parameter(f"transformer.h.1.mlp.c_proj.lora_{which}.weight") for which in "AB")
    assert (tuple(a.shape), tuple(b.shape)) == ((3, 128), (32, 3))
    assert not b.any()
    assert 0.8 / 128**0.5 < a.abs().max() <= 1 / 128**0.5  # uniform within 1 / sqrt(in)
    plain = fresh_model(replace(case, plan=replace(case.plan, adapter=Adapter())))
    for name, param in plain.named_parameters():
        assert torch.equal(param, run.module.get_parameter(name)), name
    run.close()


@pytest.mark.parametrize(
    ("family", "targets", "words"),
    [
        ("llama", ("q_proj", "c_attn"), "'c_attn', and the blocks of LlamaForCausalLM have qkv (q_proj, k_proj, v_proj)"),
        ("gpt2", ("head",), "'head', and"),
        ("mixtral", ("experts",), "joins experts in one tensor"),
        ("mixtral", ("gate_up_proj",), "joins experts in one tensor"),
        ("modular", ("qkv", "out", "gate_up", "down"), "to_q, to_k, to_v, back"),
    ],
)
def test_a_target_that_no_block_has_is_refused_with_the_names_there_are(family, targets, words):
    case = make_case(family, adapter=Adapter(rank=2, targets=targets), dtype="fp32")
    with pytest.raises(RuleBroken) as caught:
        prepare(model_of(case), case.plan, device="cpu")
    assert words in str(caught.value)
    if "model_type" in FAMILIES[family]:
        found = check(case.plan, spec_from_config(FAMILIES[family], family))
        assert [v.code for v in found] == ["adapter.targets"]


def test_layouts_that_adapters_do_not_run_in_are_refused():
    for layout in ({"tp": 2}, {"pp": 2, "schedule": "1f1b", "accumulation": 2, "layers": 4}):
        case = make_case("llama", adapter=ALL, **layout)
        assert [v.code for v in check(case.plan)] == ["adapter.layout"]
        assert check(case.plan, to_run=False) == ()


def test_a_model_with_adapters_of_its_own_keeps_them():
    model = model_of(make_case("llama", dtype="fp32"))
    adapt_by_hand(model, make_case("llama", adapter=ALL, dtype="fp32").plan)
    with pytest.raises(BadInput, match="brings an adapter of its own"):
        prepare(model, make_case("llama", adapter=ALL, dtype="fp32").plan, device="cpu")


def test_a_forward_that_was_replaced_stays_inside():
    case = make_case("llama", adapter=ALL, dtype="fp32")
    model = fresh_model(case)
    target = model.model.layers[0].mlp.down_proj
    inner = target.forward
    target.forward = lambda hidden: 2 * inner(hidden)
    other = prepare(fresh_model(case), case.plan, device="cpu")
    run = prepare(model, case.plan, device="cpu")
    hidden = torch.randn(3, 48)
    twice = 2 * other.module.model.layers[0].mlp.down_proj(hidden)
    assert torch.allclose(run.module.model.layers[0].mlp.down_proj(hidden), twice)
    run.close()
    other.close()


# Checkpoints and export.


def saved_model(folder, kind="llama", **changes):
    """A model directory as transformers writes it."""
    torch.manual_seed(5)
    model = from_config({**FAMILIES[kind], **changes}, kind)
    model = model.to_empty(device="cpu") if any(p.is_meta for p in model.parameters()) else model
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    model.save_pretrained(folder)
    return folder


def plan_from(folder, case):
    return replace(case.plan, model=replace(case.plan.model, source=str(folder)))


def test_frozen_weights_start_from_a_model_directory_in_the_compute_dtype(tmp_path):
    case = make_case("llama", adapter=ALL, dtype="fp32")
    plan = replace(plan_from(saved_model(tmp_path / "base"), case), precision=weights_cast(1, "none"))
    run = prepare(model_of(case), plan, device="cpu")
    for name, value in load_file(tmp_path / "base" / "model.safetensors").items():
        assert torch.equal(run.frozen()[name], value.to(torch.bfloat16)), name
    run.close()


def test_a_checkpoint_holds_the_adapters_alone_and_goes_on_beside_the_same_weights_only(tmp_path):
    case = make_case("llama", adapter=ALL, dtype="fp32")
    plan = plan_from(saved_model(tmp_path / "base"), case)
    run = prepare(model_of(case), plan, device="cpu")
    steps(run, case)
    save_run(run, tmp_path / "saved")
    wanted = adapters_of(run)
    names = {key.split("@")[0] for key in load_file(tmp_path / "saved" / "rank00000.safetensors")}
    assert {name for name in names if not name.startswith("rng/")} == set(wanted)
    assert all("lora_" in name for name in wanted)
    run.close()

    narrow = replace(plan, precision=weights_cast(1, "none"))
    for again in (plan, narrow):  # another dtype of the frozen weights, the same numbers
        other = prepare(model_of(case), again, device="cpu")
        load_run(other, tmp_path / "saved")
        assert other.step_index == 2
        assert all(torch.equal(value, wanted[name]) for name, value in other.state().items())
        other.close()

    stranger = prepare(model_of(case), plan_from(saved_model(tmp_path / "wider", initializer_range=0.1), case), device="cpu")
    with torch.no_grad():
        stranger.frozen()["model.layers.1.mlp.down_proj.weight"][3, 4] += 1
    with pytest.raises(BadInput, match=r"beside other frozen weights than these: model.layers.1.mlp.down_proj.weight differs"):
        load_run(stranger, tmp_path / "saved")
    stranger.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_merged_weights_give_the_same_logits(kind, tmp_path):
    case = make_case(kind, adapter=ALL, dtype="fp32")
    run = prepare(model_of(case), plan_from(saved_model(tmp_path / "base", kind), case), device="cpu")
    steps(run, case, 3)
    export(run, tmp_path / "whole", merge=True)
    ids = batches(case)[0]["input_ids"]
    with torch.no_grad():
        wanted = run.module(input_ids=ids).logits
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(input_ids=ids).logits
    assert torch.allclose(other, wanted, atol=2e-5)
    assert not torch.allclose(base, wanted, atol=1e-3)
    run.close()


def test_adapters_are_exported_under_peft_s_names(tmp_path):
    case = make_case("gpt2", adapter=Adapter(rank=3, alpha=6, targets=("qkv", "out")), dtype="fp32")
    run = prepare(model_of(case), plan_from(saved_model(tmp_path / "base", "gpt2"), case), device="cpu")
    export(run, tmp_path / "adapter", dtype="bf16")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (3, 6, True)
    assert config["target_modules"] == ["attn.c_attn", "attn.c_proj"]  # mlp.c_proj has none
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(found) == 3 * 2 * 2
    assert found["base_model.model.transformer.h.2.attn.c_attn.lora_B.weight"].shape == (96, 3)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    run.close()


@pytest.mark.multi
@pytest.mark.slow
def test_another_layout_goes_on_where_one_stopped(tmp_path):
    """One rank, then two with each carrier, then one again: the adapters of a run that was not cut."""
    saved_model(tmp_path / "base")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    ways = ["none", "fsdp2 3", "flat 3", "flat 1", "ddp"]
    for number, way in enumerate(ways):
        count = "1" if way == "none" else "2"
        command = [*launcher, count, "-m", "tests.engine.adapter_steps", str(tmp_path), str(number), *way.split()]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    case = make_case("llama", adapter=ALL)
    run = prepare(model_of(case), plan_from(tmp_path / "base", case), device="cpu")
    losses = [run.step(batches(case)[number % 3]).loss for number in range(len(ways))]
    told = [json.loads((tmp_path / f"loss-{number}").read_text()) for number in range(len(ways))]
    assert told == pytest.approx(losses, rel=1e-6)
    last = prepare(model_of(case), plan_from(tmp_path / "base", case), device="cpu")
    load_run(last, tmp_path / f"saved-{len(ways) - 1}")
    for name, value in run.state().items():
        torch.testing.assert_close(last.state()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    exported = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    assert len(exported) == 3 * 7 * 2
    for name, value in exported.items():
        wanted = run.state()[f"weights/{name.removeprefix('base_model.model.')}"]
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6, msg=name)
    run.close()
    last.close()
