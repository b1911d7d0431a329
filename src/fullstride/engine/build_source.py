"""`file.py:function` and `package.module:function`: the user's own code that makes a model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fullstride.errors import BadInput


def load_factory(source: str) -> Callable[[], nn.Module]:
    """The function that a source names; calling it makes the model.

    The file is run once. What the function itself raises comes out as BadInput with its one-line cause; so does a result that
    is no `nn.Module`.

    Args:
        source: `file.py:function` or `package.module:function`; the function takes no arguments it does not have defaults for.

    Raises:
        BadInput: no such file, module or function; the code fails while it is imported; the function needs arguments.
    """
    place, _, name = source.rpartition(":")
    if not place or not name:
        raise BadInput(f"{source!r} names no function", fix="write file.py:function or package.module:function")
    module = _load_file(Path(place), source) if place.endswith(".py") else _load_module(place, source)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise BadInput(f"{source}: {place} has no {name}", fix=_offer(module))
    if not callable(found):
        raise BadInput(f"{source}: {name} is a {type(found).__name__}, expected a function", fix="name a function")
    _check_arguments(found, source)

    def make() -> nn.Module:
        try:
            model = found()
        except BadInput:
            raise
        except Exception as error:  # the user's code may raise anything
            raise BadInput(f"{source}: {_cause(error)}", fix="correct the function; it must run without arguments") from error
        if not isinstance(model, nn.Module):
            raise BadInput(f"{source}: returned a {type(model).__name__}, expected an nn.Module", fix="return the model")
        return model

    return make


def _load_file(path: Path, source: str) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"{source}: no such file {path}", fix="check the path")
    name = f"fullstride_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # its neighbours, as when the file itself is run
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything
        del sys.modules[name]
        raise BadInput(f"{source}: {_cause(error)}", fix="the file must run by itself") from error
    return module


def _load_module(name: str, source: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise BadInput(f"{source}: no module {missing}", fix="check the name, or give a path: file.py:function") from error
        raise BadInput(f"{source}: {_cause(error)}", fix=f"install {missing}") from error
    except Exception as error:  # the user's code may raise anything
        raise BadInput(f"{source}: {_cause(error)}", fix="the module must import by itself") from error


def _check_arguments(found: Callable[..., Any], source: str) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # built-ins without one: calling tells
        return
    needed = [
        p.name
        for p in signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise BadInput(f"{source}: needs {', '.join(needed)}, is called without arguments", fix="give them defaults")


def _offer(module: ModuleType) -> str:
    names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__ and n[0] != "_"]
    return f"it has {', '.join(names[:8])}" if names else "define the function there"


def _cause(error: BaseException) -> str:
    """One line: the type, the first line of the message, and the last line of the user's code."""
    text = str(error).strip().splitlines()
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = f" at {Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}" if frame is not None else ""
    return f"{type(error).__name__}: {text[0] if text else 'no message'}{where}"
