"""Pieces: every element of a parameter belongs to exactly one of the ranks that share it, at its right place."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.engine.mesh import Mesh
from fullstride.engine.pieces import Cut, Piece, fill, take
from fullstride.plan.plan import Layout


@st.composite
def _laid_out(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    borders = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=4))})
    parts = list(itertools.pairwise(borders))
    owners = [draw(st.integers(0, 1)) for _ in parts]
    cuts = [Cut(dim=dim, ranges=tuple(p for p, o in zip(parts, owners, strict=True) if o == rank)) for rank in (0, 1)]
    pieces = []
    for cut in cuts:
        count = Piece(name="w", shape=shape, cut=cut).count
        middle = draw(st.integers(0, count))
        pieces += [Piece(name="w", shape=shape, cut=cut, lo=lo, hi=hi) for lo, hi in ((0, middle), (middle, count))]
    return shape, pieces


@settings(max_examples=200, deadline=None)
@given(_laid_out())
def test_pieces_of_any_cut_join_to_the_whole(case):
    shape, pieces = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    joined = torch.full(shape, -1)
    seen = 0
    for piece in pieces:
        ranges = [torch.arange(lo, hi) for lo, hi in piece.cut.ranges]
        rows = torch.cat(ranges) if ranges else torch.arange(0)
        wanted = whole.index_select(piece.cut.dim, rows).reshape(-1)[piece.lo : piece.end]
        local = torch.empty(piece.count, dtype=whole.dtype)
        take(whole, piece, local)
        assert torch.equal(local, wanted)
        fill(joined, piece, local)
        seen += sum(box.count for box in piece.boxes())
    assert torch.equal(joined, whole)
    assert seen == whole.numel()


def test_a_piece_without_a_cut_is_the_whole():
    (box,) = Piece(name="w", shape=(3, 4)).boxes()
    assert (box.offsets, box.sizes, box.start) == ((0, 0), (3, 4), 0)
    (scalar,) = Piece(name="s", shape=()).boxes()
    assert (scalar.sizes, scalar.count) == ((), 1)


def test_ranks_of_an_axis_follow_the_order_of_the_layout():
    layout = Layout(dp_shard=2, tp=2, pp=2)
    mesh = Mesh.__new__(Mesh)
    mesh.layout, mesh.rank = layout, 5
    mesh._axes = tuple(axis for axis in layout.order if axis != "ep")
    mesh._numbers = torch.arange(8).reshape([getattr(layout, axis) for axis in mesh._axes])
    assert (mesh.coordinate("pp"), mesh.coordinate("dp_shard"), mesh.coordinate("tp")) == (1, 0, 1)
    assert mesh.ranks("tp") == (4, 5)
    assert mesh.ranks("pp") == (1, 5)
    assert mesh.ranks("dp_shard", "tp") == (4, 5, 6, 7)
    assert mesh.ranks("tp", "dp_shard") == (4, 6, 5, 7)
