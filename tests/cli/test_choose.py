"""From the command line to values: machine, model, plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.values import make_plan

import fullstride
from fullstride.cli import machine
from fullstride.cli.choose import checked, choose_model, override, plan_here
from fullstride.cli.command import refuse_existing
from fullstride.cli.output import Output
from fullstride.cluster.catalogue import assumed_cluster
from fullstride.errors import BadInput, RuleBroken, UsageError
from fullstride.files import write_json
from fullstride.plan.plan import MadeFor, ModelRef


@pytest.fixture
def cpu_host(monkeypatch, cluster):
    monkeypatch.setattr(machine, "probe_cluster", lambda num_ranks=None: cluster)
    monkeypatch.setattr(machine, "probe_gpus", lambda: None)
    return cluster


@pytest.fixture
def gpu_host(monkeypatch):
    here = assumed_cluster("h200-sxm", num_devices=4, per_node=4)
    monkeypatch.setattr(machine, "probe_cluster", lambda num_ranks=None: here)
    monkeypatch.setattr(machine, "probe_gpus", lambda: here)
    return here


def test_a_file_is_the_cluster_and_excludes_a_description(tmp_path, cluster):
    path = tmp_path / "c.json"
    write_json(path, cluster)
    assert machine.choose_cluster(str(path)) == cluster
    with pytest.raises(UsageError, match="--cluster"):
        machine.choose_cluster(str(path), kind="h100-sxm")


def test_without_a_gpu_a_cluster_is_assumed_and_says_so(cpu_host):
    chosen = machine.choose_cluster()
    assert chosen.assumed and chosen.device.kind == "h100-sxm" and chosen.num_devices == 8
    assert machine.cluster_words(chosen).startswith("assumed cluster, nobody probed it: 8 x")


def test_this_machines_gpus_come_first(gpu_host):
    assert machine.choose_cluster() == gpu_host
    assert machine.choose_cluster(num_devices=2) == gpu_host
    more = machine.choose_cluster(num_devices=16)
    assert more.assumed and more.num_devices == 16 and more.device.kind == "h200-sxm"


def test_a_kind_is_taken_from_the_catalogue(cpu_host):
    chosen = machine.choose_cluster(kind="h200-sxm", num_devices=32)
    assert (chosen.num_devices, chosen.groups[0].count, chosen.groups[0].num_devices) == (32, 4, 8)
    assert machine.choose_cluster(kind="h200-sxm", num_devices=2).num_devices == 2
    assert machine.choose_cluster(kind="cpu", num_devices=2) == cpu_host
    with pytest.raises(BadInput, match=r"--gpu abacus: not in the catalogue; use one of .*h100-sxm.* or cpu"):
        machine.choose_cluster(kind="abacus")
    with pytest.raises(BadInput, match="12 GPUs cannot stand in nodes of 8"):
        machine.choose_cluster(kind="h200-sxm", num_devices=12)


def test_a_plan_is_priced_where_it_was_made_for(cpu_host, tmp_path):
    made_here = make_plan(made_for=MadeFor(device="cpu"))
    assert machine.cluster_for(made_here) == cpu_host
    elsewhere = machine.cluster_for(make_plan(made_for=MadeFor(device="h200-sxm")))
    assert elsewhere.assumed and elsewhere.device.kind == "h200-sxm" and elsewhere.num_devices == 2
    unknown = machine.cluster_for(make_plan())
    assert unknown.assumed and unknown.device.kind == "h100-sxm"
    write_json(tmp_path / "c.json", cpu_host)
    assert machine.cluster_for(make_plan(), str(tmp_path / "c.json")) == cpu_host


def test_a_plan_without_a_mark_is_priced_on_this_machines_gpus(gpu_host):
    assert machine.cluster_for(make_plan()) == gpu_host


def test_settings_replace_entries():
    plan = override(make_plan(), ["recipe.learning_rate=1e-4", "recipe.steps=7", "workload.data=corpus/x.txt"])
    assert (plan.recipe.learning_rate, plan.recipe.steps, plan.workload.data) == (1e-4, 7, "corpus/x.txt")
    assert override(make_plan(), ["comm.env.NCCL_DEBUG='INFO'"]).comm.env == {"NCCL_DEBUG": "INFO"}
    assert override(make_plan(), ["data.pin=true"]).data.pin is True
    assert override(make_plan(), []) == make_plan()


@given(st.floats(1e-9, 1e3), st.integers(1, 10**6))
def test_numbers_survive_a_setting(rate, steps):
    plan = override(make_plan(), [f"recipe.learning_rate={rate!r}", f"recipe.steps={steps}"])
    assert plan.recipe.learning_rate == rate and plan.recipe.steps == steps


@pytest.mark.parametrize(
    ("setting", "kind", "says"),
    [
        ("recipe.steps", UsageError, "not of the form"),
        ("steps=3", UsageError, "not of the form"),
        ("recipe.=3", UsageError, "not of the form"),
        ("nothing.steps=3", BadInput, "no table 'nothing'"),
        ("recipe.stepps=3", BadInput, "stepps"),
        ("recipe.steps=many", BadInput, "recipe.steps"),
        ("recipe.steps=1.5", BadInput, "recipe.steps"),
        ("kind.x=1", BadInput, "no table 'kind'"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting, kind, says):
    with pytest.raises(kind, match=says):
        override(make_plan(), [setting])


def test_nothing_is_overwritten(tmp_path):
    refuse_existing(tmp_path / "new")
    with pytest.raises(BadInput, match="is there already"):
        refuse_existing(tmp_path)


def test_a_model_comes_with_the_digest_of_its_spec():
    reference, spec = choose_model("tiny")
    assert reference == ModelRef(source="tiny", digest=spec.digest)
    with pytest.raises(BadInput):
        choose_model("no-such-model")


def test_a_plan_for_another_network_is_refused(cluster):
    _, spec = choose_model("tiny")
    checked(make_plan(), spec, cluster, Output())
    with pytest.raises(BadInput, match="another network"):
        checked(make_plan(model=ModelRef(source="tiny", digest="0" * 16)), spec, cluster, Output())
    with pytest.raises(RuleBroken):
        checked(make_plan(), spec, assumed_cluster(num_devices=1, per_node=1), Output())


def test_a_model_is_planned_for_this_machine(capsys):
    plan = plan_here("tiny", 2, Output())
    assert plan.layout.world_size == 2
    assert "planned tiny for 2 x" in capsys.readouterr().err


def test_planning_is_a_function_too(cluster):
    plan = fullstride.make_plan("tiny", cluster, sequence_length=64, samples_per_step=4, data="x.txt")
    assert plan.workload.data == "x.txt" and plan.workload.sequence_length == 64
    assert plan.batch.micro_batch * plan.batch.accumulation * plan.layout.data_parallel == 4


def test_the_public_names_are_all_there_and_no_others():
    assert dir(fullstride) == sorted(fullstride.__all__)
    with pytest.raises(AttributeError, match="no attribute 'diagnose'"):
        _ = fullstride.diagnose
