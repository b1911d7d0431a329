"""What can go wrong, as a tree; each branch has its exit code.

    FullstrideError
    ├── UsageError         2   the command line
    ├── BadInput           3   a file or value that the user gave
    │   └── RuleBroken     3   a Plan that `rules.py` forbids
    ├── DoesNotFit         4   the model needs more memory than there is
    ├── EnvironmentFault   5   no GPU, no disk space, no permission, no compiler
    ├── RunFailed          6   a worker ended with an error
    ├── TimedOut           7   a wait ended; says what was waited for, and for whom
    ├── FaultFound         8   doctor found one
    ├── Undetermined       9   not enough evidence for an answer
    └── Interrupted      130   the user stopped it

A message has three parts: the value that was met, the rule it breaks, and the fix.
Failures inside a trial are values (`Failure`), because the tuner learns from them.
"""

from __future__ import annotations


class FullstrideError(Exception):
    """A user-facing error: one line to read, a fix to try, an exit code to return."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str = "") -> None:
        """Hold `message` (the value and the rule it breaks) and `fix` (what to do next)."""
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message


class UsageError(FullstrideError):
    """The command line asks for something that does not exist."""

    exit_code = 2


class BadInput(FullstrideError):
    """A file or value that the user gave cannot be used."""

    exit_code = 3


class RuleBroken(BadInput):
    """A Plan that the table of rules forbids; refused before anything is allocated."""


class DoesNotFit(FullstrideError):
    """The work needs more memory than the device has, under every allowed Plan."""

    exit_code = 4


class EnvironmentFault(FullstrideError):
    """The machine lacks something: a GPU, disk space, a permission, a compiler."""

    exit_code = 5


class RunFailed(FullstrideError):
    """A worker ended with an error of its own."""

    exit_code = 6


class TimedOut(FullstrideError):
    """A wait ended without an answer."""

    exit_code = 7


class FaultFound(FullstrideError):
    """The doctor found a fault."""

    exit_code = 8


class Undetermined(FullstrideError):
    """There is not enough evidence for an answer."""

    exit_code = 9


class Interrupted(FullstrideError):
    """The user stopped it."""

    exit_code = 130
