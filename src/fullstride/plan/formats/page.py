"""What came over from another framework's file and what did not, for a person."""

from __future__ import annotations

from fullstride.plan.formats.imported import NAMES, Imported, NotCarried, Written
from fullstride.report.document import AnyBlock, Column, Document, Table, TableRow, Text

_COLUMNS = (Column(name="setting"), Column(name="value"), Column(name="why it stays behind"))


def left_blocks(left: tuple[NotCarried, ...], title: str) -> tuple[AnyBlock, ...]:
    """Settings that matter one a row, the others by reason; nothing where all was carried."""
    rows = [TableRow(cells=(one.key, one.value, one.why)) for one in left if one.matters]
    reasons: dict[str, list[str]] = {}
    for one in left:
        if not one.matters:
            reasons.setdefault(one.why, []).append(one.key)
    blocks = list[AnyBlock]()
    if rows:
        blocks.append(Table(title=title, columns=_COLUMNS, rows=tuple(rows)))
    if reasons:
        quiet = [TableRow(cells=(", ".join(keys), why), tone="quiet") for why, keys in reasons.items()]
        columns = (Column(name="setting"), Column(name="about"))
        blocks.append(Table(title="Not carried: logging, files, launching and the like", columns=columns, rows=tuple(quiet)))
    return tuple(blocks)


def carried_document(imported: Imported, written: Written | None = None) -> Document:
    """What was read, assumed and left behind; and with `written`, what of the plan the new file cannot say.

    Args:
        imported: The file that was read.
        written: The file that was made of it.
    """
    blocks = list[AnyBlock]()
    if imported.assumed:
        blocks += [Text(text=f"assumed: {line}") for line in imported.assumed]
    blocks += left_blocks(imported.not_carried, f"Not carried from the {NAMES[imported.kind]}")
    if written is not None:
        blocks += left_blocks(written.not_carried, f"In the plan, and not in the {NAMES[written.kind]}")
    if not imported.not_carried and not (written and written.not_carried):
        blocks.append(Text(text="Everything was carried over.", tone="good"))
    target = f" to {NAMES[written.kind]}" if written else ""
    return Document(title=f"{imported.where}: {NAMES[imported.kind]}{target}", blocks=tuple(blocks))
