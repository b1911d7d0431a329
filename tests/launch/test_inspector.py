"""Specs from any source: here, or by a process that may use torch."""

import sys
import textwrap

import pytest

from fullstride.errors import BadInput, EnvironmentFault, TimedOut
from fullstride.launch.inspector import spec_of

READER = """
import sys, time
source, out = sys.argv[1:]
name = source.rpartition(":")[2]
if name == "slow":
    time.sleep(60)
if name == "broken":
    sys.exit("the function raised ValueError: no")
if name == "bare":
    print("torch is not installed", file=sys.stderr)
    sys.exit(5)
from fullstride.files import write_json
from fullstride.model.source import load_spec
write_json(out, load_spec("tiny"))
"""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    (tmp_path / "a_reader.py").write_text(textwrap.dedent(READER))
    (tmp_path / "net.py").write_text("def good(): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, seconds=30.0: spec_of(f"{tmp_path / 'net.py'}:{name}", module="a_reader", timeout_seconds=seconds)


def test_presets_need_no_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert spec_of("tiny").name
    with pytest.raises(BadInput):
        spec_of("no-such-model")


@pytest.mark.multi
def test_modules_are_read_by_another_process(reader):
    assert reader("good") == spec_of("tiny")
    with pytest.raises(BadInput, match="the function raised ValueError: no"):
        reader("broken")
    with pytest.raises(EnvironmentFault, match="torch is not installed"):
        reader("bare")
    with pytest.raises(TimedOut, match=r"waited 1 s for .*net.py:slow"):
        reader("slow", 1.0)
