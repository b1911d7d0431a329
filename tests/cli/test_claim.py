"""A run directory is filled, resumed, or left alone."""

import threading
import time

import pytest
from tests.cli.values import make_plan

from fullstride.cli import claim
from fullstride.errors import BadInput, TimedOut
from fullstride.files import read_json, write_bytes, write_json
from fullstride.launch.failure import failure_of
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Layout, Recipe, Workload
from fullstride.plan.toml import read_plan, write_plan
from fullstride.rundir import Failure, RunDir

SPEC = ModelSpec(
    name="t",
    family="llama",
    hidden_size=8,
    vocab_size=9,
    max_sequence=0,
    tied_embeddings=False,
    embedding=(),
    stacks=(),
    tail=(),
)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(root=str(tmp_path / "run"))


def test_a_new_folder_is_filled_with_what_a_run_starts_from(run_dir, cluster):
    plan = make_plan()
    assert claim.look(run_dir, plan) == "new"
    claim.fill(run_dir, plan, cluster, SPEC)
    assert read_plan(run_dir.plan) == plan
    assert read_json(run_dir.model, ModelSpec) == SPEC
    assert claim.look(run_dir, plan) == "resumed"


def test_a_run_of_the_same_work_is_resumed_in_another_layout_and_with_another_recipe(run_dir, cluster):
    claim.fill(run_dir, make_plan(), cluster, SPEC)
    assert claim.look(run_dir, make_plan(layout=Layout(dp_replicate=4), recipe=Recipe(steps=99))) == "resumed"


def test_a_run_of_other_work_is_left_alone(run_dir, cluster):
    claim.fill(run_dir, make_plan(), cluster, SPEC)
    with pytest.raises(BadInput, match=r"\[workload\] differs"):
        claim.look(run_dir, make_plan(workload=Workload(sequence_length=32, samples_per_step=4)))


def test_a_folder_that_holds_no_run_is_left_alone(run_dir):
    write_bytes(run_dir.path / "thesis.tex", b"mine")
    with pytest.raises(BadInput, match="holds no run"):
        claim.look(run_dir, make_plan())


def test_a_finished_run_goes_on_only_for_more_steps(run_dir, cluster):
    claim.fill(run_dir, make_plan(), cluster, SPEC)
    write_bytes(run_dir.done, b"")
    assert claim.look(run_dir, make_plan()) == "finished"
    longer = make_plan(recipe=Recipe(steps=20))
    assert claim.look(run_dir, longer) == "resumed"
    claim.fill(run_dir, longer, cluster, SPEC)
    assert not run_dir.done.exists()


def test_other_ranks_wait_for_the_same_plan(run_dir):
    plan = make_plan()
    write_plan(make_plan(recipe=Recipe(steps=1)), run_dir.plan)
    late = threading.Thread(target=lambda: (time.sleep(0.2), write_plan(plan, run_dir.plan, overwrite=True)))
    late.start()
    claim.wait_until_filled(run_dir, plan, seconds=10)
    late.join()
    with pytest.raises(TimedOut, match="rank 0 to write"):
        claim.wait_until_filled(run_dir, make_plan(recipe=Recipe(steps=2)), seconds=0.1)


@pytest.mark.parametrize(("kind", "code"), claim.EXIT_CODES.items())
def test_a_failure_becomes_an_error_with_its_exit_code(run_dir, kind, code):
    write_json(run_dir.failed, Failure(failure=kind, message="why", rank=1, fix="do this"))
    error = claim.error_of(failure_of(run_dir, 1), run_dir)
    assert error.exit_code == code
    assert str(error) == f"{kind.replace('_', ' ')} on rank 1: why; do this"


def test_a_death_without_words_is_a_crash(run_dir):
    error = claim.error_of(failure_of(run_dir, 3), run_dir)
    assert "3" in error.message and error.exit_code == 6 and "logs" in error.fix


def test_default_folders_are_found_again_and_safe_for_a_shell():
    plan = make_plan()
    assert claim.default_run_dir("train", SPEC, plan) == claim.default_run_dir("train", SPEC, plan)
    assert claim.plain_name("a b/c;d.py:f") == "c-d"
