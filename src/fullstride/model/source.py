"""Where a model comes from: a preset, a `config.json`, a model directory, or a function that returns an nn.Module."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fullstride.errors import BadInput
from fullstride.files import read_bytes
from fullstride.model.config import spec_from_config
from fullstride.model.presets import PRESETS, preset_config
from fullstride.model.spec import ModelSpec

_MODULE = re.compile(r"(?:.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")


def is_module_source(source: str) -> bool:
    """Whether it has the form `file.py:function` or `package.module:function`, which only the engine can read."""
    return source not in PRESETS and bool(_MODULE.fullmatch(source)) and not Path(source).exists()


def config_of(source: str) -> dict[str, Any] | None:
    """The Hugging Face configuration behind a source; None for `file.py:function`.

    Raises:
        BadInput: no such preset or path, a directory without `config.json`, or a file that is not JSON.
    """
    if source in PRESETS:
        return preset_config(source)
    if is_module_source(source):
        return None
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInput(f"{source}: has no config.json", fix="give a model directory as transformers writes it")
    elif not path.exists():
        raise BadInput(
            f"{source!r} is no preset and no file", fix=f"presets: {', '.join(PRESETS)}; or give a config.json or a directory"
        )
    return _text_config(_decoded(path), str(path))


def load_spec(source: str) -> ModelSpec:
    """The ModelSpec of a preset, a `config.json` or a model directory.

    Raises:
        BadInput: as `config_of` and `spec_from_config`; and for `file.py:function`, which needs the engine.
    """
    config = config_of(source)
    if config is None:
        raise BadInput(
            f"{source}: is a function that returns a module, which has to be run to be read",
            fix=f"run `python -m fullstride.engine.inspect {source} model.json`",
        )
    return spec_from_config(config, source)


def _decoded(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_bytes(path))
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{path}: is not JSON ({error})", fix="check that the file is complete") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{path}: holds a {type(raw).__name__}, not a table of settings", fix="give a config.json")
    return raw


def _text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's own table: `gemma3` and its like hold it one level down beside a vision tower."""
    if config.get("model_type") == "gemma3":
        raise BadInput(
            f"{where}: model_type 'gemma3' has a vision tower, which is not planned",
            fix="give the config.json of its text model (model_type gemma3_text)",
        )
    return config
