"""Copies of a GPU's state: through pinned memory that every save uses again, right although training goes on at once."""

import pytest
import torch

from fullstride.engine.checkpoint import Checkpointer
from fullstride.engine.pieces import Cut, Piece, parts
from fullstride.plan.plan import ModelRef, Plan, Workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ROWS = 1500


class OnGpu:
    """A run whose weights are a flat part, a cut part that is copied in strides, and a whole."""

    def __init__(self):
        self.plan = Plan(model=ModelRef(source="tiny"), workload=Workload(sequence_length=8, samples_per_step=2))
        self.step_index = 0
        whole = [
            Piece(name="columns", shape=(ROWS, 64), cut=Cut(dim=1, ranges=((0, 16), (32, 48), (16, 32), (48, 64)))),
            Piece(name="whole", shape=(40_000, 1024)),
        ]
        self._pieces = {piece.name: piece for piece in whole}
        self.values = {f"weights/{p.name}": torch.zeros(p.count, device="cuda") for p in whole}

    def step(self):
        self.step_index += 1
        for value in self.values.values():
            value.copy_(torch.rand(value.shape, device="cuda"))

    def state(self):
        return self.values

    def pieces(self):
        return self._pieces

    def after_load(self, step_index):
        self.step_index = step_index


def test_what_is_saved_is_the_state_when_save_returned(tmp_path):
    run, saver, expected = OnGpu(), Checkpointer(tmp_path, keep=4), {}
    assert len(list(parts(run.pieces()["columns"]))) == 4  # copied in strides
    assert saver.reserve(run) == ""
    chunks = saver._staging._chunks
    assert all(chunk.is_pinned() for chunk in chunks)
    places = [chunk.data_ptr() for chunk in chunks]
    for _ in range(3):
        run.step()
        expected[run.step_index] = {key: value.clone() for key, value in run.values.items()}
        saver.save(run, run.step_index)
        for value in run.values.values():
            value.fill_(torch.nan)  # training goes on at once
    saver.wait()
    assert [chunk.data_ptr() for chunk in saver._staging._chunks] == places
    for path in sorted(tmp_path.iterdir()):
        other = OnGpu()
        manifest = saver.load(other, path)
        assert all(torch.equal(other.values[key], value) for key, value in expected[manifest.step].items())
