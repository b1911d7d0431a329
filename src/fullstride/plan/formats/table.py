"""Option tables: what each of a framework's settings means for a plan, or why it means nothing to one.

A table is a dictionary from the framework's own name to a `Row`. `carry` walks over what a file holds, so that every
setting ends in exactly one of three places: an entry (of the plan, of the model's configuration, or a fact that a reader
combines with others), the list of what is not carried, or (values in `same`) nowhere because a plan means that anyway.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fullstride.errors import BadInput
from fullstride.plan.formats.imported import NotCarried

AUTO = "auto"
"""What DeepSpeed's users write where another program is to fill in the value."""
_UNKNOWN = "fullstride knows no such setting"


@dataclass(frozen=True)
class Row:
    """What one setting becomes."""

    target: str = ""
    """`layout.tp` (an entry of the plan), `config:hidden_size` (of the model), `fact:micro`; empty when it is not carried."""
    kind: type = str
    """What its value is: int, float, bool, str, list or dict."""
    words: Mapping[Any, Any] | None = None
    """Translation of its values; those not named are not carried."""
    why: str = ""
    """Why it, or a value without a translation, is not carried."""
    same: tuple[Any, ...] = ()
    """Values that ask for nothing that a plan does not do anyway."""
    matters: bool = True


def to(entry: str, kind: type = int, words: Mapping[Any, Any] | None = None, why: str = "") -> Row:
    """A setting that is an entry of the plan."""
    return Row(target=entry, kind=kind, words=words, why=why or f"no value of {entry} means this")


def fact(name: str, kind: type = int) -> Row:
    """A setting that a reader combines with others."""
    return Row(target=f"fact:{name}", kind=kind)


def config(name: str, kind: type = int) -> Row:
    """A setting that describes the model, by its Hugging Face name."""
    return Row(target=f"config:{name}", kind=kind)


def lost(why: str, *same: Any) -> Row:
    """A setting that a plan cannot say; `same` are values at which nothing is lost."""
    return Row(why=why, same=same)


def aside(why: str) -> Row:
    """A setting that decides neither time nor memory nor what is learned."""
    return Row(why=why, matters=False)


Table = Mapping[str, Row]
T = TypeVar("T")


class Facts(dict[str, Any]):
    """Facts by name, that know which of them were asked for."""

    def __init__(self) -> None:
        """Nothing known, nothing asked."""
        super().__init__()
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The fact, or the default."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """Take a fact away."""
        self.asked.add(key)
        return super().pop(key, *default)


@dataclass
class Draft:
    """What has been read so far."""

    where: str
    entries: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    origin: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Key and value in the file, of each fact."""
    autos: set[str] = field(default_factory=set)
    """What the file leaves for another program to fill in."""
    left: list[NotCarried] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    model_name: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    """Of a Megatron GPT: the fields of `MegatronShape`."""
    config_notes: list[str] = field(default_factory=list)
    """What `config` cannot say of the model, in words."""
    unset: dict[str, str] = field(default_factory=dict)
    """Sizes given as variables that the file does not set, by the fact they are."""
    filled_in: bool = False
    """Whether `auto` means that another program fills the value in, as with DeepSpeed."""

    def leave(self, key: str, value: Any, why: str, *, matters: bool = True) -> None:
        """Put a setting on the list of what is not carried."""
        self.left.append(NotCarried(key=key, value=shown(value), why=why, matters=matters))

    def get(self, name: str, default: T) -> T:
        """A fact, or its default."""
        value: T = self.facts.get(name, default)
        return value

    def default(self, entry: str, value: Any) -> None:
        """What the framework does where the file says nothing; not where it leaves the value to another program."""
        if entry not in self.autos:
            self.entries.setdefault(entry, value)

    def leave_unasked(self) -> None:
        """List the facts that nothing asked for, such as settings of a part that is switched off."""
        for name, (key, value) in self.origin.items():
            if name not in self.facts.asked:
                self.leave(key, value, "has no effect beside the rest of the file", matters=False)

    def bad(self, what: str, fix: str) -> BadInput:
        """An error that names the file."""
        return BadInput(f"{self.where}: {what}", fix=fix)


