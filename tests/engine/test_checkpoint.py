import json
import resource
import threading

import pytest
import torch

from fullstride.engine import moments
from fullstride.engine.checkpoint import Checkpointer, load_run, save_run
from fullstride.engine.checkpoint_folder import MANIFEST, complete
from fullstride.engine.pieces import Piece
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.plan.plan import ModelRef, Plan, Workload

PLAN = Plan(model=ModelRef(source="tiny"), workload=Workload(sequence_length=8, samples_per_step=2))


class SmallRun:
    """What a checkpoint needs of a Run, with tensors that a step changes."""

    def __init__(self, width=64, names=("a", "b")):
        self.plan, self.step_index, self.loaded = PLAN, 0, None
        self.tensors = {f"{kind}/{n}": torch.zeros(width, 4) for kind in ("weights", "exp_avg") for n in names}

    def step(self):
        self.step_index += 1
        for value in self.tensors.values():
            value.add_(torch.rand(value.shape))

    def state(self):
        return self.tensors

    def pieces(self):
        shapes = {key.split("/")[1]: tuple(value.shape) for key, value in self.tensors.items()}
        return {name: Piece(name=name, shape=shape) for name, shape in shapes.items()}

    def after_load(self, step_index):
        self.step_index = self.loaded = step_index


def trained(folder, steps=1, keep=3):
    run, saver = SmallRun(), Checkpointer(folder, keep=keep)
    for _ in range(steps):
        run.step()
        saver.save(run, run.step_index * 2)
        saver.wait()
    return run, saver


def test_what_is_loaded_is_bit_equal_random_numbers_included(tmp_path):
    run, saver = trained(tmp_path)
    expected = {name: value.clone() for name, value in run.tensors.items()}
    following = torch.rand(3)
    other = SmallRun()
    manifest = Checkpointer(tmp_path).load(other, saver.latest())
    assert all(torch.equal(other.tensors[name], value) for name, value in expected.items())
    assert torch.equal(torch.rand(3), following)
    assert (other.loaded, manifest.samples, manifest.plan_hash) == (1, 2, PLAN.plan_hash)


def test_training_may_go_on_while_the_copy_is_written(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(moments, "LISTENERS", [lambda name, step: name != "written" or gate.wait(30)])
    run, saver = SmallRun(), Checkpointer(tmp_path)
    run.step()
    expected = run.tensors["weights/a"].clone()
    saver.save(run, 2)
    run.step()
    assert complete(tmp_path) == []
    assert saver.problem() is None
    gate.set()
    saver.wait()
    other = SmallRun()
    load_run(other, saver.latest())
    assert torch.equal(other.tensors["weights/a"], expected)


def test_the_newest_are_kept_and_half_folders_are_cleaned(tmp_path):
    trained(tmp_path, steps=4, keep=2)
    assert [p.name for p in complete(tmp_path)] == ["step-00000003", "step-00000004"]
    (tmp_path / "step-00000004" / MANIFEST).unlink()
    (tmp_path / ".step-00000005.partial").mkdir()
    saver = Checkpointer(tmp_path)
    assert saver.latest().name == "step-00000003"
    saver.clean()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("name", ["rank00000.safetensors", "manifest.json"])
def test_a_flipped_byte_is_bad_input_that_names_the_file(tmp_path, name):
    _, saver = trained(tmp_path)
    path = saver.latest() / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x80
    path.write_bytes(raw)
    with pytest.raises(BadInput, match=name):
        saver.load(SmallRun(), saver.latest())


def test_a_missing_or_shortened_file_is_named(tmp_path):
    _, saver = trained(tmp_path)
    path = saver.latest() / "rank00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadInput, match=r"rank00000.safetensors: has \d+ bytes"):
        saver.load(SmallRun(), saver.latest())
    path.unlink()
    with pytest.raises(BadInput, match=r"rank00000.safetensors: is missing"):
        saver.load(SmallRun(), saver.latest())


def test_another_models_checkpoint_is_refused_by_the_parameters_name(tmp_path):
    _, saver = trained(tmp_path)
    with pytest.raises(BadInput, match=r"weights/c, the model has shape \[64, 4\]"):
        saver.load(SmallRun(names=("a", "c")), saver.latest())
    with pytest.raises(BadInput, match=r"shape \[64, 4\] for weights/a, the model has shape \[32, 4\]"):
        saver.load(SmallRun(width=32), saver.latest())
    with pytest.raises(BadInput, match=r"b, which the model does not have"):
        saver.load(SmallRun(names=("a",)), saver.latest())


def test_a_checkpoint_of_the_earlier_layout_is_refused_by_its_name(tmp_path):
    _, saver = trained(tmp_path)
    (saver.latest() / ".metadata").write_bytes(b"")
    with pytest.raises(BadInput, match=r"step-00000001: was written by an earlier fullstride"):
        saver.load(SmallRun(), saver.latest())


@pytest.mark.parametrize("change", [("step", 7), ("samples", 0), ("world_size", 2)])
def test_a_manifest_that_was_edited_is_refused(tmp_path, change):
    _, saver = trained(tmp_path)
    path = saver.latest() / MANIFEST
    content = json.loads(path.read_text())
    content[change[0]] = change[1]
    path.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"manifest.json: is damaged"):
        saver.load(SmallRun(), saver.latest())


def test_a_full_disk_leaves_older_checkpoints_and_no_half_folder(tmp_path):
    run, saver = trained(tmp_path)
    run.step()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        saver.save(run, 4)
        with pytest.raises(EnvironmentFault, match=r"step-00000002: not saved") as caught:
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    saver.load(SmallRun(), saver.latest())
    saver.save(run, 4)
    saver.wait()
    assert saver.latest().name == "step-00000002"


def test_saving_by_hand_does_not_overwrite(tmp_path):
    run = SmallRun()
    save_run(run, tmp_path / "mine")
    with pytest.raises(BadInput, match="exists already"):
        save_run(run, tmp_path / "mine")
    assert load_run(SmallRun(), tmp_path / "mine").step == 0
