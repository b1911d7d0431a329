"""The command itself: help, errors in one line, exit codes, one JSON object."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fullstride
from fullstride import errors
from fullstride.cli import main as cli
from fullstride.cli.command import Parser


class FakeVerb:
    """Does what the test says.

    More about it.
    """

    name = "plan"

    def __init__(self, act):
        self.act = act

    def arguments(self, parser):
        parser.add_argument("model", nargs="?")

    def run(self, args, out):
        return self.act(args, out)


@pytest.fixture
def verb(monkeypatch):
    def use(act):
        monkeypatch.setattr(cli, "command_of", lambda _verb: FakeVerb(act))

    return use


def raising(error):
    def act(_args, _out):
        raise error

    return act


BRANCHES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.FullstrideError)]


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda c: c.__name__)
def test_each_error_is_one_line_and_its_exit_code(branch, verb, capsys):
    verb(raising(branch("7 is odd", fix="give an even number")))
    assert cli.main(["plan"]) == branch.exit_code
    seen = capsys.readouterr()
    assert seen.err == "fullstride plan: error: 7 is odd; give an even number\n"
    assert seen.out == ""


def test_an_error_under_json_is_one_object_on_stdout(verb, capfdbinary):
    verb(raising(errors.BadInput("7 is odd", fix="give an even number")))
    assert cli.main(["plan", "--json"]) == 3
    seen = capfdbinary.readouterr()
    told = json.loads(seen.out)
    assert (told["kind"], told["format"], told["warnings"]) == ("error", 1, [])
    assert told["data"] == {"message": "7 is odd", "fix": "give an even number", "exit_code": 3}


def test_a_mistake_of_our_own_is_one_line_and_a_file(verb, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    verb(raising(ZeroDivisionError("boom\nand more")))
    assert cli.main(["plan"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "ZeroDivisionError: boom and more" in error and "Traceback" not in error
    (file,) = tmp_path.iterdir()
    assert str(file) in error
    assert "Traceback" in file.read_text() and "boom" in file.read_text()


def test_ctrl_c_is_130(verb, capsys):
    verb(raising(KeyboardInterrupt()))
    assert cli.main(["plan"]) == 130
    assert capsys.readouterr().err == "fullstride plan: interrupted\n"


def test_the_result_alone_stands_on_stdout(verb, capfdbinary):
    def act(_args, out):
        out.note("on the way")
        out.warn("look out")
        out.show(None, {"a": 1}, "things")
        return 0

    verb(act)
    assert cli.main(["plan", "--json"]) == 0
    seen = capfdbinary.readouterr()
    assert json.loads(seen.out) == {"kind": "things", "format": 1, "data": {"a": 1}, "warnings": ["look out"]}
    assert seen.err == b"on the way\nwarning: look out\n"


@pytest.mark.parametrize("words", [["plan", "--no-such"], ["plan", "a", "b"], ["nonsense"], []])
def test_usage_errors_exit_2_in_one_line(words, verb, capsys):
    verb(lambda _args, _out: 0)
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "error:" in error and "--help" in error


def test_help_and_version_exit_0(verb, capsys):
    verb(lambda _args, _out: 0)
    assert cli.main(["--version"]) == 0
    assert fullstride.__version__ in capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Does what the test says." in text and "exit codes" in text
    assert cli.main(["plan", "--help"]) == 0
    assert "More about it." in capsys.readouterr().out


def test_a_closed_pipe_is_no_error(verb):
    program = (
        "import sys\nfrom fullstride.cli import main as cli\n"
        "class V:\n '''x'''\n name='plan'\n def arguments(self, p): pass\n"
        " def run(self, a, o):\n  [print('x' * 999) for _ in range(999)]\n  return 0\n"
        "cli.command_of = lambda v: V()\nsys.exit(cli.main(['plan']))"
    )
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -c "$0" | head -1', program],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_the_real_parser_has_the_verbs_and_only_those():
    parser = cli.build_parser()
    assert isinstance(parser, Parser)
    files = {p.stem for p in Path(cli.__file__).parent.glob("*.py")}
    assert set(cli.VERBS) <= files
    text = parser.format_help()
    for verb in cli.VERBS:
        assert f"\n    {verb} " in text
        command = cli.command_of(verb)
        assert command.name == verb
        summary = type(command).__doc__.partition("\n")[0]
        assert summary.endswith(".") and len(summary) < 100


@pytest.mark.parametrize("verb_name", cli.VERBS)
def test_every_verb_has_json_and_help(verb_name, capsys):
    assert cli.main([verb_name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_python_dash_m_works_without_torch():
    program = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
    program += "sys.argv = ['fullstride', '--version']\n"
    program += "import runpy; runpy.run_module('fullstride', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env={**os.environ})
    assert done.returncode == 0 and fullstride.__version__ in done.stdout
