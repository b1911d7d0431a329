"""What the docs say is true: examples run or parse, command lines are accepted, links lead somewhere, pages match the code."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fullstride.cli.main import VERBS, build_parser
from fullstride.files import convert
from fullstride.plan.plan import Plan
from fullstride.plan.rules import check

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(language):
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            if match["language"] == language:
                line = page.read_text()[: match.start("body")].count("\n") + 1
                yield pytest.param(match["body"], match["reason"], id=f"{page.relative_to(ROOT)}:{line}")


def commands():
    """Command lines of fullstride in console and bash blocks: (words, where)."""
    for language in ("console", "bash"):
        for block in blocks(language):
            for line in block.values[0].splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                shown = language == "bash" or line.startswith("$ ")
                starts = [n for n, word in enumerate(words) if word in ("fullstride", ".venv/bin/fullstride")]
                if shown and starts:
                    yield pytest.param(words[starts[0] + 1 :], id=f"{block.id} {line[:60]}")


def test_there_is_something_to_check():
    assert len(PAGES) >= 11
    assert len(list(blocks("python"))) >= 3
    assert len(list(blocks("toml"))) >= 2
    assert len(list(commands())) >= 15


@pytest.mark.parametrize(("body", "reason"), list(blocks("python")))
def test_python_examples_run(body, reason, tmp_path):
    ast.parse(body)
    if reason:
        assert len(reason) > 10, "say why it is not run"
        return
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize(("body", "reason"), list(blocks("toml")))
def test_toml_examples_are_plans_that_the_rules_allow(body, reason):
    plan = convert(tomllib.loads(body), Plan, "the example")
    assert check(plan) == ()


@pytest.mark.parametrize("words", list(commands()))
def test_command_lines_are_accepted(words):
    if words[:1] == ["--version"] or words[:1] == ["--help"]:
        return
    assert words[0] in VERBS, f"{words[0]} is no verb"
    build_parser([words[0]]).parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://", "#")):
            continue
        path, _, anchor = target.partition("#")
        assert (page.parent / path).exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", (page.parent / path).read_text(), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{page.name}: {target}"


def test_generated_pages_match_the_code():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert [path.name for path in generate.stale()] == [], "run `make docs-write`"


def test_make_targets_named_in_the_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", page.read_text(), re.M))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_both_readmes_show_the_same_commands():
    english, chinese = (
        [m["body"] for m in BLOCK.finditer((ROOT / name).read_text()) if m["language"] in ("console", "python", "bash")]
        for name in ("README.md", "README.zh-CN.md")
    )
    strip = lambda bodies: [re.sub(r"\s*#.*", "", body) for body in bodies]  # noqa: E731  (comments are translated)
    assert strip(english) == strip(chinese)
    headings = [re.findall(r"^(#+) ", (ROOT / name).read_text(), re.M) for name in ("README.md", "README.zh-CN.md")]
    assert headings[0] == headings[1]
