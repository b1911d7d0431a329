"""What a run left is read back, and a page made of it."""

import math

import pytest
from tests.cli.values import make_comparison, make_measurement, make_plan, make_step

import fullstride
from fullstride.cli.follow import Tail, show
from fullstride.cli.record import read_run, read_shown
from fullstride.errors import BadInput
from fullstride.events import Evaluation, EventWriter, Progress
from fullstride.files import write_bytes, write_json
from fullstride.plan.toml import write_plan
from fullstride.rundir import Failure, RunDir


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(root=str(tmp_path / "run"))
    write_plan(make_plan(), run_dir.plan)
    return run_dir


def write_events(run_dir, events):
    writer = EventWriter(run_dir.events(0))
    for event in events:
        writer.write(event)
    writer.close()


def test_a_run_is_read_back(run_dir, cluster):
    write_json(run_dir.cluster, cluster)
    write_json(run_dir.measurement, make_measurement())
    # A resumed run takes steps again: the later ones count.
    write_events(run_dir, [make_step(0), make_step(1, loss=2.0), make_step(1, loss=1.5), make_step(2)])
    record = fullstride.read_run(run_dir.root)
    assert record.plan == make_plan() and record.cluster == cluster and record.measurement == make_measurement()
    assert [(s.step, s.loss) for s in record.steps] == [(0, 3.0), (1, 1.5), (2, 3.0)]
    assert not record.done and record.failure is None and record.ladder is None
    write_json(run_dir.failed, Failure(failure="hang", message="why"))
    write_bytes(run_dir.done, b"")
    assert read_run(run_dir.root).failure.failure == "hang" and read_run(run_dir.root).done


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no such folder"):
        read_run(tmp_path / "none")
    with pytest.raises(BadInput, match="holds no plan"):
        read_run(tmp_path)


def test_files_are_read_by_their_kind(tmp_path):
    write_json(tmp_path / "c.json", make_comparison())
    assert read_shown(tmp_path / "c.json") == make_comparison()
    for content in ("{", "[]", '{"kind": "sausage", "format": 1}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(BadInput):
            read_shown(tmp_path / "bad.json")


def test_the_tail_sees_new_whole_steps_only(run_dir):
    write_events(run_dir, [make_step(0)])
    tail = Tail(run_dir.events(0))
    assert tail.read() == []
    write_events(run_dir, [Progress(time_ns=1, phase="x"), make_step(1)])
    assert [s.step for s in tail.read()] == [1]
    with open(run_dir.events(0), "ab") as out:
        out.write(b'{"event":"step_end","time_ns":2,')
        out.flush()
        assert tail.read() == []
        rest = b'"start_ns":1,"step":2,"samples":1,"tokens":1,"loss":1.0,"grad_norm":1.0,"lr":0.1}\n'
        out.write(rest)
        out.flush()
        assert [s.step for s in tail.read()] == [2]


def test_the_tail_waits_for_a_file_that_is_not_there_yet(run_dir):
    tail = Tail(run_dir.events(0))
    assert tail.read() == []
    write_events(run_dir, [make_step(0)])
    assert [s.step for s in tail.read()] == [0]


def test_the_newest_step_and_every_held_out_loss_are_shown():
    told = []

    class View:
        def step(self, seconds, *, done, of, label):
            told.append((seconds, done, of, label))

        def note(self, text):
            told.append(text)

    show([], View(), 10)
    held_out = Evaluation(time_ns=1, step=1, loss=2.5, tokens=1200)
    show([make_step(0), held_out, make_step(1)], View(), 10)
    assert told == [
        "  after 1 steps: held-out loss 2.5000 over 1.20 k tokens",
        (1.0, 2, 10, "loss 3.0000, lr 1.00e-03, 256 tokens/s"),
    ]


def test_the_tail_keeps_the_newest_and_reads_losses_that_are_no_number(run_dir):
    tail = Tail(run_dir.events(0))
    write_events(run_dir, [make_step(0), Evaluation(time_ns=1, step=1, loss=2.5, tokens=12), make_step(1, loss=math.nan)])
    assert len(tail.read()) == 3
    assert tail.last.step == 1 and math.isnan(tail.last.loss) and tail.evaluation.loss == 2.5


def test_a_save_that_failed_is_told_while_training_goes_on(run_dir):
    notes = []

    class View:
        note = staticmethod(notes.append)

    tail = Tail(run_dir.events(0))
    signs = (("forward", ""), ("checkpoint", "checkpoints/step-5: No space left on device"), ("export", "model"))
    write_events(run_dir, [Progress(time_ns=1, phase=phase, note=note) for phase, note in signs])
    show(tail.read(), View(), 10)
    assert notes == ["  a checkpoint was not saved: checkpoints/step-5: No space left on device"]
