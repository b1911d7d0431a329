"""Parts of a model that the user names: found where they are meant, refused with the names that were looked at."""

import pytest
import torch
from torch import nn

from fullstride.engine.anatomy import find, units
from fullstride.engine.compiling import compile_available
from fullstride.engine.inspect import main, spec_of_module
from fullstride.engine.parallel.tensor_look import look
from fullstride.engine.parity import run_cases
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.parity_models import LooseModel, PlainModel
from fullstride.errors import BadInput, RuleBroken
from fullstride.files import read_json, write_json
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Loss, ModelRef, Recompute

BLOCKS = ("b0", "b1", "b2")
ALL = {**LooseModel.named, "blocks": BLOCKS}


def named(**parts):
    return ModelRef(source="net.py:make", **parts)


class Chain(nn.Module):
    """All in one Sequential."""

    def __init__(self):
        super().__init__()
        like = PlainModel(modular=True)
        self.net = nn.Sequential(like.table, *like.stack, like.last_norm, like.to_vocab)

    def forward(self, tokens):
        return self.net(tokens)


class Wide(PlainModel):
    """A head of two layers that holds more than the blocks do, in a list as they are."""

    def __init__(self, depth=2):
        super().__init__(modular=True, depth=depth)
        self.last = nn.Sequential(nn.Linear(32, 2000), nn.Linear(2000, 61))
        self.to_vocab = nn.Identity()

    def forward(self, tokens):
        return self.last(super().forward(tokens))


def test_parts_are_those_that_are_named():
    anatomy = find(LooseModel(), named(**ALL))
    assert (anatomy.embedding, anatomy.blocks, anatomy.final_norm, anatomy.head) == ("words", BLOCKS, "gauge", "out")
    assert (anatomy.block_list, anatomy.stack, anatomy.tied) == ("", "b0 to b2", False)
    assert find(LooseModel(tied=True), named(**ALL)).tied
    assert anatomy.holds("b1.attention.to_q")
    assert not anatomy.holds("b10")
    assert [unit.name for unit in units(LooseModel(), anatomy)] == ["embedding", *BLOCKS, "head", "root"]


def test_the_table_of_the_words_is_the_one_that_a_head_is_as_wide_as():
    model = LooseModel()
    assert find(model, named(blocks=BLOCKS)).embedding == "words"
    assert find(model, named(blocks=BLOCKS, embedding="places")).embedding == "places"
    model.out = nn.Linear(32, 50)
    assert find(model, named(blocks=BLOCKS)).embedding == "places"


def test_a_list_is_named_by_its_path_or_by_all_its_blocks():
    model, listed = PlainModel(modular=True), tuple(f"stack.{number}" for number in range(3))
    assert find(model, named(blocks="stack")) == find(model, named(blocks=listed)) == find(model)
    assert find(model, named(blocks=listed[1:])).inside == listed[1:]


def test_parts_inside_one_list_are_named():
    parts = {"embedding": "net.0", "blocks": ("net.1", "net.2", "net.3"), "final_norm": "net.4", "head": "net.5"}
    anatomy = find(Chain(), named(**parts))
    assert (anatomy.block_list, anatomy.blocks, anatomy.head) == ("", parts["blocks"], "net.5")
    with pytest.raises(BadInput, match=r"no nn\.Embedding outside the blocks"):
        find(Chain())


FAULTY = {
    "embedding": (
        {"embedding": "wrods"},
        r"model\.embedding names 'wrods' in LooseModel, which is not there .*: out, places, words",
    ),
    "inside": (
        {"head": "b0.feed.2"},
        r"model\.head names 'b0\.feed\.2' in LooseModel, which lies in the blocks .*looked at each",
    ),
    "kind": (
        {"head": "gauge"},
        r"model\.head names 'gauge' in LooseModel, a _Scale .*weight of two dims outside .*: out, places",
    ),
    "norm": (
        {"final_norm": "norm"},
        r"model\.final_norm names 'norm' .*is not there .*with parameters .*: out, gauge, places, words",
    ),
    "block": (
        {"blocks": ("b0", "b9")},
        r"model\.blocks names 'b9' .*not there .*in the model: out, gauge, b2, b1, b0, places, words",
    ),
    "inner_block": (
        {"blocks": ("b0.feed.0", "b0.feed.1")},
        r"'b0\.feed\.1' .*no parameters .*in b0\.feed: b0\.feed\.0, b0\.feed\.2",
    ),
    "list": (
        {"blocks": "layers"},
        r"model\.blocks names 'layers' in LooseModel, which is not there .*each list: b2\.feed, b1\.feed",
    ),
    "no_list": (
        {"blocks": "b0"},
        r"model\.blocks names 'b0' .*no ModuleList, .*what it holds: b0\.before, b0\.between, b0\.att",
    ),
    "twice": ({"blocks": ("b0", "b0")}, r"names 'b0, b0' .*of which two are one module"),
}


@pytest.mark.parametrize("what", sorted(FAULTY))
def test_a_name_that_nothing_has_is_refused_with_those_that_were_looked_at(what):
    parts, words = FAULTY[what]
    with pytest.raises(BadInput, match=words) as caught:
        find(LooseModel(), named(**{**ALL, **parts}))
    assert "name" in caught.value.fix


