"""Write the parts of the docs that the code already says: the fields of a plan, the rules, the exit codes, the levers.

Run `python docs/generate.py` (or `make docs-write`) after a change; the tests compare the pages with the code.
A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import ast
import re
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from fullstride import errors
from fullstride.plan import plan as plan_module
from fullstride.plan.rules import rules_table
from fullstride.tune.levers import LEVERS

DOCS = Path(__file__).parent


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _table(columns: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)])


def _described(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, type and docstring of each annotated field of a class, in its order."""
    following = [*node.body[1:], None]
    for item, after in zip(node.body, following, strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            told = after.value if isinstance(after, ast.Expr) else None
            text = told.value if isinstance(told, ast.Constant) else ""
            yield item.target.id, ast.unparse(item.annotation), str(text)


def _values(annotation: str) -> str:
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        return ", ".join(f"`{part.strip().strip(chr(39))}`" for part in literal[1].split(","))
    named = getattr(plan_module, annotation, None)
    arguments = typing.get_args(named) if named is not None else ()
    return ", ".join(f"`{value}`" for value in arguments) if arguments else f"`{annotation}`"


def _default(part: type, name: str) -> str:
    for field, default in zip(reversed(part.__struct_fields__), reversed(part.__struct_defaults__), strict=False):
        if field == name:
            value = {} if type(default).__name__ == "Factory" else default
            return "empty" if value in ("", {}, ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    return "none: must be given"


def plan_fields() -> str:
    """A section for each part of the Plan: what it is, then a row for each entry."""
    tree = ast.parse(Path(plan_module.__file__).read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    sections = []
    for name, annotation, _ in _described(classes["Plan"]):
        node, part = classes[annotation], getattr(plan_module, annotation)
        rows = ((f"`{f}`", _values(kind), _default(part, f), text) for f, kind, text in _described(node))
        table = _table(("entry", "values", "default", "what it is"), rows)
        sections.append(f"### `[{name}]`\n\n{ast.get_docstring(node)}\n\n{table}")
    return "\n\n".join(sections)


def rules() -> str:
    """A row for each rule of the table."""
    return _table(("rule", "says", "what to do"), ((f"`{code}`", says, fix) for code, says, fix in rules_table()))


def exit_codes() -> str:
    """A row for each branch of the error tree."""
    kinds = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.FullstrideError)]
    told = {code: (cls.__doc__ or "").partition("\n")[0] for cls in reversed(kinds) for code in [cls.exit_code]}
    told |= {0: "Good.", 1: "A mistake of fullstride's own; the traceback is written to a file that the message names."}
    return _table(("exit code", "means"), ((code, told[code]) for code in sorted(told)))


def levers() -> str:
    """A row for each change that `tune` can make."""
    return _table(("lever", "goes after"), ((f"`{lever.name}`", lever.attacks) for lever in LEVERS))


PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "plan-file.md": ("fields", plan_fields),
    "rules.md": ("rules", rules),
    "getting-started.md": ("exit codes", exit_codes),
    "tuning.md": ("levers", levers),
}


def filled(page: str, name: str, content: str) -> str:
    """The page with the part of that name replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(begin)
    assert found and end in rest, f"the page has no part {name!r}"
    return f"{head}{begin}\n\n{content}\n\n{end}{rest.partition(end)[2]}"


def stale() -> dict[Path, str]:
    """Pages that differ from what the code says, with what they should hold."""
    found = {}
    for file, (name, make) in PARTS.items():
        path = DOCS / file
        wanted = filled(path.read_text(), name, make())
        if wanted != path.read_text():
            found[path] = wanted
    return found


if __name__ == "__main__":
    for page, text in stale().items():
        page.write_text(text)
        sys.stderr.write(f"wrote {page}\n")
