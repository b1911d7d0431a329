import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.plan.schedule.balance import balance_stages


def costs(layers, blocks, embedding, head):
    ends = list(itertools.accumulate(layers, initial=0))
    each = [sum(blocks[lo:hi]) for lo, hi in itertools.pairwise(ends)]
    each[0] += embedding
    each[-1] += head
    return each


@settings(max_examples=150, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 9), min_size=3, max_size=8),
    stages=st.integers(1, 3),
    embedding=st.integers(0, 12),
    head=st.integers(0, 12),
    limits=st.lists(st.integers(3, 30), min_size=3, max_size=3),
)
def test_the_slowest_stage_is_as_fast_as_any_split_allows(blocks, stages, embedding, head, limits):
    limits = limits[:stages]
    every = [
        tuple(b - a for a, b in itertools.pairwise((0, *ends, len(blocks))))
        for ends in itertools.combinations(range(1, len(blocks)), stages - 1)
    ]
    fit = [
        layers for layers in every if all(size <= most for size, most in zip(costs(layers, blocks, 0, 0), limits, strict=True))
    ]

    def ask():
        return balance_stages(
            tuple(map(float, blocks)),
            pp=stages,
            embedding_seconds=embedding,
            head_seconds=head,
            block_bytes=tuple(map(float, blocks)),
            stage_limits=tuple(map(float, limits)),
        )

    if not fit:
        with pytest.raises(DoesNotFit, match="no split"):
            ask()
        return
    found = ask()
    slowest = min(max(costs(layers, blocks, embedding, head)) for layers in fit)
    equals = [layers for layers in fit if max(costs(layers, blocks, embedding, head)) == slowest]
    assert found in equals
    squares = {layers: sum(cost**2 for cost in costs(layers, blocks, embedding, head)) for layers in equals}
    assert squares[found] == min(squares.values())


def test_a_heavy_head_takes_blocks_from_the_last_stage():
    assert balance_stages((1.0,) * 32, pp=4, head_seconds=3.0) == (8, 9, 9, 6)
    assert balance_stages((1.0,) * 32, pp=4) == (8, 8, 8, 8)
    assert balance_stages((1.0,) * 32, pp=2, chunks=2, embedding_seconds=0.5) == (8, 8, 8, 8)


def test_memory_moves_blocks_away_from_the_first_stage():
    held = tuple(24.0 / deep for deep in (4, 3, 2, 1))  # 1F1B holds p - i micro-batches

    assert balance_stages((1.0,) * 32, pp=4, block_bytes=(1.0,) * 32, stage_limits=held) == (6, 8, 9, 9)


def test_many_blocks_and_stages_take_no_time():
    layers = balance_stages((1.0,) * 126, pp=16, chunks=7, embedding_seconds=0.4, head_seconds=1.2)

    assert len(layers) == 112 and sum(layers) == 126 and max(layers) == 2


def test_every_stage_needs_a_block_and_lists_match():
    with pytest.raises(RuleBroken, match="3 blocks on 4 stages"):
        balance_stages((1.0,) * 3, pp=4)
    with pytest.raises(RuleBroken, match="1 limits for 2 stages"):
        balance_stages((1.0,) * 3, pp=2, stage_limits=(1.0,))
