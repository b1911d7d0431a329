"""Where a verb's words go: results on stdout, everything else on stderr, one object with `--json`."""

from __future__ import annotations

import sys
from typing import Any

from fullstride.report.document import Document
from fullstride.report.json_out import error_data, print_json


class Output:
    """A verb's way to speak: `note` and `warn` as it goes, then `show` once."""

    def __init__(self, *, json: bool = False) -> None:
        """With `json` the result is one object and nothing else may stand on stdout."""
        self.json = json
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        """Something to know on the way; never part of the result."""
        print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Something the user should act on; kept for the JSON object too."""
        self.warnings.append(text)
        self.note(f"warning: {text}")

    def show(self, document: Document | None, data: Any, kind: str = "") -> None:
        """The result, once: the document for a person, or `data` for a program.

        Args:
            document: What a person reads; None where the notes said it all.
            data: A file value, or anything JSON can hold; becomes `data` of the JSON object.
            kind: Says what `data` is where it is not a file value.
        """
        if self.json:
            print_json(data, kind=kind, warnings=self.warnings)
        elif document is not None:
            # The terminal's library costs a tenth of a second, which --json need not pay.
            from fullstride.report.terminal import print_document

            print_document(document)

    def fail(self, line: str, message: str, fix: str, exit_code: int) -> None:
        """An error: its line on stderr, and with `--json` an object of kind `error`."""
        self.note(line)
        if self.json:
            print_json(error_data(message, fix, exit_code), kind="error", warnings=self.warnings)
