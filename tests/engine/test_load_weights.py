"""Model directories whose weights are not those of the model: refused or told, never trained on in silence."""

import json
import warnings

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fullstride.engine.build import build_model, weights_directory
from fullstride.engine.export import export
from fullstride.engine.run import prepare
from fullstride.errors import BadInput
from fullstride.plan.plan import Batch, ModelRef, Plan, Recipe, Workload

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}
PLAN = Plan(
    model=ModelRef(source="set below"),
    workload=Workload(sequence_length=8, samples_per_step=2),
    recipe=Recipe(steps=2, learning_rate=1e-2),
    batch=Batch(micro_batch=2),
)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def begun(folder):
    return prepare(build_model(str(folder)), replace(PLAN, model=ModelRef(source=str(folder))), device="cpu")


def changed(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.q4.gguf", "model.safetensors.index.json"])
def test_weights_in_another_form_are_refused_and_not_drawn_anew(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(BadInput, match=rf"has {name} but no \*\.safetensors") as caught:
        begun(folder)
    assert "config.json to start from scratch" in caught.value.fix


def test_a_directory_with_a_configuration_alone_starts_from_scratch(folder):
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"")
    assert weights_directory(str(folder)) is None
    assert begun(folder) is not None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_weights_are_refused(folder, dtype):
    changed(folder, lambda found: {n: (v.float() * 50).to(dtype) if "down_proj" in n else v for n, v in found.items()})
    with pytest.raises(BadInput, match=r"mlp\.down_proj\.weight is stored as (float8|int8).*quantised") as caught:
        begun(folder)
    assert caught.value.fix


def test_more_blocks_than_the_configuration_has_are_refused(folder):
    configured(folder, num_hidden_layers=1)
    with pytest.raises(BadInput, match=r"holds model\.layers\.1\..*, a block that the model does not have"):
        begun(folder)


def test_fewer_blocks_than_the_configuration_has_are_refused(folder):
    configured(folder, num_hidden_layers=3)
    with pytest.raises(BadInput, match=r"has no tensor 'model\.layers\.2\."):
        begun(folder)


def test_tensors_that_nothing_asks_for_are_told(folder):
    more = {"model.embed_tokens.scale": torch.ones(3), "value_head.weight": torch.ones(1, 32)}
    changed(folder, lambda found: found | more)
    with pytest.warns(UserWarning, match=r"no place for 2 of its tensors \(model\.embed_tokens\.scale, value_head\.weight\)"):
        begun(folder)


def test_buffers_that_older_versions_saved_are_no_news(folder):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.rotary_emb.inv_freq": torch.ones(4)}
    changed(folder, lambda found: found | old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begun(folder)


def test_names_without_the_prefix_are_read(folder):
    changed(folder, lambda found: {name.removeprefix("model."): value for name, value in found.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = begun(folder)
    configured(folder, num_hidden_layers=1)
    with pytest.raises(BadInput, match=r"holds layers\.1\..*, a block that the model does not have"):
        begun(folder)
    assert run is not None


def test_generation_settings_come_along_as_they_stand(folder, tmp_path):
    """They hold what config.json does not: several ends of text, temperatures."""
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [3, 4], "bos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    export(begun(folder), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.generation_config.temperature, loaded.generation_config.eos_token_id) == (0.6, [3, 4])
