"""What a verb is: a name, a docstring that is its help, its options, and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn, Protocol

from fullstride.cli.output import Output
from fullstride.errors import BadInput, UsageError
from fullstride.files import convert
from fullstride.plan.plan import Adapter, ModelRef

PARTS = ("embedding", "blocks", "final_norm", "head")


class Command(Protocol):
    """One verb. The class docstring is its help: the first line is the summary, the rest the description."""

    name: str

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the verb's options."""

    def run(self, args: argparse.Namespace, out: Output) -> int:
        """Do it; return the exit code, or raise an error of the tree."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors of ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` instead of printing the usage and leaving."""
        raise UsageError(message, fix=f"see {self.prog} --help")


def positive(text: str) -> int:
    """An option's value that counts something: 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def minutes(text: str) -> float:
    """A length of time in minutes, above 0."""
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return number


def add_lora(parser: argparse.ArgumentParser) -> None:
    """The option of every verb that makes a plan from a model."""
    parser.add_argument(
        "--lora", type=adapter, metavar="RANK", help="train low-rank adapters of this rank alone, beside frozen weights"
    )


def add_parts(parser: argparse.ArgumentParser) -> None:
    """The option of every verb that makes a plan from a model of the user's own."""
    parser.add_argument(
        "--part",
        action="append",
        default=[],
        metavar="PART=PATH",
        help="where a part of your own model is: embedding=, blocks= (a list, or b0,b1,... one by one), final_norm=, head=",
    )


def model_of(source: str, parts: list[str]) -> ModelRef:
    """A model with the parts that `--part` names.

    Raises:
        UsageError: not of the form PART=PATH, no such part, or one of them twice.
    """
    named: dict[str, str | tuple[str, ...]] = {}
    for given in parts:
        part, equals, path = given.partition("=")
        if not equals or not path or part not in PARTS or part in named:
            raise UsageError(
                f"--part {given!r}: not one of {', '.join(PARTS)}, once each, with a path", fix="write --part head=net.out"
            )
        one_by_one = part == "blocks" and "," in path
        named[part] = tuple(name for name in path.split(",") if name) if one_by_one else path
    return convert({"source": source, **named}, ModelRef, "--part") if named else ModelRef(source=source)


def adapter(text: str) -> Adapter:
    """Adapters of a rank, beside the products that plans adapt by default."""
    return Adapter(rank=positive(text))


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every verb has."""
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout, all else on stderr")


def add_dry_run(parser: argparse.ArgumentParser, what: str) -> None:
    """The option of every verb that launches or writes."""
    parser.add_argument("--dry-run", action="store_true", help=f"say what would be {what}, and stop")


def refuse_existing(path: Path) -> None:
    """Nothing is overwritten silently.

    Raises:
        BadInput: something is there already.
    """
    if path.exists():
        raise BadInput(f"{path}: is there already", fix="choose another place with -o, or move it away")