def test_blocks_that_are_attributes_are_refused_unless_they_are_named():
    with pytest.raises(
        BadInput, match=r"LooseModel: no ModuleList, .*out .Linear., gauge ._Scale., b2 ._ModularBlock."
    ) as caught:
        find(LooseModel())
    assert 'model.blocks = ["b0", "b1"]' in caught.value.fix


def test_lists_inside_blocks_that_are_attributes_are_no_list_of_blocks():
    model = LooseModel()
    for number in range(3):
        getattr(model, f"b{number}").feed = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    with pytest.raises(BadInput, match="these modules are alike, and in no list: b2, b1, b0"):
        find(model)
    assert find(model, named(**ALL)).blocks == BLOCKS


def test_lists_in_modules_alike_beside_the_blocks_are_none():
    model = PlainModel(modular=True)
    for side in ("left", "right"):
        model.add_module(side, nn.Module())
        model.get_submodule(side).net = nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 1))
    assert find(model).block_list == "stack"


class Backwards(PlainModel):
    """Blocks run from the last to the first."""

    def forward(self, tokens):
        x = self.table(tokens)
        for block in reversed(self.stack):
            x = block(x)
        return self.to_vocab(self.last_norm(x))


@pytest.mark.parametrize("sequence", [True, False])
def test_blocks_that_run_in_another_order_are_refused_unless_they_are_named_so(sequence):
    model, plan = Backwards(modular=True), make_case("modular", tp=2, sequence_parallel=sequence).plan
    words = r"Backwards runs stack\.2, stack\.1, stack\.0 in this order, and its blocks are stack\.0, stack\.1, stack\.2"
    with pytest.raises(BadInput, match=words) as caught:
        look(model, find(model), plan)
    assert "name them so in model.blocks" in caught.value.fix
    assert look(model, find(model, named(blocks=("stack.2", "stack.1", "stack.0"))), plan)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_head_of_several_layers_is_no_list_of_blocks(depth):
    anatomy = find(Wide(depth))
    assert (anatomy.block_list, anatomy.head, anatomy.final_norm) == ("stack", "last.1", "last_norm")


def test_a_head_is_refused_with_what_would_name_it():
    model = PlainModel(modular=True)
    model.to_vocab = nn.Identity()
    with pytest.raises(BadInput, match=r"has no nn\.Linear that makes logits") as caught:
        look(model, find(model), make_case("modular", tp=2).plan)
    assert "name it in model.head" in caught.value.fix


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_alibi_is_refused_by_name(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {"falcon": {"alibi": True, "new_decoder_architecture": False}, "bloom": {}}[family]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **own))
    with pytest.raises(RuleBroken, match=r"layout\.tp = 2, \w+ForCausalLM has alibi") as caught:
        look(model, find(model), make_case("modular", tp=2).plan)
    assert "layout.tp = 1" in caught.value.fix


def test_a_spec_is_made_of_named_parts(tmp_path):
    spec = spec_of_module(LooseModel(), "loose", 32, named(**ALL))
    like = spec_of_module(PlainModel(modular=True), "plain", 32)
    assert (spec.vocab_size, spec.hidden_size, spec.max_sequence) == (61, 32, 68)
    assert [(stack.path, stack.count) for stack in spec.stacks] == [("", 3)]
    assert spec.stacks[0].sublayers == like.stacks[0].sublayers
    assert sum(p.count for s in spec.tail for p in s.parameters) == 61 * 32 + 61 + 32
    assert sum(p.count for s in spec.embedding for p in s.parameters) == (61 + 68) * 32
    (tmp_path / "net.py").write_text("from fullstride.engine.parity_models import LooseModel as make\n")
    source, told, out = f"{tmp_path}/net.py:make", tmp_path / "named.json", tmp_path / "spec.json"
    assert main([source, str(out)]) == 3
    write_json(told, ModelRef(source=source, **ALL))
    assert main([source, str(out), str(told)]) == 0
    assert read_json(out, ModelSpec).stacks == spec.stacks


def cases(ranks):
    """tp 2, ZeRO 3 in both ways, and pipelines; on four ranks mixed."""
    chunked, full = Loss(kind="chunked", chunk_tokens=5), Recompute(mode="full")
    compiles = not compile_available(torch.device("cpu"))
    if ranks == 4:
        return (
            make_case("modular", loose=True, tp=2, ranks=2, stage=3, carrier="flat", recompute=full),
            make_case("modular", loose=True, tp=2, pp=2, accumulation=2, loss=chunked),
        )
    return (
        make_case("modular", loose=True, tp=2, loss=chunked),
        make_case("modular", loose=True, tp=2, tied=True, sequence_parallel=False),
        make_case("modular", loose=True, ranks=2, stage=3, recompute=full, loss=chunked),
        make_case("modular", loose=True, ranks=2, stage=3, carrier="flat", tied=True, reshard={"b1": False}),
        make_case("modular", loose=True, ranks=2, stage=0, recompute=full, compiled=compiles, dtype="fp32"),
        make_case("modular", loose=True, pp=2, accumulation=2),
        make_case("modular", loose=True, pp=2, accumulation=2, schedule="zb-v", chunks=2, layers=4, tied=True),
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_of_named_parts_equals_a_plain_loop(ranks):
    assert isinstance(model_of(cases(ranks)[0]), LooseModel)
    outcomes = run_cases(cases(ranks), ranks)
    assert all(outcome.errors == () for outcome in outcomes), [(o.name, o.errors) for o in outcomes if o.errors]
