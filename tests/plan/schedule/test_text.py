from pathlib import Path

import pytest
from hypothesis import given, settings
from tests.plan.schedule.schedules import generated

from fullstride.errors import BadInput
from fullstride.plan.schedule.checker import faults
from fullstride.plan.schedule.generators import generate
from fullstride.plan.schedule.placement import placement_of
from fullstride.plan.schedule.text import Schedule, parse_schedule, read_schedule, schedule_text, write_schedule

HEAD = "kind=schedule format=1 name=mine pp=2 chunks=1 placement=loop samples=4"


def schedule(name="1f1b", pp=2, chunks=1, samples=4, sizes=2):
    return Schedule(
        name=name,
        placement=placement_of(name, pp, chunks),
        samples=samples,
        actions=generate(name, pp, chunks, samples, sizes),
    )


@settings(max_examples=40, deadline=None)
@given(generated())
def test_text_and_back(drawn):
    one = schedule(*drawn)

    assert parse_schedule(schedule_text(one), "there") == one


def test_a_file_and_back_and_never_over_a_users_file(tmp_path):
    path = tmp_path / "mine.txt"
    write_schedule(schedule(), path)

    assert read_schedule(path) == schedule()
    with pytest.raises(BadInput, match="never written over"):
        write_schedule(schedule(), path)
    write_schedule(schedule(samples=8), path, overwrite=True)
    assert read_schedule(path).samples == 8


def test_a_person_may_comment_and_order_the_ranks_as_they_like():
    text = f"# mine\n\n{HEAD}  # small\n1:forward c0 [0,4)\n0:forward c0 [0,4) # first\n1:optimizer c0 [0,4)\n"
    read = parse_schedule(text, "there")

    assert read.name == "mine"
    assert [(action.rank, action.kind) for action in read.actions] == [(0, "forward"), (1, "forward"), (1, "optimizer")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("0:forward c0 [0,4)\n", "line 1: .* is no head"),
        (HEAD.replace("format=1", "format=2"), "reads format 1"),
        (HEAD.replace("pp=2", "pp=0"), "pp is '0'"),
        (HEAD.replace(" samples=4", ""), "samples is ''"),
        (HEAD.replace("samples=4", "samples=²"), "samples is"),
        (HEAD.replace("loop", "ring"), "placement is 'ring'"),
        (HEAD + " speed=2", "unknown entry 'speed'"),
        (HEAD + "\n0:forwards c0 [0,4)", "line 2: .*is no pipeline action"),
        (HEAD + "\n0:forward c0 [0;4)", "line 2: "),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_line(text, why):
    with pytest.raises(BadInput, match=why):
        parse_schedule(text, "there")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(BadInput, match="not UTF-8"):
        read_schedule(path)


def test_the_example_of_the_docs_can_be_run():
    page = Path(__file__).parents[3] / "docs" / "pipelines.md"
    text = page.read_text().split("```text\n")[1].split("```")[0]
    read = parse_schedule(text, "docs")

    assert faults(read.actions, read.placement, read.samples) == ()
    assert read.actions == generate("1f1b", 2, 1, 2, 2)
