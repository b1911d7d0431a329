"""Enough of a shell to find out with which words a launch script calls its program.

Read are: quotes, comments, continued lines, variables (`$A`, `${A}`, `${A:-default}`), arrays (`A=(...)`, `A+=(...)`,
`${A[@]}`), arithmetic (`$((A*B))`), `export`, and `if` on tests that the script decides by itself. Nothing is run. A variable
that the script does not set stays in the text as `$NAME`, so that whoever needs its value can say which one is missing.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Piece: TypeAlias = tuple[str, Literal["", "'", '"']]
"""A part of a word, and how it is quoted."""
Word: TypeAlias = tuple[Piece, ...]
Token: TypeAlias = Word | str
"""A word, or an operator such as `;` or `&&`."""

_OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", ">>", "<", ">", ";", "|", "&", "(", ")")
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class Script:
    """What a script came to."""

    variables: dict[str, str | list[str]] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    """Every command that would be called, its words expanded."""


def read_script(text: str) -> Script:
    """Follow a script from top to bottom."""
    script = Script()
    _run(list(_statements(list(_tokens(text)))), script)
    return script


def _tokens(text: str) -> Iterator[Token]:
    """Words and operators; a newline is `;`; heredocs are left out."""
    at, pieces, heredocs = 0, list[Piece](), list[str]()
    while at < len(text):
        char = text[at]
        if text.startswith("\\\n", at):
            at += 2
        elif char == "#" and not pieces:
            at = _line_end(text, at)
        elif char in " \t\r\n" or (sign := _operator_at(text, at)):
            array = char == "(" and bool(pieces) and pieces[-1][1] == "" and pieces[-1][0].endswith("=")
            if pieces:
                yield tuple(pieces)
                pieces = []
            if char == "\n":
                at = _after_heredocs(text, at + 1, heredocs)
                yield ";"
            elif char in " \t\r":
                at += 1
            else:
                yield "=(" if array else sign
                at += len(sign)
                if sign in ("<<", "<<-"):
                    heredocs.append(re.match(r"\s*['\"]?(\w*)", text[at:]).group(1))  # type: ignore[union-attr]
        else:
            piece, at = _piece(text, at)
            pieces.append(piece)
    if pieces:
        yield tuple(pieces)
    yield ";"


def _operator_at(text: str, at: int) -> str:
    return next((sign for sign in _OPERATORS if text.startswith(sign, at)), "")


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _after_heredocs(text: str, at: int, waiting: list[str]) -> int:
    while waiting:
        found = re.compile(rf"^\s*{re.escape(waiting.pop(0))}\s*$", re.MULTILINE).search(text, at)
        at = found.end() if found else len(text)
    return at


def _piece(text: str, at: int) -> tuple[Piece, int]:
    """One quoted or unquoted stretch of a word, from `at`; and where it ends."""
    char = text[at]
    if char == "'":
        end = text.find("'", at + 1)
        end = len(text) if end < 0 else end
        return (text[at + 1 : end], "'"), end + 1
    if char == '"':
        end = at + 1
        while end < len(text) and text[end] != '"':
            end = _substitution_end(text, end) if text[end] in "$`" else end + (2 if text[end] == "\\" else 1)
        inner = re.sub(r"\\(\n|[\"\\$`])", lambda found: "" if found[1] == "\n" else found[1], text[at + 1 : end])
        return (inner, '"'), end + 1
    end = at
    while end < len(text) and text[end] not in " \t\r\n'\"" and not _operator_at(text, end):
        end = _substitution_end(text, end) if text[end] in "$`" else end + (2 if text[end] == "\\" else 1)
    return (re.sub(r"\\(.)", r"\1", text[at:end], flags=re.DOTALL), ""), max(end, at + 1)


def _substitution_end(text: str, at: int) -> int:
    """Behind `${...}`, `$(...)`, `$((...))` or a pair of backticks that begins at `at`; one further where none does."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return len(text) if end < 0 else end + 1
    pair = {"{": "}", "(": ")"}.get(text[at + 1 : at + 2], "")
    if not pair:
        return at + 1
    depth, end = 1, at + 2
    while end < len(text) and depth:
        depth += {text[at + 1]: 1, pair: -1}.get(text[end], 0)
        end += 1
    return end


