"""Refusals of the engine that no other test meets: each is read for its value, its rule and what to do."""

import json
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fullstride.engine.anatomy import find, logits_of, units
from fullstride.engine.anatomy_block import regions
from fullstride.engine.build import build_model
from fullstride.engine.loss import chunked_head
from fullstride.engine.mesh import Mesh, join
from fullstride.engine.parallel.collectives import Ranks
from fullstride.engine.parallel.flat import carry_flat
from fullstride.engine.parallel.tensor import _cut_vocabulary
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.parity_models import PlainModel
from fullstride.engine.pieces import Piece
from fullstride.engine.pipeline.build import Stages
from fullstride.engine.run import prepare
from fullstride.errors import BadInput, EnvironmentFault, RuleBroken
from fullstride.plan.plan import Layout, ModelRef, Precision

CPU = torch.device("cpu")


def cut(change, tp=2, **named):
    """Look at the regions of a model whose first block was changed."""
    model = PlainModel(modular=True)
    change(model.stack[0])
    return lambda: [regions(model, block, 32, tp, named) for block in find(model).blocks]


def without_products(block):
    block.attention, block.feed = nn.Identity(), nn.Identity()


def with_a_bilinear(block):
    block.extra = nn.Bilinear(4, 4, 4)
    block.extra.weight = nn.Parameter(torch.zeros(4, 4))


def with_a_convolution(block):
    block.extra = nn.Conv1d(32, 32, 3)


def with_a_layer_norm_over_heads(block):
    block.attention.norm = nn.LayerNorm(32)


def with_two_rows(block):
    block.feed = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def embedding_apart_from_head():
    case = make_case("llama", tied=True)
    roles = {"embedding": "fp32", "block": "bf16", "head": "bf16", "loss": "fp32", "gradient": "fp32", "reduction": "fp32"}
    plan = replace(case.plan, precision=Precision(cast="weights", **roles, master="fp32", optimizer_state="fp32"))
    prepare(model_of(case), plan, device="cpu")


def few_words():
    model = PlainModel(vocab=3)
    _cut_vocabulary(model, find(model), {}, Ranks(4, 0, ""))


def headless():
    model = PlainModel()
    anatomy = find(model)
    model.to_vocab = nn.Identity()
    chunked_head(model, anatomy, 7, torch.float32, compiled=False)


REFUSED = {
    "no_products": (cut(without_products), BadInput, r"no products in stack\.0 \(looked at before \(LayerNorm\), "),
    "weights_of_no_use": (
        cut(with_a_bilinear),
        BadInput,
        r"stack\.0\.extra \(Bilinear\) has weights and is neither product nor",
    ),
    "convolution": (
        cut(with_a_convolution),
        BadInput,
        r"three dims that are no experts in a known form \(saw weight \[32, 32, 3\]",
    ),
    "norm_over_heads": (
        cut(with_a_layer_norm_over_heads),
        RuleBroken,
        r"attention\.norm \(LayerNorm\) is a norm over all heads",
    ),
    "two_rows": (
        cut(with_two_rows, **{"feed.0": "row", "feed.1": "row"}),
        BadInput,
        r"products of stack\.0\.feed do not fit together \(looked at 0 \(32, 32\) row, 1 \(32, 32\) row",
    ),
    "no_logits": (lambda: logits_of({"loss": 1.0}), BadInput, "the model returned a dict without logits"),
    "tied_precision": (embedding_apart_from_head, RuleBroken, "embedding is fp32, head bf16, but this model ties them"),
    "few_words": (few_words, RuleBroken, r"layout\.tp = 4, table has 3 rows: each tensor-parallel rank holds a row"),
    "chunked_without_head": (headless, BadInput, r"loss\.kind is chunked, but the head is Identity, not nn\.Linear"),
    "no_such_model": (lambda: build_model("nowhere"), BadInput, "'nowhere' is no preset and no file"),
    "other_ranks": (lambda: join(make_case("llama", ranks=4).plan, CPU), BadInput, "plan is for 4 ranks, but 1 are running"),
    "no_group": (lambda: Mesh(Layout(tp=2), CPU), EnvironmentFault, "no process group, and the plan spreads over ranks"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_a_refusal_says_value_rule_and_fix(what):
    make, kind, words = REFUSED[what]
    with pytest.raises(kind, match=words) as caught:
        make()
    assert caught.value.fix and "\n" not in str(caught.value)


# Model directories.


@pytest.fixture
def folder(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(tmp_path)
    return tmp_path


def indexed(folder, index):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)


def narrow_head(folder):
    path = folder / "model.safetensors"
    found = load_file(path)
    save_file(found | {"lm_head.weight": found["lm_head.weight"][:60].contiguous()}, path)


DIRECTORIES = {
    "no_index": (lambda f: indexed(f, "{"), r"index\.json: is not an index of safetensors"),
    "index_of_something_else": (lambda f: indexed(f, json.dumps({"weight_map": [1]})), "is not an index of safetensors"),
    "index_of_what_is_not_there": (
        lambda f: indexed(f, json.dumps({"weight_map": {"lm_head.bias": "part.safetensors"}})),
        r"part\.safetensors: lacks lm_head\.bias, which the index places there",
    ),
    "another_shape": (narrow_head, r"lm_head\.weight has shape \(60, 32\), the model needs \(61, 32\)"),
    "a_file_that_is_cut": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
        r"model\.safetensors: cannot be read",
    ),
}


@pytest.mark.parametrize("what", sorted(DIRECTORIES))
def test_a_directory_that_does_not_hold_its_model_is_refused(what, folder):
    change, words = DIRECTORIES[what]
    change(folder)
    plan = replace(make_case("llama", dtype="fp32").plan, model=ModelRef(source=str(folder)))
    with pytest.raises(BadInput, match=words) as caught:
        prepare(build_model(str(folder)), plan, device="cpu")
    assert caught.value.fix and "\n" not in str(caught.value)


def test_blocks_that_share_weights_are_no_units_of_zero_3():
    model = PlainModel(modular=True)
    model.stack[2].feed = model.stack[0].feed
    plan = make_case("plain", ranks=2, stage=3, carrier="flat").plan
    mesh = SimpleNamespace(coordinate=lambda axis: 0)
    with pytest.raises(RuleBroken, match=r"stage 3, but stack.2 and stack.0 share weights") as caught:
        carry_flat(model, units(model, find(model)), plan, mesh, lambda unit: None)
    assert "stage 2" in caught.value.fix


def test_a_tied_weight_that_two_stages_shard_differently(monkeypatch):
    def gathered(found, mine, group):
        found[:] = [mine, (None, 0, 7)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    piece = Piece(name="table.weight", shape=(61, 32))
    weights = SimpleNamespace(names=("table.weight",), pieces=(piece,))
    ends = SimpleNamespace(tied=object(), cut=SimpleNamespace(tied="table.weight"))
    with pytest.raises(
        RuleBroken, match=r"table.weight is tied over two pipeline stages, and they shard it differently"
    ) as caught:
        Stages.require_same_part(ends, weights)
    assert "zb-v" in caught.value.fix
