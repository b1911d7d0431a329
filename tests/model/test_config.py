"""Parameters and FLOPs of every family against transformers' own, on the meta device; refusals of bad input."""

import json
from itertools import pairwise

import pytest
from tests.model.keeping import CONFIGS, build

from fullstride.errors import BadInput
from fullstride.files import from_json, to_json
from fullstride.model import ModelSpec
from fullstride.model.config import FAMILIES, spec_from_config
from fullstride.model.flops import forward_flops_per_token, train_flops_per_token
from fullstride.model.presets import PRESETS, preset_config
from fullstride.model.source import config_of, is_module_source, load_spec


def shapes_of_spec(spec):
    shapes = {p.name: p.shape for part in (*spec.embedding, *spec.tail) for p in part.parameters}
    for stack in spec.stacks:
        for number in range(stack.first, stack.first + stack.count):
            for sublayer in stack.sublayers:
                shapes |= {f"{stack.path}.{number}.{p.name}": p.shape for p in sublayer.parameters}
    return shapes


def check_against(config):
    spec = spec_from_config(config, "given")
    model = build(config, device="meta")
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes_of_spec(spec) == theirs
    assert spec.num_parameters == sum(p.numel() for p in model.parameters())
    assert spec.num_blocks == len(model.get_submodule(spec.stacks[0].path))
    positions = [(stack.first, stack.count) for stack in spec.stacks]
    assert positions[0][0] == 0
    assert all(a[0] + a[1] == b[0] for a, b in pairwise(positions))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_equal_those_of_transformers(name):
    check_against(CONFIGS[name])


@pytest.mark.parametrize("name", [p for p in PRESETS if p not in ("llama3-405b", "qwen3-235b-a22b", "qwen3-32b", "llama3-70b")])
def test_presets_have_the_parameters_of_transformers(name):
    check_against(preset_config(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3-405b", "qwen3-235b-a22b", "qwen3-32b", "llama3-70b"])
def test_large_presets_have_the_parameters_of_transformers(name):
    check_against(preset_config(name))


def test_every_family_is_in_the_table_of_cases():
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama2-7b", 6_738_415_616),
        ("gpt2", 124_439_808),
        ("llama3-1b", 1_235_814_400),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_published_parameter_counts(name, count):
    assert load_spec(name).num_parameters == count


def test_tiny_is_small():
    assert 5e6 <= load_spec("tiny").num_parameters <= 20e6


def test_llama_8b_flops_in_both_conventions():
    spec = load_spec("llama3-8b")
    assert train_flops_per_token(spec, 8192, "full") == pytest.approx(57.9e9, rel=1e-3)
    assert train_flops_per_token(spec, 8192, "causal") == pytest.approx(51.5e9, rel=1e-3)
    assert train_flops_per_token(spec, 8192, "full") == 3 * forward_flops_per_token(spec, 8192, "full")


def test_a_window_counts_only_what_it_lets_through():
    def flops(window, convention):
        config = {**CONFIGS["mistral"], "sliding_window": window}
        return forward_flops_per_token(spec_from_config(config, "m"), 128, convention)

    assert flops(None, "full") == flops(32, "full")
    assert flops(None, "causal") == flops(128, "causal")
    lost = flops(None, "causal") - flops(32, "causal")
    keys = 64 - (32 - 32 * 32 / 256)
    assert lost == pytest.approx(2 * 2 * keys * 4 * (16 + 16))  # two blocks, two products, 4 heads of 16


def test_experts_count_as_often_as_a_token_visits_them():
    spec = spec_from_config(CONFIGS["mixtral"], "m")
    experts = next(s for s in spec.stacks[0].sublayers if s.kind == "experts")
    assert [m.rows_per_token for m in experts.matmuls] == [2, 2]
    assert [m.groups for m in experts.matmuls] == [4, 4]


@pytest.mark.parametrize("name", CONFIGS)
def test_specs_survive_their_file(name):
    spec = spec_from_config(CONFIGS[name], name)
    again = from_json(to_json(spec), ModelSpec, "here")
    assert again == spec
    assert again.digest == spec.digest


def test_alternating_windows_make_runs_of_equal_blocks():
    spec = spec_from_config(CONFIGS["gemma3_text"], "g")
    windows = [next(s.attention for s in stack.sublayers if s.attention).window for stack in spec.stacks]
    assert [(stack.count, w) for stack, w in zip(spec.stacks, windows, strict=True)] == [(5, 512), (1, 0), (1, 512)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "rwkv"}, ["rwkv", "llama", "module:function"]),
        ({"model_type": None}, ["model_type is None"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": 0}, ["hidden_size is 0", "1 or more"]),
        ({"hidden_size": "64"}, ["'64'", "whole number"]),
        ({"vocab_size": -5}, ["vocab_size is -5"]),
        ({"num_hidden_layers": 2.5}, ["2.5"]),
        ({"num_attention_heads": 12}, ["12", "64", "divide"]),
        ({"num_key_value_heads": 3}, ["3", "4", "divide"]),
        ({"hidden_act": "swoosh"}, ["swoosh", "silu"]),
        ({"tie_word_embeddings": "yes"}, ["'yes'", "true or false"]),
    ],
)
def test_bad_configurations_are_refused_with_value_and_rule(change, words):
    with pytest.raises(BadInput) as caught:
        spec_from_config({**CONFIGS["llama"], **change}, "mine.json")
    assert "mine.json" in str(caught.value)
    assert caught.value.fix
    assert all(word in str(caught.value) for word in words)


def test_more_experts_a_token_than_there_are():
    with pytest.raises(BadInput, match="more than the 4 experts"):
        spec_from_config({**CONFIGS["mixtral"], "num_experts_per_tok": 5}, "m")


def test_sources(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIGS["llama"]))
    assert load_spec(str(file)).num_parameters == load_spec(str(tmp_path)).num_parameters
    assert config_of("tiny") == preset_config("tiny")
    assert config_of(str(tmp_path)) == CONFIGS["llama"]
    assert config_of("net.py:make") is None
    assert is_module_source("net.py:make")
    assert is_module_source("a.b.c:make")
    assert is_module_source("/some where/net.py:Maker.make")
    assert not is_module_source("llama3-8b")
    assert not is_module_source("folder/config.json")
    with pytest.raises(BadInput, match="function that returns a module"):
        load_spec("net.py:make")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{not json", "is not JSON"),
        ("[1, 2]", "holds a list"),
        ("", "is not JSON"),
        ('{"model_type": "x"}', "model_type is 'x'"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, content, words):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(BadInput, match=words):
        load_spec(str(file))


def test_sources_that_do_not_exist(tmp_path):
    with pytest.raises(BadInput, match="presets: tiny"):
        load_spec("llama9-1b")
    with pytest.raises(BadInput, match=r"has no config\.json"):
        load_spec(str(tmp_path))


def test_a_preset_is_a_fresh_copy():
    preset_config("tiny")["hidden_size"] = 1
    assert preset_config("tiny")["hidden_size"] == 256
