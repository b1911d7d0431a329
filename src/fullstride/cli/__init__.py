"""The command line: one file a verb."""

from fullstride.cli.command import Command

__all__ = ["Command"]
