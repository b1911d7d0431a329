import tomllib

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from tests.plan.plan_values import plan_of, random_plans

from fullstride.errors import BadInput
from fullstride.plan.plan import Layout, Plan, Shard
from fullstride.plan.rules import size_violations
from fullstride.plan.toml import FIELD_COMMENTS, PART_COMMENTS, parse_plan, plan_text, read_plan, write_plan


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(random_plans())
def test_a_plan_comes_back_equal_from_its_text(plan):
    decoded = msgspec.convert(tomllib.loads(plan_text(plan)), Plan)
    assert decoded == plan
    if not size_violations(plan):
        assert parse_plan(plan_text(plan), "p") == plan


def test_a_plan_comes_back_equal_from_its_file(tmp_path):
    plan = plan_of(shard=Shard(carrier="fsdp2", stage=3, reshard={"model.layers.0": False}), layout=Layout(dp_shard=2))
    write_plan(plan, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == plan


def test_each_part_has_a_comment_above_it():
    lines = plan_text(plan_of()).splitlines()
    assert set(PART_COMMENTS) == set(Plan.__struct_fields__) - {"format"}
    for name, comment in PART_COMMENTS.items():
        assert lines[lines.index(f"[{name}]") - 1] == f"# {comment}"
    for name, field in FIELD_COMMENTS:
        assert any(line.startswith(f"{field} = ") and FIELD_COMMENTS[name, field] in line for line in lines)


def test_a_file_is_never_written_over_unless_asked(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("mine")
    with pytest.raises(BadInput, match="never written over"):
        write_plan(plan_of(), path)
    assert path.read_text() == "mine"
    write_plan(plan_of(), path, overwrite=True)
    assert read_plan(path) == plan_of()


def test_only_model_and_workload_are_needed():
    text = '[model]\nsource = "tiny"\n[workload]\nsequence_length = 64\nsamples_per_step = 1\n'
    assert parse_plan(text, "p").layout == Layout()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("micro_batch = 8", "micro_bach = 8"), ["micro_bach", "batch"]),
        (lambda text: text.replace("micro_batch = 8", 'micro_batch = "8"'), ["int", "batch.micro_batch"]),
        (lambda text: text.replace("micro_batch = 8", "micro_batch = 0"), ["batch.micro_batch = 0", "at least one sample"]),
        (lambda text: text.replace("sequence_length = 64", "sequence_length = -5"), ["sequence_length = -5"]),
        (lambda text: text.replace('mode = "none"', 'mode = "some"'), ["some", "recompute.mode"]),
        (lambda text: text[: text.index("[batch]") + 5], ["is not TOML"]),
        (lambda text: "no plan at all", ["is not TOML"]),
        (lambda text: text.replace('kind = "plan"', 'kind = "cluster"'), ["kind is 'cluster'"]),
        (lambda text: text.replace("format = 1", "format = 9"), ["format is 9"]),
        (lambda text: text[: text.index("[workload]")], ["workload"]),
        (lambda text: "", ["kind"]),
    ],
)
def test_damage_is_refused_with_file_key_and_rule(change, words, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(change(plan_text(plan_of())))
    with pytest.raises(BadInput) as caught:
        read_plan(path)
    for word in (str(path), *words):
        assert word in caught.value.message
    assert caught.value.fix


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\xfe\x00plan")
    with pytest.raises(BadInput, match="is not UTF-8"):
        read_plan(path)
    with pytest.raises(BadInput, match="no such file"):
        read_plan(tmp_path / "missing.toml")
