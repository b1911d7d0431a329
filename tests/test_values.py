"""Every value that goes into a file comes back equal; damage is refused with the place and the rule."""

import types
import typing

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullstride import events, rundir
from fullstride.cluster.cluster import Cluster
from fullstride.doctor.finding import Finding
from fullstride.errors import BadInput
from fullstride.files import FileValue, Value, digest, from_json, kind_of, read_json, to_json, write_json
from fullstride.launch.job import Job
from fullstride.measure.measurement import Comparison, Measurement
from fullstride.model.spec import ModelSpec
from fullstride.plan.estimate import Estimate
from fullstride.plan.plan import Plan
from fullstride.plan.schedule.action import Action, parse_action
from fullstride.report.document import Document
from fullstride.tune.trial import Ladder

FILE_VALUES = [Cluster, ModelSpec, Plan, Estimate, Measurement, Comparison, Ladder, Finding, Document, Job, rundir.Failure]
FILE_VALUES += [rundir.BuildOrder, rundir.RunOrder, rundir.ReleaseOrder, rundir.ExitOrder, rundir.Reply]
TEXT = st.text("abcµ\n\" '[]#=\\", max_size=4)


def values_of(hint, depth=0):
    """Random values of a type as msgspec would accept it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[values_of(argument, depth) for argument in arguments])
    if origin is tuple:
        return st.lists(values_of(arguments[0], depth + 1), max_size=2 if depth < 3 else 1).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1], depth + 1), max_size=2)
    if isinstance(hint, type) and issubclass(hint, Value):
        hints = typing.get_type_hints(hint)
        fields = {name: values_of(hints[name], depth + 1) for name in hint.__struct_fields__}
        return st.fixed_dictionaries(fields).map(lambda content: hint(**content))
    plain = {
        int: st.integers(-(2**50), 2**50),
        float: st.floats(allow_nan=False, allow_infinity=False, width=32),
        bool: st.booleans(),
        str: TEXT,
        type(None): st.none(),
    }
    return plain[hint]


def equal_after_a_round_trip(value):
    return from_json(to_json(value), type(value), "memory") == value


@pytest.mark.parametrize("value_type", FILE_VALUES, ids=lambda t: t.__name__)
def test_round_trip(value_type):
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values_of(value_type))
    def check(value):
        assert equal_after_a_round_trip(value)
        assert digest(value) == digest(from_json(to_json(value), value_type, "memory"))

    check()


@pytest.mark.parametrize("event_type", typing.get_args(events.AnyEvent), ids=lambda t: t.__name__)
def test_events_round_trip(event_type, tmp_path):
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(values_of(event_type))
    def check(event):
        path = tmp_path / "rank00000.jsonl"
        path.unlink(missing_ok=True)
        writer = events.EventWriter(path)
        writer.write(event)
        writer.write(event)
        writer.close()
        assert list(events.read_events(path)) == [event, event]

    check()


def test_a_kill_in_the_middle_of_a_line_loses_that_line_only(tmp_path):
    path = tmp_path / "rank00000.jsonl"
    writer = events.EventWriter(path)
    event = events.Progress(time_ns=1, phase="forward")
    writer.write(event)
    writer.close()
    with open(path, "ab") as out:
        out.write(b'{"event":"progress","time_')
    assert list(events.read_events(path)) == [event]
    with open(path, "ab") as out:
        out.write(b"\n")
    with pytest.raises(BadInput, match="line 2"):
        list(events.read_events(path))


def test_kinds_are_distinct_and_the_header_comes_first():
    kinds = [kind_of(value_type) for value_type in FILE_VALUES]
    assert len(set(kinds)) == len(kinds)
    failure = rundir.Failure(failure="hang", message="rank 1 is silent")
    assert to_json(failure, indent=False).startswith(b'{"kind":"failure","format":1,')


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "is not JSON"),
        (b"[]", "not a table"),
        (b'{"kind":"plan","format":1}', "expected 'failure'"),
        (b'{"kind":"failure","format":2}', "format is 2"),
        (b'{"kind":"failure","format":1,"failure":"sad","message":"x"}', r"\$.failure"),
        (b'{"kind":"failure","format":1,"failure":"hang","message":"x","colour":1}', "colour"),
        (b'{"kind":"failure","format":1,"failure":"hang","message":3}', r"\$.message"),
    ],
)
def test_damage_is_refused_with_the_rule(raw, says):
    with pytest.raises(BadInput, match=says):
        from_json(raw, rundir.Failure, "file.json")


def test_files_are_replaced_whole(tmp_path):
    path = tmp_path / "deep" / "failure.json"
    for message in ("one", "two"):
        failure = rundir.Failure(failure="hang", message=message)
        write_json(path, failure)
        assert read_json(path, rundir.Failure) == failure
    assert [p.name for p in path.parent.iterdir()] == ["failure.json"]
    with pytest.raises(BadInput, match="no such file"):
        read_json(tmp_path / "missing.json", rundir.Failure)


def test_values_are_frozen():
    failure = rundir.Failure(failure="hang", message="x")
    with pytest.raises(AttributeError):
        failure.message = "y"
    assert issubclass(Plan, FileValue)
    assert msgspec.structs.replace(failure, message="y").message == "y"


@settings(max_examples=50, deadline=None)
@given(values_of(Action))
def test_actions_have_a_text_form(action):
    positive = msgspec.structs.replace(
        action, rank=abs(action.rank), chunk=abs(action.chunk), lo=abs(action.lo), hi=abs(action.hi), peer=max(action.peer, -1)
    )
    assert parse_action(positive.text()) == positive


def test_a_bad_action_is_named():
    with pytest.raises(BadInput, match="jump"):
        parse_action("0:jump c0 [0,2)")
