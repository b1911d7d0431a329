"""Names of a model's parts in a plan: hashes, files, rules and the price of blocks that are named one by one."""

import pytest
from msgspec.structs import replace
from tests.plan.plan_values import llama, plan_of

from fullstride.cli.choose import override
from fullstride.cli.command import model_of
from fullstride.errors import BadInput, UsageError
from fullstride.launch.inspector import spec_of
from fullstride.plan.facts import num_resharded, parts, resharded
from fullstride.plan.formats.detect import write_as
from fullstride.plan.plan import Layout, ModelRef, Shard
from fullstride.plan.rules import check
from fullstride.plan.toml import parse_plan, plan_text

SPEC = llama()
OWN = replace(SPEC, family="module")
NAMED = {"embedding": "words", "blocks": ("b0", "b1"), "final_norm": "gauge", "head": "out"}


def named(**names):
    return plan_of(model=ModelRef(source="net.py:make", **names))


def broken(plan, spec=OWN):
    return [v.message for v in check(plan, spec) if v.code == "model.names"]


def test_names_are_how_and_not_what():
    plain, told = named(), named(**NAMED)
    assert plain.work_hash == told.work_hash
    assert plain.plan_hash != told.plan_hash != named(**{**NAMED, "head": "up"}).plan_hash
    assert plain.model.named == {} and told.model.named == NAMED


@pytest.mark.parametrize("names", [{}, NAMED, {"blocks": "trunk.layers"}])
def test_a_file_says_names_where_there_are_any(names):
    text = plan_text(named(**names))
    assert parse_plan(text, "p.toml") == named(**names)
    for entry in NAMED:
        assert (f"\n{entry} = " in text.partition("[workload]")[0]) == (entry in names)


@pytest.mark.parametrize("entry", ["blocks = [1]", "blocks = 3", 'head = ["a"]', 'tail = "out"'])
def test_names_of_another_type_are_refused(entry):
    text = plan_text(named()).replace('source = "net.py:make"', f'source = "net.py:make"\n{entry}')
    with pytest.raises(BadInput, match=r"p\.toml: .*model"):
        parse_plan(text, "p.toml")


RULE = {
    "dots": ({"head": "net..out"}, "model.head names 'net..out': "),
    "empty": ({"blocks": ("b0", "")}, "model.blocks names '': "),
    "twice": ({"blocks": ("b0", "b1", "b0")}, "model.blocks names 'b0' twice: "),
    "two_parts": ({"embedding": "words", "head": "words"}, "model.head names 'words', model.embedding 'words': "),
    "inside": ({"blocks": "net", "final_norm": "net.norm"}, "model.final_norm names 'net.norm', model.blocks 'net': "),
    "in_a_block": ({"blocks": ("b0", "b0.inner")}, "model.blocks names 'b0.inner', model.blocks 'b0': "),
}


@pytest.mark.parametrize("what", sorted(RULE))
def test_names_that_cannot_be(what):
    names, words = RULE[what]
    (message,) = broken(named(**names))
    assert message.startswith(words)


def test_families_that_are_known_need_no_names():
    plan = named(head="lm_head")
    assert broken(plan) == broken(plan, None) == []
    (message,) = broken(plan, SPEC)
    assert f"model.head = 'lm_head' in {SPEC.name}, of the family {SPEC.family}" in message


def test_blocks_that_are_named_have_reshard_rules():
    shard = Shard(carrier="fsdp2", stage=3, reshard={"b1": False})
    plan = replace(named(**NAMED), shard=shard, layout=Layout(dp_shard=2))
    spec = replace(OWN, stacks=(replace(SPEC.stacks[0], path="", count=2),))
    assert not [v for v in check(plan, spec) if v.code == "shard.reshard_names"]
    block = next(part for part in parts(spec) if part.group == "blocks")
    assert [resharded(plan, block, number) for number in range(2)] == [True, False]
    assert num_resharded(plan, block) == 1
    other = replace(plan, shard=replace(shard, reshard={"b2": False}))
    assert [v.code for v in check(other, spec) if v.code == "shard.reshard_names"] == ["shard.reshard_names"]


def test_other_frameworks_files_say_that_names_are_not_carried():
    keys = {one.key for one in write_as(named(**NAMED), "accelerate", OWN).not_carried}
    assert {f"model.{entry}" for entry in NAMED} <= keys


def test_the_command_line_names_parts():
    told = ["embedding=words", "blocks=b0,b1", "final_norm=gauge", "head=out"]
    assert model_of("net.py:make", told) == ModelRef(source="net.py:make", **NAMED)
    assert model_of("net.py:make", ["blocks=trunk.h"]).blocks == "trunk.h"
    assert model_of("net.py:make", ["blocks=b0,"]).blocks == ("b0",)
    for wrong in ("head", "head=", "tail=x", "=x"):
        with pytest.raises(UsageError, match=f"--part {wrong!r}: not one of embedding, blocks, final_norm, head"):
            model_of("net.py:make", [wrong])
    with pytest.raises(UsageError, match="once each"):
        model_of("net.py:make", ["head=a", "head=b"])
    assert override(named(), ['model.blocks=["b0", "b1"]', "model.head=out"]).model.blocks == ("b0", "b1")


def test_names_reach_the_reader_of_modules(tmp_path):
    (tmp_path / "net.py").write_text("from fullstride.engine.parity_models import LooseModel as make\n")
    source = f"{tmp_path}/net.py:make"
    with pytest.raises(BadInput, match=r"no ModuleList, .* among out \(Linear\)"):
        spec_of(source)
    with pytest.raises(BadInput, match=r"model\.head names 'up' in LooseModel, .*is not there \(looked at .*: out, b2\.att"):
        spec_of(ModelRef(source=source, **{**NAMED, "head": "up"}))
    spec = spec_of(ModelRef(source=source, **{**NAMED, "blocks": ("b0", "b1", "b2")}))
    assert (spec.vocab_size, sum(stack.count for stack in spec.stacks)) == (61, 3)
