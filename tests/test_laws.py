"""The laws of the design that can be read off the source: direction, torch-free rooms, sizes, exports, docstrings."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "fullstride"
FILES = sorted(SRC.rglob("*.py"))

# Rooms from left to right: a room may import what stands on a level to its left, and itself.
LEVELS = [
    {"errors"},
    {"units"},
    {"files"},
    {"events", "rundir"},
    {"report"},
    {"cluster", "model"},
    {"plan"},
    {"measure", "engine"},
    {"doctor"},
    {"launch"},
    {"tune"},
    {"cli"},
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FILES = {"cluster/linkbench.py"}

LONGEST_FILE = 600
LONGEST_FUNCTION = 80


def room_of(path):
    first = path.relative_to(SRC).parts[0]
    return first.removesuffix(".py")


def imports_of(path):
    """Modules that a file imports anywhere, inside functions too; only for typing does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_follow_the_direction(path):
    room = room_of(path)
    if room in {"testing", "__init__", "__main__"}:
        return
    for module, line in imports_of(path):
        parts = module.split(".")
        if parts[0] != "fullstride" or len(parts) == 1:
            continue
        target = parts[1]
        assert target != "testing", f"{path}:{line}: testing is for tests"
        if target == room:
            continue
        assert target != "engine", f"{path}:{line}: nothing outside engine/ imports it"
        assert LEVEL[target] < LEVEL[room], f"{path}:{line}: {room} may not import {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_engine_imports_torch(path):
    relative = str(path.relative_to(SRC))
    if relative.startswith(("engine/", "testing/")) or relative in TORCH_FILES:
        return
    heavy = {"torch", "transformers", "tokenizers", "safetensors"}
    found = [f"{module} at line {line}" for module, line in imports_of(path) if module.split(".")[0] in heavy]
    assert not found, f"{relative}: {found}"


def test_the_torch_free_rooms_import_with_torch_blocked():
    modules = []
    for path in FILES:
        relative = path.relative_to(SRC)
        if relative.parts[0] in {"engine", "testing"} or str(relative) in TORCH_FILES or relative.name == "__main__.py":
            continue
        modules.append(".".join(("fullstride", *relative.with_suffix("").parts)).removesuffix(".__init__"))
    program = "import sys\nfor m in ('torch','transformers'): sys.modules[m] = None\n"
    program += "\n".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_sizes(path):
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE, f"{path} is too long: it holds two ideas"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{path}:{node.lineno}: {node.name} has {length} lines"


def test_nearly_all_functions_are_short_and_files_too():
    lengths, sizes = [], []
    for path in FILES:
        text = path.read_text()
        sizes.append(text.count("\n"))
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths += [node.end_lineno - node.lineno + 1 for node in nodes]
    assert sum(length <= 40 for length in lengths) >= 0.95 * len(lengths)
    assert sum(size < 400 for size in sizes) >= 0.9 * len(sizes)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"


@pytest.mark.parametrize("path", [p for p in FILES if p.name == "__init__.py"], ids=lambda p: str(p.relative_to(SRC)))
def test_exports_are_complete(path):
    """A door exports what it imports, and says so in __all__."""
    tree = ast.parse(path.read_text())
    imported = {
        a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names if n.module != "__future__"
    }
    exported = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            exported = {ast.literal_eval(item) for item in node.value.elts}
    if path.parent != SRC:
        assert imported == exported, f"{path}: imports {imported}, exports {exported}"
