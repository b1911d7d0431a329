"""Faults that training frameworks have shipped without an error to be seen: each is a test here."""

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fullstride.engine.build import build_model, from_config
from fullstride.engine.checkpoint import load_run, save_run
from fullstride.engine.run import prepare
from fullstride.errors import BadInput
from fullstride.plan.plan import Batch, ModelRef, Plan, Precision, Recipe, Workload

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
PLAN = Plan(
    model=ModelRef(source="in memory"),
    workload=Workload(sequence_length=8, samples_per_step=2),
    recipe=Recipe(steps=8, learning_rate=1e-2, warmup_steps=4, clip_norm=0.5),
    batch=Batch(micro_batch=2),
)
MIXED = msgspec.structs.replace(PLAN, precision=Precision(cast="weights", embedding="bf16", block="bf16", head="bf16"))


def batch(step):
    ids = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def begin(plan=PLAN, **changes):
    return prepare(from_config({**CONFIG, **changes}, "tiny"), plan, device="cpu")


def take(run, first, last):
    return [(out.loss, out.grad_norm, out.lr) for step in range(first, last) for out in [run.step(batch(step))]]


@pytest.mark.parametrize("plan", [PLAN, MIXED], ids=["fp32", "bf16 weights"])
def test_loss_norm_and_learning_rate_do_not_jump_when_a_run_goes_on(plan, tmp_path):
    """Optimizer, schedule or bias correction left out of a checkpoint show as a jump after resuming."""
    run = begin(plan)
    take(run, 0, 3)
    save_run(run, tmp_path / "saved")
    wanted = take(run, 3, 6)
    other = begin(plan)
    take(other, 5, 6)  # a used run, so that nothing is right by being new
    load_run(other, tmp_path / "saved")
    assert take(other, 3, 6) == wanted
    lost = begin(plan)
    load_run(lost, tmp_path / "saved")
    for key, value in lost.state().items():
        if not key.startswith("weights/"):
            value.zero_()
    assert take(lost, 3, 6) != wanted  # without moments the same check fails


def test_masters_stay_fp32_where_weights_compute_in_bf16(tmp_path):
    """Masters that silently became bf16 lose every update smaller than a bf16 step, and a resumed run loses it again."""
    run = begin(MIXED)
    take(run, 0, 2)
    masters = {key: value.clone() for key, value in run.state().items() if key.startswith("weights/")}
    assert all(value.dtype == torch.float32 for group in run.optimizer.param_groups for value in group["params"])
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    save_run(run, tmp_path / "saved")
    other = begin(MIXED)
    load_run(other, tmp_path / "saved")
    assert all(torch.equal(other.state()[key], value) for key, value in masters.items())
    computing = dict(other.module.named_parameters())
    assert all(torch.equal(computing[k.removeprefix("weights/")], v.bfloat16()) for k, v in masters.items())


def test_fine_tuning_begins_with_the_loss_of_the_directory(tmp_path):
    """Weights that were never loaded show as a first loss near log(vocabulary)."""
    content = {key: value for key, value in CONFIG.items() if key != "model_type"}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **content))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = model(**batch(0)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "model")
    plan = msgspec.structs.replace(PLAN, model=ModelRef(source=str(tmp_path / "model")))
    first = prepare(build_model(plan.model.source), plan, device="cpu").step(batch(0)).loss
    assert first == pytest.approx(model(**batch(0)).loss.item(), rel=1e-4)
    assert first < 1.0


def test_tied_weights_are_one_after_resuming(tmp_path):
    """Head and embedding that drift apart still train, only worse."""
    run = begin(tie_word_embeddings=True)
    take(run, 0, 2)
    save_run(run, tmp_path / "saved")
    other = begin(tie_word_embeddings=True)
    load_run(other, tmp_path / "saved")
    take(other, 2, 4)
    assert other.module.lm_head.weight is other.module.model.embed_tokens.weight
    assert sum("lm_head" in key or "embed_tokens" in key for key in other.state()) == 3  # weight and two moments, once


def test_another_number_of_layers_is_never_trained_in_silence(tmp_path):
    """A checkpoint of more or fewer layers is refused by the first parameter that is too many or too few."""
    run = begin()
    save_run(run, tmp_path / "saved")
    with pytest.raises(BadInput, match=r"holds .*model\.layers\.1\..*, which the model does not have"):
        load_run(begin(num_hidden_layers=1), tmp_path / "saved")
    with pytest.raises(BadInput, match=r"holds nothing for weights/model\.layers\.2\."):
        load_run(begin(num_hidden_layers=3), tmp_path / "saved")


def test_names_do_not_change_with_compilation_or_wrappers(tmp_path):
    """A prefix in the keys makes the second resume fail."""
    run = begin()
    wanted = {f"weights/{name}" for name, _ in from_config(CONFIG, "tiny").named_parameters()}
    for number in range(3):
        save_run(run, tmp_path / str(number))
        run = begin()
        load_run(run, tmp_path / str(number))
        assert {key for key in run.state() if key.startswith("weights/")} == wanted