def shown(value: Any) -> str:
    """A value as the user wrote it, near enough."""
    if value is True or value is False:
        return str(value).lower()
    if value is None:
        return "null"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def carry(table: Table, leaves: Mapping[str, Any], draft: Draft) -> None:
    """Put every leaf where its row says.

    Raises:
        BadInput: a value is not of its kind, or a name is nearly that of a setting and no setting.
    """
    for key, value in leaves.items():
        row = table.get(key)
        if row is not None and not row.target and isinstance(value, Mapping) and value:
            for path, leaf in flatten(value, {}, f"{key}.").items():  # a section that is one thing, whatever stands in it
                draft.leave(path, leaf, row.why, matters=row.matters)
        elif row is None:
            refuse_misspelling(key, table, draft)
            draft.leave(key, value, _UNKNOWN)
        elif value == AUTO and draft.filled_in:
            draft.leave(key, value, "left for another program to fill in", matters=bool(row.target) or row.matters)
            draft.autos.add(row.target)
        elif row.target:
            _carry_one(key, value, row, draft)
        elif not any(value == same and type(value) is type(same) for same in row.same):
            draft.leave(key, value, row.why, matters=row.matters)


def _carry_one(key: str, value: Any, row: Row, draft: Draft) -> None:
    if value is None:
        return
    if isinstance(value, str) and "$" in value and row.kind is bool:
        value = True  # a flag, followed by a variable that is empty
    if isinstance(value, str) and "$" in value and row.kind in (int, float):
        draft.unset[row.target.removeprefix("fact:")] = value
        draft.leave(key, value, "a variable that the file does not set")
        return
    typed = of_kind(key, value, row.kind, draft)
    if row.words is not None:
        if typed not in row.words:
            draft.leave(key, value, row.why, matters=row.matters)
            return
        typed = row.words[typed]
    place, _, name = row.target.rpartition(":")
    if place == "fact":
        draft.origin[name] = (key, value)
    {"": draft.entries, "config": draft.config, "fact": draft.facts}[place][name] = typed


_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_CALLED = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", list: "a list", dict: "a table"}


def of_kind(key: str, value: Any, kind: type, draft: Draft) -> Any:
    """A value as its kind: text from a script becomes a number, 1e9 a whole one.

    Raises:
        BadInput: it is of another kind; names key and value.
    """
    try:
        return _KINDS[kind](value)
    except (ValueError, TypeError, OverflowError):
        raise draft.bad(f"{key} is {shown(value)}, which is not {_CALLED[kind]}", "correct that value") from None


def _int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise ValueError
    if isinstance(value, str) and not value.strip().lstrip("+-").isdigit():
        value = float(value)
        if value != int(value):
            raise ValueError
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _bool(value: Any) -> bool:
    if isinstance(value, str):
        if value.lower() in _TRUE + _FALSE:
            return value.lower() in _TRUE
        raise ValueError
    if value in (0, 1):
        return bool(value)
    raise ValueError


def _exactly(kind: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return check


def _str(value: Any) -> str:
    if isinstance(value, dict | list):
        raise TypeError
    return shown(value) if isinstance(value, bool) else str(value)


_KINDS: dict[type, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    bool: _bool,
    str: _str,
    list: _exactly(list),
    dict: _exactly(dict),
}


def refuse_misspelling(key: str, known: Collection[str], draft: Draft) -> None:
    """Refuse a name that is nearly a setting's: the framework would refuse it or, worse, ignore it.

    Raises:
        BadInput: names both.
    """
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.9)
    if near:
        raise draft.bad(f"{key} is no setting, {near[0]} is", fix="correct that name")


def flatten(raw: Mapping[str, Any], table: Table, prefix: str = "") -> dict[str, Any]:
    """Leaves of nested tables by dotted path; a path that the table names is a leaf whatever it holds."""
    leaves: dict[str, Any] = {}
    for key, value in raw.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path not in table:
            leaves |= flatten(value, table, f"{path}.")
        elif value != {} or path in table:
            leaves[path] = value
    return leaves


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`: `{"a.b": 1}` becomes `{"a": {"b": 1}}`."""
    raw: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        table = raw
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = value
    return raw
