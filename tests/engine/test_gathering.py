"""Whole parameters from pieces, over real gloo processes: tensor-parallel ranges, flat runs, names on some ranks only."""

import math

import pytest
import torch
import torch.multiprocessing as mp

from fullstride.engine.gathering import Gathering, holders
from fullstride.engine.pieces import Cut, Piece, take

WHOLE = {"fused": (12, 5), "columns": (3, 8), "norm": (7,), "late": (4, 2), "scalar": ()}


def whole(name):
    return torch.arange(1, 1 + math.prod(WHOLE[name]), dtype=torch.float64).reshape(WHOLE[name])


def pieces_of(rank):
    """tp 2 x dp 2: rank = 2 * dp + tp. `late` is on ranks 2 and 3 alone, as if on another stage."""
    dp, tp = divmod(rank, 2)
    cuts = {
        "fused": Cut(dim=0, ranges=((0, 3), (6, 8)) if tp == 0 else ((3, 6), (8, 12))),
        "columns": Cut(dim=1, ranges=((0, 2), (4, 6)) if tp == 0 else ((2, 4), (6, 8))),
    }
    found = {}
    for name, shape in WHOLE.items():
        piece = Piece(name=name, shape=shape, cut=cuts.get(name), counted=name in cuts or tp == 0)
        middle = piece.count // 2 if piece.count > 1 else 1
        lo, hi = (0, middle) if dp == 0 else (middle, piece.count)
        if name == "late":
            lo, hi = 0, piece.count
        if name != "late" or dp == 1:
            found[name] = Piece(name=name, shape=shape, cut=piece.cut, lo=lo, hi=hi, counted=piece.counted)
    return found


def locals_of(rank):
    made = {}
    for name, piece in pieces_of(rank).items():
        made[name] = torch.empty(piece.count, dtype=torch.float64)
        take(whole(name), piece, made[name])
    return made


def work(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    gathering, local = Gathering(pieces_of(rank)), locals_of(rank)
    for name in gathering.names:
        assert torch.equal(gathering.whole(name, local.get(name), torch.float64), whole(name)), name
        there = gathering.whole(name, local.get(name), torch.bfloat16, on_all=False)
        assert (there is None) == (rank != 0)
        assert there is None or torch.equal(there, whole(name).bfloat16())
    torch.distributed.destroy_process_group()


@pytest.mark.multi
def test_every_rank_gets_the_whole_or_rank_0_alone(tmp_path):
    mp.spawn(work, args=(str(tmp_path),), nprocs=4)


def test_each_element_is_shown_by_one_rank():
    held = holders([pieces_of(rank) for rank in range(4)])
    assert set(held) == set(WHOLE)
    for name, found in held.items():
        assert sum(h.piece.count for h in found) == math.prod(WHOLE[name])
    assert [h.rank for h in held["late"]] == [2]


def test_alone_there_is_nobody_to_ask():
    piece = Piece(name="w", shape=(2, 3))
    value = torch.arange(6.0)
    assert torch.equal(Gathering({"w": piece}).whole("w", value, torch.float32), value.reshape(2, 3))
    with pytest.raises(AssertionError, match="5 elements, the piece has 6"):
        Gathering({"w": piece}).whole("w", value[:5], torch.float32)