def _statements(tokens: list[Token]) -> Iterator[list[Token]]:
    """Tokens up to each separator; the separator stands at the end of each."""
    now, depth = list[Token](), 0
    for token in tokens:
        depth += (token == "=(") - (token == ")" and depth > 0)
        if token in (";", "&&", "||", "|", "&", ";;") and depth == 0:
            if now:
                yield [*now, token]
            now = []
        elif not (depth and token == ";"):
            now.append(token)


def _literal(token: Token) -> str:
    """An unquoted plain word, else nothing: only such are reserved words."""
    return token[0][0] if isinstance(token, tuple) and len(token) == 1 and token[0][1] == "" else ""


_OPENS, _CLOSES = {"if", "for", "while", "until", "case"}, {"fi", "done", "esac"}


def _run(statements: list[list[Token]], script: Script) -> None:
    """Follow statements; the branches of an `if` as the script decides them, loops once, `case` not at all."""
    branches: list[bool | None] = []  # of each open if: taken so far, or None where it is left out as a whole
    live: list[bool] = []
    skipped_case = 0
    at = 0
    while at < len(statements):
        words, at = statements[at][:-1], at + 1
        head = _literal(words[0]) if words else ""
        if skipped_case or head == "case":
            skipped_case += (head == "case") - (head == "esac")
            continue
        if head in ("if", "elif"):
            condition = [words[1:]]
            joints = [statements[at - 1][-1]]
            while at < len(statements) and _literal(statements[at][0]) != "then":
                condition.append(statements[at][:-1])
                joints.append(statements[at][-1])
                at += 1
            holds = _test(condition, joints, script)
            if head == "if":
                branches.append(False)
                live.append(False)
            live[-1] = not branches[-1] and holds
            branches[-1] = bool(branches[-1]) or holds
            continue
        if head == "else" and live:
            live[-1], branches[-1] = not branches[-1], True
        elif head == "fi" and live:
            live.pop()
            branches.pop()
            continue
        if head in ("then", "else", "do", "{", "}", "fi", "done", "esac"):
            words = words[1:]
        elif head in ("for", "while", "until", "function"):
            continue
        if words and all(live):
            nested = _literal(words[0])
            if nested in _OPENS:
                statements.insert(at, [*words, ";"])
            else:
                _command(words, script)


def _test(parts: list[list[Token]], joints: list[Token], script: Script) -> bool:
    """Whether tests joined by && and || hold; one that cannot be decided does not."""
    result, joint = True, "&&"
    for words, after in zip(parts, joints, strict=True):
        one = _one_test([field for word in words for field in _fields(word, script, blank=True)])
        result = (result and one) if joint == "&&" else (result or one)
        joint = str(after)
    return result


