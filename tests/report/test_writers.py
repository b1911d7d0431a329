"""JSON and Perfetto writers, and the small words they share."""

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.samples_report import HOSTILE, document

from fullstride.files import from_json, to_json
from fullstride.report.document import Bar, Chart, Document, Matrix, Timeline
from fullstride.report.json_out import envelope, error_data, print_json
from fullstride.report.perfetto import trace_json
from fullstride.report.words import DASH, five_numbers, number, plain, waterfall_totals


def test_the_envelope_is_one_object():
    out = io.BytesIO()
    print_json(Document(title="t", blocks=()), warnings=["assumed"], out=out)
    whole = json.loads(out.getvalue())
    assert list(whole) == ["kind", "format", "data", "warnings"]
    assert (whole["kind"], whole["format"], whole["warnings"]) == ("document", 1, ["assumed"])
    assert whole["data"]["title"] == "t"


def test_the_envelope_takes_plain_data_and_errors():
    assert json.loads(envelope({"x": math.nan}, kind="facts"))["data"] == {"x": None}
    failed = json.loads(envelope(error_data("7 is odd", "give 8", 3), kind="error"))
    assert failed["kind"] == "error"
    assert failed["data"] == {"message": "7 is odd", "fix": "give 8", "exit_code": 3}


def test_a_trace_names_its_lanes():
    bars = (
        Bar(lane="rank 1", name="a", kind="forward", start=0.5, end=0.75),
        Bar(lane="r", name="b", kind="k", start=0, end=math.nan),
    )
    trace = json.loads(trace_json(Timeline(title="one step", bars=bars)))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["ts"], event["dur"], event["cat"]) for event in complete] == [(500000.0, 250000.0, "forward")]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names[complete[0]["tid"]] == "rank 1"


def test_charts_with_gaps_come_back_from_a_file():
    """NaN is written as null, and null is a gap."""
    charts = tuple(block for block in document().blocks if isinstance(block, Chart | Matrix))
    back = from_json(to_json(Document(title="t", blocks=charts)), Document, "memory")
    assert back.blocks[0].traces[0].y == (1.5, None, None, 1.25)
    assert from_json(to_json(back), Document, "memory") == back


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5678, "1,235"),
        (0.00012345, "0.0001234"),
        (12.0, "12"),
        (1e12, "1.000e+12"),
        (-0.5, "-0.5"),
        (None, DASH),
    ],
)
def test_numbers(value, text):
    assert number(value) == text
    assert number(math.nan) == number(-math.inf) == DASH


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300))
def test_numbers_keep_four_digits(value):
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=1e-3, abs=1e-307)


def test_plain_takes_out_what_a_terminal_would_obey():
    assert "\x1b" not in plain(HOSTILE)
    assert plain("a\nb\tc é 模") == "a\nb\tc é 模"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_five_numbers_are_in_order(values):
    five = five_numbers([*values, math.nan, None])
    assert five[0] == min(values)
    assert five[4] == max(values)
    assert list(five) == sorted(five)


def test_waterfalls_end_where_they_say():
    assert waterfall_totals((10.0, -3.0, 2.0, 9.0)) == [(0.0, 10.0), (10.0, 7.0), (7.0, 9.0), (0.0, 9.0)]
    assert waterfall_totals(()) == []
