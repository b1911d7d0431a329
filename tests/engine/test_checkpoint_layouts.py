"""A checkpoint that one layout wrote is read by any other: hand-made pieces on four gloo processes."""

import itertools
import math
import resource

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fullstride.engine.checkpoint import Checkpointer, load_run, save_run
from fullstride.engine.checkpoint_boxes import Boxes, Entry, entries, header, shares, uncovered, write_file
from fullstride.engine.checkpoint_folder import MANIFEST, complete, read_manifest, signed
from fullstride.engine.pieces import Cut, Piece, take
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.files import write_json
from fullstride.plan.plan import ModelRef, Plan, Workload

PLAN = Plan(model=ModelRef(source="tiny"), workload=Workload(sequence_length=8, samples_per_step=2))
SHAPES = {"first.fused": (12, 5), "first.columns": (3, 8), "norm": (7,), "last.experts": (4, 6, 5), "last.scalar": ()}
FROZEN = "norm"
LAYOUTS = {  # pp, dp, tp, how data parallelism cuts
    "one": (1, 1, 1, "whole"),
    "ddp 2": (1, 2, 1, "whole"),
    "rows 4": (1, 4, 1, "rows"),
    "flat 4": (1, 4, 1, "flat"),
    "flat 2": (1, 2, 1, "flat"),
    "tp 4": (1, 1, 4, "whole"),
    "tp 2 rows 2": (1, 2, 2, "rows"),
    "tp 2 flat 2": (1, 2, 2, "flat"),
    "pp 2 tp 2": (2, 1, 2, "whole"),
    "pp 2 flat 2": (2, 2, 1, "flat"),
}


def size_of(layout):
    return math.prod(LAYOUTS[layout][:3])