def _one_test(words: list[str]) -> bool:
    words = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
    if words[:1] == ["!"]:
        return not _one_test(words[1:])
    if len(words) == 3:
        left, sign, right = words
        if sign in ("=", "=="):
            return left == right
        if sign == "!=":
            return left != right
        compare = {"-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt}
        compare["-le"] = operator.le
        if sign in compare and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            return bool(compare[sign](int(left), int(right)))
    if words[:1] == ["-n"]:
        return len(words) > 1 and words[1] != ""
    if words[:1] == ["-z"]:
        return len(words) < 2 or words[1] == ""
    return False


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


def _command(words: list[Token], script: Script) -> None:
    """One simple command: assignments, or words to call."""
    export = _literal(words[0]) in ("export", "local", "declare", "readonly")
    words = words[1:] if export else words
    at = 0
    while at < len(words):
        word = words[at]
        match = _ASSIGNMENT.match(word[0][0]) if isinstance(word, tuple) and word[0][1] == "" else None
        if match is None:
            break
        at += 1
        name, adds = match[1], bool(match[2])
        if at < len(words) and words[at] == "=(":
            end = words.index(")", at) if ")" in words[at:] else len(words)
            values = [field for item in words[at + 1 : end] if isinstance(item, tuple) for field in _fields(item, script)]
            old = script.variables.get(name, []) if adds else []
            script.variables[name] = [*([old] if isinstance(old, str) else old), *values]
            at = end + 1
            continue
        assert isinstance(word, tuple)
        rest: Word = ((word[0][0][match.end() :], ""), *word[1:])
        value = "".join(" ".join(_expand(text, quote, script, split=False)) for text, quote in rest)
        before = script.variables.get(name, "") if adds else ""
        script.variables[name] = (before if isinstance(before, str) else " ".join(before)) + value
        if export:
            script.exported[name] = value
    called = [field for word in words[at:] if isinstance(word, tuple) for field in _fields(word, script)]
    if called and not export:
        script.commands.append(called)


def _fields(word: Token, script: Script, *, blank: bool = False) -> list[str]:
    """The words that one written word becomes. With `blank`, an unset variable is empty instead of standing as it is."""
    if isinstance(word, str):
        return [word]
    fields, open_ = list[str](), False
    for text, quote in word:
        parts = _expand(text, quote, script, split=quote == "", blank=blank)
        if not parts and quote == "":
            continue
        first, *rest = parts or [""]
        if open_:
            fields[-1] += first
        else:
            fields.append(first)
        fields += rest
        open_ = True
    return fields


_VARIABLE = re.compile(r"\$\(\((.*?)\)\)|\$\(|`|\$\{([^}]*)\}|\$([A-Za-z_]\w*|[0-9@*#?])", re.DOTALL)
_BRACED = re.compile(r"(!?[A-Za-z_]\w*|[0-9@*#]+)(?:\[([@*]|\d+)\])?(?:(:?[-=])(.*))?\Z", re.DOTALL)


def _expand(text: str, quote: str, script: Script, *, split: bool, blank: bool = False) -> list[str]:
    """The fields of one piece; unquoted ones are split at blanks."""
    if quote == "'":
        return [text]
    fields, at, after_blank = [""], 0, False
    for match in _VARIABLE.finditer(text):
        if match[0] in ("$(", "`"):
            break
        fields[-1] += text[at : match.start()]
        values, listed = _value(match, script, blank)
        at = match.end()
        pieces = values if listed else [" ".join(values)]
        if split:
            pieces = [piece for value in values for piece in (_split(value) if listed else value.split())]
        if pieces:
            fields[-1] += pieces[0]
            fields += pieces[1:]
        after_blank = not pieces
    fields[-1] += text[at:]
    if fields == [""] and after_blank:
        return [] if split else [""]
    return fields


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value) if " " in value else [value]
    except ValueError:
        return value.split()


def _value(match: re.Match[str], script: Script, blank: bool) -> tuple[list[str], bool]:
    """What a `$...` stands for, and whether it is a whole array."""
    if match[1] is not None:
        result = _arithmetic(match[1], script)
        return [match[0] if result is None else str(result)], False
    name, index, sign, default = (match[3], None, None, None)
    if match[2] is not None:
        braced = _BRACED.match(match[2])
        if braced is None:
            return ["" if blank else match[0]], False
        name, index, sign, default = braced[1], braced[2], braced[3], braced[4]
    value = script.variables.get(name)
    if value is None or (value == "" and sign in (":-", ":=")):
        if sign is None:
            return ["" if blank else match[0]], False
        text = (default or "").strip("\"'")
        return [" ".join(_expand(text, '"', script, split=False, blank=blank))], False
    if isinstance(value, str):
        return [value], False
    if index in ("@", "*"):
        return value, True
    at = int(index or 0)
    return [value[at] if at < len(value) else ""], False


def _arithmetic(text: str, script: Script) -> int | None:
    plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
    try:
        return _number(ast.parse(plain.replace("/", "//"), mode="eval").body, script)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr, script: Script) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        value = script.variables.get(node.id)
        return int(value if isinstance(value, str) else "")
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_number(node.left, script), _number(node.right, script))
    raise ValueError
