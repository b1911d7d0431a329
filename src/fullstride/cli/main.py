"""The `fullstride` command: finds the verb, runs it, turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc

from fullstride import __version__
from fullstride.cli.command import Command, Parser, add_json
from fullstride.cli.output import Output
from fullstride.errors import FullstrideError, Interrupted

VERBS = ("probe", "plan", "explain", "convert", "validate", "train", "bench", "compare", "tune", "report")
"""In the order of the help; verb `x` is the `VERB` of `cli/x.py`, imported only when it is called."""

_ABOUT = "Plan, run, measure, explain and tune distributed training of large language models, with your model unchanged."
_EXITS = """exit codes:
  0 good   2 usage   3 bad input   4 does not fit   5 environment   6 run failed   7 timed out
  8 fault found   9 undetermined   130 interrupted   1 a mistake of fullstride's own"""


def command_of(verb: str) -> Command:
    """The object behind a verb."""
    command: Command = import_module(f"fullstride.cli.{verb}").VERB
    return command


def build_parser(verbs: Sequence[str] = VERBS) -> Parser:
    """The parser of the whole command, or of some verbs only (a verb's imports are paid when it is named)."""
    parser = Parser("fullstride", description=_ABOUT, epilog=_EXITS, allow_abbrev=False, formatter_class=_formatter())
    parser.add_argument("--version", action="version", version=f"fullstride {__version__}")
    places = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb in verbs:
        command = command_of(verb)
        text = cleandoc(type(command).__doc__ or "")
        summary = text.partition("\n")[0]
        place = places.add_parser(verb, help=summary, description=text, allow_abbrev=False, formatter_class=_formatter())
        command.arguments(place)
        add_json(place)
        place.set_defaults(command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name; those of the process when None.

    Returns:
        The exit code; no error leaves as a traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words and words[0] in VERBS else ""
    out = Output(json="--json" in words)
    name = f"fullstride {verb}".rstrip()
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a polite kill cleans up as Ctrl-C does
        args = build_parser(_needed(verb, words)).parse_args(words)
        return int(args.command.run(args, out))
    except SystemExit as leave:  # --help and --version
        return int(leave.code or 0)
    except FullstrideError as error:
        out.fail(f"{name}: error: {error}", error.message, error.fix, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        out.fail(f"{name}: interrupted", "interrupted", "", Interrupted.exit_code)
        return Interrupted.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        place = _write_traceback()
        line = f"{name}: error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        out.fail(f"{line}; this is a mistake of fullstride's own, the traceback is in {place}", line, place, 1)
        return 1


def _needed(verb: str, words: list[str]) -> Sequence[str]:
    if verb:
        return [verb]
    return () if words[:1] == ["--version"] else VERBS


def _write_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="fullstride-traceback-", suffix=".txt", delete=False) as file:
        file.write(f"fullstride {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    return file.name


def _formatter() -> type[argparse.RawDescriptionHelpFormatter]:
    return argparse.RawDescriptionHelpFormatter
