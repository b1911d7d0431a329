import pytest

from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.orders import depths, rounds
from fullstride.plan.schedule.placement import cuts, placement_of

LETTERS = {"forward": "F", "backward": "B", "input_grad": "I", "weight_grad": "W"}


def short(actions, rank):
    """`F0 F1 B0`: what one rank computes, chunks in front where there are several."""
    own = [action for action in actions if action.rank == rank and action.kind in LETTERS]
    several = any(action.chunk for action in own)
    return " ".join(f"{action.chunk if several else ''}{LETTERS[action.kind]}{action.lo}" for action in own)


@pytest.mark.parametrize(
    ("schedule", "chunks", "rank", "wanted"),
    [
        ("gpipe", 1, 0, "F0 F1 F2 F3 B0 B1 B2 B3"),
        ("1f1b", 1, 0, "F0 F1 B0 F2 B1 F3 B2 B3"),
        ("1f1b", 1, 1, "F0 B0 F1 B1 F2 B2 F3 B3"),
        ("zb-h1", 1, 0, "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3"),
        ("zb-h1", 1, 1, "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"),
        ("bfs", 2, 0, "0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 0B0 0B1 0B2 0B3"),
        ("interleaved", 2, 0, "0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3"),
        ("interleaved", 2, 1, "0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"),
        ("zb-v", 2, 0, "0F0 0F1 0F2 1F0 1I0 1W0 1F1 1I1 1W1 0F3 0I0 0W0 1F2 1I2 1W2 0I1 0W1 1F3 1I3 1W3 0I2 0W2 0I3 0W3"),
    ],
)
def test_orders_on_two_ranks(schedule, chunks, rank, wanted):
    assert short(generate(schedule, 2, chunks, 4, 1), rank) == wanted


def test_a_whole_list_is_complete():
    text = [action.text() for action in generate("1f1b", 2, 1, 4, 2) if action.rank == 1]

    assert text == [
        "1:recv_forward c0 [0,2) -> 0",
        "1:forward c0 [0,2)",
        "1:backward c0 [0,2)",
        "1:send_backward c0 [0,2) -> 0",
        "1:recv_forward c0 [2,4) -> 0",
        "1:forward c0 [2,4)",
        "1:backward c0 [2,4)",
        "1:send_backward c0 [2,4) -> 0",
        "1:reduce c0 [0,4)",
        "1:optimizer c0 [0,4)",
    ]


def test_small_micro_batches_are_joined_and_large_ones_are_sliced():
    joined = [action.text() for action in generate("gpipe", 2, 1, 5, (2, 4)) if action.rank == 1][:5]
    sliced = [action.text() for action in generate("gpipe", 2, 1, 5, (4, 2)) if action.rank == 0][:5]

    assert joined == [
        "1:recv_forward c0 [0,2) -> 0",
        "1:recv_forward c0 [2,4) -> 0",
        "1:forward c0 [0,4)",
        "1:recv_forward c0 [4,5) -> 0",
        "1:forward c0 [4,5)",
    ]
    assert sliced == [
        "0:forward c0 [0,4)",
        "0:send_forward c0 [0,2) -> 1",
        "0:send_forward c0 [2,4) -> 1",
        "0:forward c0 [4,5)",
        "0:send_forward c0 [4,5) -> 1",
    ]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((1, 1, 1, 1), (4, 3, 2, 1)),
        ((1, 2), (4, 1)),
        ((1, 4), (8, 1)),
        ((4, 1), (2, 1)),
        ((4, 2, 1), (3, 2, 1)),
    ],
)
def test_depths_hold_two_of_the_larger_micro_batches(sizes, wanted):
    assert depths(sizes) == wanted


def test_the_last_stage_works_its_pieces_to_the_end_one_by_one():
    last = short(generate("zb-v", 2, 2, 8, (4, 4, 4, 1)), 0)

    assert "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2" in last


def test_gradients_of_a_chunk_are_reduced_as_soon_as_they_are_final():
    own = [action for action in generate("interleaved", 2, 2, 8, 1) if action.rank == 1]
    kinds = [(action.kind, action.chunk) for action in own]

    late, early = kinds.index(("reduce", 1)), kinds.index(("reduce", 0))
    assert kinds[late - 2 : late] == [("backward", 1), ("send_backward", 1)]
    assert ("backward", 0) in kinds[late:early]
    assert kinds[early - 2 : early] == [("backward", 0), ("send_backward", 0)]


def test_on_one_rank_there_are_no_messages():
    for schedule, chunks in (("none", 1), ("1f1b", 1), ("interleaved", 3), ("zb-v", 2)):
        kinds = {action.kind for action in generate(schedule, 1, chunks, 4, 2)}
        assert not any(kind.startswith(("send", "recv")) for kind in kinds)


def test_the_v_turns_without_a_message():
    actions = generate("zb-v", 3, 2, 5, 1)

    assert placement_of("zb-v", 3, 2).home(3) == (2, 1)
    assert {action.peer for action in actions if action.rank == 2 and action.peer >= 0} == {1}


@pytest.mark.parametrize(("pp", "chunks", "style"), [(3, 1, "loop"), (4, 3, "loop"), (4, 2, "v"), (3, 4, "v")])
def test_a_placement_knows_both_ways(pp, chunks, style):
    placement = placement_of("bfs", pp, chunks)
    placement = type(placement)(pp=pp, chunks=chunks, style=style)

    homes = [placement.home(stage) for stage in range(placement.num_stages)]
    assert [placement.stage(*home) for home in homes] == list(range(pp * chunks))
    assert len(set(homes)) == pp * chunks


def test_cuts_and_rounds_cover_everything():
    assert cuts(0, 7, 3) == [(0, 3), (3, 6), (6, 7)]
    assert [len(part) for part in rounds(11, 4)] == [5, 6]
    assert [len(part) for part in rounds(3, 4)] == [3]
