from io import StringIO

import msgspec
import pytest
from rich.console import Console

from fullstride.files import from_json, to_json
from fullstride.plan.simulate import Durations, PipelineTimeline, StageDurations, simulate_schedule, uniform_durations
from fullstride.plan.timeline_page import timeline_block, timeline_document
from fullstride.report.document import Chart, Document, Stats, Table, Timeline
from fullstride.report.html import html_of
from fullstride.report.perfetto import trace_json
from fullstride.report.terminal import print_document

STAGE = StageDurations(
    forward_seconds=0.01,
    input_grad_seconds=0.01,
    weight_grad_seconds=0.01,
    send_seconds=0.002,
    reduce_seconds=0.02,
    optimizer_seconds=0.01,
    activation_bytes=2**30,
    static_bytes=2**32,
)


@pytest.fixture(scope="module")
def timeline():
    return simulate_schedule("zb-v", 2, 2, 6, 1, Durations(stages=(STAGE,) * 4), record=True)


def blocks(document, kind):
    return [block for block in document.blocks if isinstance(block, kind)]


def test_the_page_shows_picture_ranks_waits_and_memory(timeline):
    document = timeline_document(timeline, title="zb-v")

    (picture,) = blocks(document, Timeline)
    assert {bar.lane for bar in picture.bars} == {"rank 0", "rank 1", "rank 0 messages", "rank 1 messages"}
    kinds = {bar.kind for bar in picture.bars}
    assert kinds == {"forward", "input gradient", "weight gradient", "send", "reduce", "optimizer", "wait"}
    ranks, waits = blocks(document, Table)
    assert [row.cells[0] for row in ranks.rows] == ["0", "1"]
    assert "from rank" in waits.rows[0].cells[-1]
    (memory,) = blocks(document, Chart)
    assert max(memory.traces[0].y) == pytest.approx(timeline.ranks[0].peak_bytes / 2**30)
    (figures,) = blocks(document, Stats)
    assert [item.label for item in figures.items] == ["step", "bubble", "most idle", "peak"]


def test_it_can_be_printed_written_as_html_and_opened_in_perfetto(timeline):
    document = timeline_document(timeline, title="zb-v")
    console = Console(width=100, record=True, file=StringIO())
    print_document(document, console)

    assert "weight gradient" in console.export_text()
    assert "rank 1 messages" in html_of(document)
    events = msgspec.json.decode(trace_json(timeline_block(timeline)))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(timeline_block(timeline).bars) > len(timeline.runs)
    assert from_json(to_json(document), Document, "there") == document


def test_a_long_step_is_cut_and_says_so():
    long = simulate_schedule("1f1b", 4, 1, 64, 1, uniform_durations(4), record=True)
    (picture,) = blocks(timeline_document(long, title="1f1b", most_bars=100), Timeline)

    assert len(picture.bars) <= 100
    assert picture.note.startswith("The first ")
    assert sum(bar.kind != "wait" for bar in timeline_block(long).bars) == len(long.runs)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2)])
def test_every_gap_between_first_forward_and_last_backward_has_its_reason(name, chunks):
    durations = Durations(stages=(STAGE,) * (2 * chunks))
    found = simulate_schedule(name, 2, chunks, 6, 1, durations, record=True)
    picture = timeline_block(found)
    waits = [bar for bar in picture.bars if bar.kind == picture.quiet]
    for rank in found.ranks:
        own = [bar.end - bar.start for bar in waits if bar.lane == f"rank {rank.rank}"]
        assert sum(own) == pytest.approx(found.span_seconds * rank.idle_share)
    assert all(bar.name.startswith("waits for ") for bar in waits)
    early = min(found.ranks, key=lambda rank: rank.end)
    last = [bar for bar in waits if bar.lane == f"rank {early.rank}"][-1]
    if early.end < found.span_seconds * (1 - 1e-6):
        assert last.name == f"waits for nothing: its last backward is done, that of rank {1 - early.rank} is not"


def test_without_records_there_are_still_the_figures():
    bare = simulate_schedule("1f1b", 2, 1, 4, 1, Durations(stages=(STAGE, STAGE)))
    document = timeline_document(bare, title="1f1b")

    assert not blocks(document, Chart)
    assert len(blocks(document, Table)) == 1


def test_a_timeline_survives_a_file(timeline):
    raw = msgspec.json.encode(timeline)

    assert msgspec.json.decode(raw, type=PipelineTimeline) == timeline
