"""The ModelSpec of any source: read here where that needs no torch, else in a process of the engine's own."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fullstride.cluster.children import run_bounded
from fullstride.errors import BadInput, EnvironmentFault, TimedOut
from fullstride.files import read_json, write_json
from fullstride.model.source import is_module_source, load_spec
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import ModelRef

INSPECT_MODULE = "fullstride.engine.inspect"
INSPECT_SECONDS = 300.0
_ERROR = "error: "
"""How the reader begins the line in which it tells a user's mistake."""


def spec_of(model: str | ModelRef, *, timeout_seconds: float = INSPECT_SECONDS, module: str = INSPECT_MODULE) -> ModelSpec:
    """What a model is made of.

    Args:
        model: a preset, a `config.json`, a model directory, or `file.py:function` / `package.module:function`; as a reference,
            with the names of its parts.
        timeout_seconds: for building a module on the meta device.
        module: what reads modules.

    Raises:
        BadInput: the source is none of these, or its function fails.
        EnvironmentFault: the reader could not be run.
        TimedOut: it took too long.
    """
    named = ModelRef(source=model) if isinstance(model, str) else model
    source = named.source
    if not is_module_source(source):
        return load_spec(source)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.json"
        command = [sys.executable, "-m", module, source, str(out)]
        if named.named:
            told = Path(folder) / "named.json"
            write_json(told, named)
            command.append(str(told))
        code, output = run_bounded(command, timeout_seconds=timeout_seconds)
        if code is None:
            fix = "see whether the function downloads or computes something"
            raise TimedOut(f"waited {timeout_seconds:.0f} s for {source} to be built on the meta device", fix=fix)
        if code == 0 and out.exists():
            return read_json(out, ModelSpec)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = lines[-1] if lines else f"ended with status {code}"
    whole = said.startswith(_ERROR)  # then it names the source and the fix itself
    message = said.removeprefix(_ERROR) if whole else f"{source}: {said}"
    if code == EnvironmentFault.exit_code:
        raise EnvironmentFault(message)
    raise BadInput(message, fix="" if whole else "the function must return an nn.Module without arguments")
