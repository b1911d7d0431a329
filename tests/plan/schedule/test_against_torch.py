"""torch's own schedules as an oracle of the order of computations, where its micro-batches and ours are alike."""

import pytest
from tests.plan.schedule.test_generators import LETTERS

from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.placement import placement_of

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_order(name, pp, chunks, num, rank):
    """Computations of one rank as (stage, letter, micro-batch), from a schedule object without stages of its own."""
    one = object.__new__(getattr(schedules, name))
    one.pp_group_size, one.n_local_stages, one._num_stages, one.num_stages = pp, chunks, pp * chunks, pp * chunks
    one._n_microbatches, one.rank = num, rank
    one.number_of_rounds = max(1, num // pp)
    one.microbatches_per_round = num // one.number_of_rounds
    found = one._calculate_single_rank_operations(rank)
    return [
        (action.stage_index, action.computation_type.value, action.microbatch_index)
        for action in found
        if action is not None and action.computation_type.value in "FBIW"
    ]


def own_order(schedule, pp, chunks, num, rank):
    placement = placement_of(schedule, pp, chunks)
    return [
        (placement.stage(rank, action.chunk), LETTERS[action.kind], action.lo)
        for action in generate(schedule, pp, chunks, num, 1)
        if action.rank == rank and action.kind in LETTERS
    ]


@pytest.mark.parametrize(
    ("pp", "chunks", "num"), [(2, 2, 2), (2, 2, 8), (2, 3, 4), (3, 2, 9), (4, 2, 4), (4, 2, 16), (4, 4, 10)]
)
def test_interleaving(pp, chunks, num):
    for rank in range(pp):
        assert own_order("interleaved", pp, chunks, num, rank) == torch_order("ScheduleInterleaved1F1B", pp, chunks, num, rank)


@pytest.mark.parametrize(("pp", "num"), [(2, 1), (2, 3), (2, 8), (3, 4), (4, 7), (4, 12)])
def test_zb_v(pp, num):
    for rank in range(pp):
        assert own_order("zb-v", pp, 2, num, rank) == torch_order("ScheduleZBVZeroBubble", pp, 2, num, rank)