def tp_cut(name, tp, at):
    """Gate and up joined in one weight, each cut by itself; columns; experts by their inner dim."""
    if name == "first.fused":
        return Cut(dim=0, ranges=tuple((half + at * 6 // tp, half + (at + 1) * 6 // tp) for half in (0, 6)))
    if name == "first.columns":
        return Cut(dim=1, ranges=((at * 8 // tp, (at + 1) * 8 // tp),))
    if name == "last.experts":
        return Cut(dim=1, ranges=tuple((half + at * 3 // tp, half + (at + 1) * 3 // tp) for half in (0, 3)))
    return None


def pieces_of(layout, rank):
    pp, dp, tp, how = LAYOUTS[layout]
    stage, rest = divmod(rank, dp * tp)
    data, at = divmod(rest, tp)
    found, flat_at = {}, 0
    for name, shape in SHAPES.items():
        cut = tp_cut(name, tp, at) if tp > 1 else None
        whole = Piece(name=name, shape=shape, cut=cut)
        lo, hi = 0, whole.count
        if how == "rows" and shape:
            rows, inner = whole.cut_shape[0], math.prod(whole.cut_shape[1:])
            each = -(-rows // dp)
            lo, hi = min(data * each, rows) * inner, min((data + 1) * each, rows) * inner
        elif how == "flat":  # one buffer through all parameters, cut anywhere
            total = sum(Piece(name=n, shape=s, cut=tp_cut(n, tp, at) if tp > 1 else None).count for n, s in SHAPES.items())
            each = -(-total // dp)
            lo, hi = (min(max(border - flat_at, 0), whole.count) for border in (data * each, (data + 1) * each))
            flat_at += whole.count
        if pp == 1 or name.startswith("last") == (stage == 1) or name == "norm":  # the norm is on both, as a tied weight is
            counted = (cut is not None or at == 0) and (name != "norm" or stage == 0)
            found[name] = Piece(name=name, shape=shape, cut=cut, lo=lo, hi=hi, counted=counted)
    return found


def truth(key):
    kind, name = key.split("/")
    count = math.prod(SHAPES[name])
    first = 1000 * list(SHAPES).index(name) + 10000 * ["weights", "exp_avg", "exp_avg_sq"].index(kind)
    return torch.arange(first + 1, first + 1 + count, dtype=torch.float32).reshape(SHAPES[name])


class LaidOut:
    """What a Run is to a checkpoint, in a layout of the table."""

    def __init__(self, layout, rank, known):
        self.plan, self.step_index, self._pieces, self.values = PLAN, 3 if known else 0, pieces_of(layout, rank), {}
        for name, piece in self._pieces.items():
            for kind in ("weights",) if name == FROZEN else ("weights", "exp_avg", "exp_avg_sq"):
                value = torch.full((piece.count,), torch.nan)
                if known:
                    take(truth(f"{kind}/{name}"), piece, value)
                self.values[f"{kind}/{name}"] = value

    def state(self):
        return self.values

    def pieces(self):
        return self._pieces

    def after_load(self, step_index):
        self.step_index = step_index

    def wrong(self):
        for key, value in self.values.items():
            wanted = torch.empty_like(value)
            take(truth(key), self._pieces[key.split("/")[1]], wanted)
            if not torch.equal(value, wanted):
                return key
        return ""


def join(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    return {4: dist.new_group([0, 1, 2, 3]), 2: dist.new_group([0, 1]), 1: None}


def work(rank, folder):
    groups = join(rank, folder)
    for old in LAYOUTS:
        if rank < size_of(old):
            saver = Checkpointer(folder / old, group=groups[size_of(old)])
            saver.save(LaidOut(old, rank, known=True), 6)
            saver.wait()
    dist.barrier()
    for old, new in itertools.product(LAYOUTS, LAYOUTS):
        if rank < size_of(new):
            run, reader = LaidOut(new, rank, known=False), Checkpointer(folder / old, group=groups[size_of(new)])
            manifest = reader.load(run, folder / old / "step-00000003")
            assert (run.step_index, manifest.samples, manifest.world_size) == (3, 6, size_of(old))
            assert run.wrong() == "", f"{old} -> {new}: {run.wrong()}"
    dist.barrier()
    faults(rank, folder, groups[4])
    full_disk_of_one_rank(rank, folder, groups[4])
    dist.destroy_process_group()


def faults(rank, folder, group):
    """A missing, a shortened and a changed file of every rank is named on all ranks."""
    saver, home = Checkpointer(folder / "tp 2 flat 2", group=group), folder / "tp 2 flat 2" / "step-00000003"
    good = {path.name: path.read_bytes() for path in home.iterdir()}
    dist.barrier()
    for name, raw in sorted(good.items()):
        for broken in (None, raw[:-3], bytes([*raw[:-9], raw[-9] ^ 1, *raw[-8:]])):
            if rank == 0:
                (home / name).unlink() if broken is None else (home / name).write_bytes(broken)
            dist.barrier()
            if name == MANIFEST and broken is None:
                assert saver.latest() is None
            else:
                with pytest.raises(BadInput, match=name):
                    saver.load(LaidOut("rows 4", rank, known=False), home)
            dist.barrier()
            if rank == 0:
                (home / name).write_bytes(raw)
            dist.barrier()


def full_disk_of_one_rank(rank, folder, group):
    saver, run = Checkpointer(folder / "full", group=group), LaidOut("tp 2 flat 2", rank, known=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    saver.save(run, 6)
    with pytest.raises(EnvironmentFault, match=r"step-00000003: not saved \(rank 2: File too large\)"):
        saver.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    assert list((folder / "full").iterdir()) == []
    dist.barrier()
    saver.save(run, 6)
    saver.wait()
    assert [path.name for path in complete(folder / "full")] == ["step-00000003"]


@pytest.mark.multi
def test_every_layout_reads_what_every_other_wrote_and_a_fault_of_one_rank_is_told_on_all(tmp_path):
    mp.spawn(work, args=(tmp_path,), nprocs=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once_and_the_work_is_even(layout):
    everybody = [pieces_of(layout, rank) for rank in range(size_of(layout))]
    chosen = shares(everybody)
    assert uncovered(everybody, chosen) == ""
    written = [sum(pieces[name].count for name in names) for pieces, names in zip(everybody, chosen, strict=True)]
    assert sum(written) == sum(math.prod(shape) for shape in SHAPES.values())
    if "flat" in layout or layout == "rows 4":
        assert max(written) < 0.8 * sum(written)


def test_replicas_spread_over_the_ranks():
    pieces = {str(i): Piece(name=str(i), shape=(10 + i,)) for i in range(40)}
    chosen = shares([pieces] * 4)
    loads = [sum(pieces[name].count for name in names) for names in chosen]
    assert sum(loads) == sum(p.count for p in pieces.values())
    assert max(loads) - min(loads) < 50


def test_pieces_with_a_hole_are_found():
    everybody = [{"w": Piece(name="w", shape=(8,), hi=3)}, {"w": Piece(name="w", shape=(8,), lo=4)}]
    assert uncovered(everybody, shares(everybody)) == "w"


@pytest.mark.parametrize("limit", [4, 12, 40, 1000])
def test_large_pieces_are_cut_into_entries_of_bounded_size(tmp_path, limit):
    whole = torch.arange(2 * 6 * 5, dtype=torch.float32).reshape(2, 6, 5)
    piece = Piece(name="w", shape=(2, 6, 5), cut=Cut(dim=1, ranges=((0, 1), (3, 6))), lo=2, hi=33)
    local = torch.empty(piece.count)
    take(whole, piece, local)
    found = list(entries("weights/w", piece, local, limit))
    assert all(entry.nbytes <= limit for entry in found)
    assert sum(entry.view.numel() for entry in found) == piece.count
    blocks = [entry.view.contiguous().view(-1).view(torch.uint8) for entry in found]
    write_file(tmp_path / "file", header(found), blocks)
    read = torch.full((piece.count,), torch.nan)
    Boxes([tmp_path / "file"]).read("weights/w", piece, read)
    assert torch.equal(read, local)
    with pytest.raises(BadInput, match="holds 31 of 60 elements of weights/w"):
        Boxes([tmp_path / "file"]).read("weights/w", Piece(name="w", shape=(2, 6, 5)), torch.empty(2, 6, 5))


def test_another_reader_of_safetensors_reads_the_files(tmp_path):
    from safetensors.torch import load_file

    values = {"a": torch.rand(3, 4), "b": torch.rand(5).bfloat16(), "c": torch.arange(3, dtype=torch.uint8)}
    found = [Entry(f"weights/{name}", (0,) * value.ndim, value) for name, value in values.items()]
    write_file(tmp_path / "x.safetensors", header(found), [value.view(-1).view(torch.uint8) for value in values.values()])
    read = load_file(tmp_path / "x.safetensors")
    assert {name.split("/")[1].split("@")[0] for name in read} == set(values)
    assert all(torch.equal(read[entry.name], entry.view) for entry in found)


def test_a_parameter_that_does_not_lie_in_one_run_is_read_too(tmp_path):
    value = torch.arange(12.0).reshape(3, 4)
    found = list(entries("weights/w", Piece(name="w", shape=(4, 3)), value.t()))
    write_file(tmp_path / "file", header(found), [entry.view.contiguous().view(-1).view(torch.uint8) for entry in found])
    read = torch.zeros(3, 4).t()
    Boxes([tmp_path / "file"]).read("weights/w", Piece(name="w", shape=(4, 3)), read)
    assert torch.equal(read, value.t())


def test_a_host_without_room_for_a_copy_writes_while_training_stands_still(tmp_path, monkeypatch):
    monkeypatch.setattr("fullstride.engine.checkpoint_staging.available_memory", lambda: (1000, "test"))
    saver, run = Checkpointer(tmp_path), LaidOut("one", 0, known=True)
    assert "saves are written while training stands still" in saver.reserve(run)
    saver.save(run, 6)
    assert len(complete(tmp_path)) == 1  # before anybody waited
    other = LaidOut("one", 0, known=False)
    saver.load(other, saver.latest())
    assert other.wrong() == ""


def test_memory_for_copies_is_allocated_once(tmp_path):
    saver, run = Checkpointer(tmp_path), LaidOut("one", 0, known=True)
    assert saver.reserve(run) == ""
    places = [chunk.data_ptr() for chunk in saver._staging._chunks]
    for _ in range(3):
        run.step_index += 1
        saver.save(run, 6)
        saver.wait()
    assert [chunk.data_ptr() for chunk in saver._staging._chunks] == places


def test_random_numbers_begin_anew_from_seed_and_step_where_the_world_changed(tmp_path):
    run = LaidOut("one", 0, known=True)
    save_run(run, tmp_path / "a")
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        path = tmp_path / "a" / MANIFEST

        write_json(path, signed(msgspec.structs.replace(read_manifest(path.parent), world_size=2)))
        load_run(LaidOut("one", 0, known=False), tmp_path / "a")
        drawn.append(torch.rand(4))
    torch.manual_seed(5)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], torch.rand(4))
