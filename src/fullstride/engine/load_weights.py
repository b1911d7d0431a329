"""Weights from a model directory's safetensors, one parameter at a time: no copy of the whole model is ever made."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fullstride.errors import BadInput


class WeightFiles:
    """The tensors of a model directory by name.

    Raises:
        BadInput: the folder holds no safetensors, or an index that cannot be read.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Read the names only. `prefix`: of the base model (`transformer.`), which some directories leave out."""
        self._folder = folder
        self._prefix = prefix
        self._where = _index(folder)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor in the folder."""
        return tuple(self._where)

    def load(self, names: list[str], into: torch.Tensor) -> None:
        """Copy the tensor that stands under the first of `names` that exists.

        Raises:
            BadInput: none exists, the shape differs, or the file is damaged.
        """
        short = [name.removeprefix(self._prefix) for name in names if self._prefix]
        found = next((name for name in (*names, *short) if name in self._where), None)
        if found is None:
            raise BadInput(
                f"{self._folder}: has no tensor {names[0]!r} (it has {', '.join(list(self._where)[:3])}, ...)",
                fix="give a directory that was saved for this architecture",
            )
        path = self._where[found]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor = file.get_tensor(found)
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: cannot be read ({error})", fix="fetch or save it again") from None
        if tensor.shape != into.shape:
            raise BadInput(
                f"{path}: {found} has shape {tuple(tensor.shape)}, the model needs {tuple(into.shape)}",
                fix="use the config.json that belongs to these weights",
            )
        with torch.no_grad():
            into.copy_(tensor)


def _index(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            table = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{index}: is not an index of safetensors", fix="save the directory again") from None
        return {name: folder / file for name, file in table.items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise BadInput(f"{path}: cannot be read ({error})", fix="fetch or save it again") from None
    if not found:
        raise BadInput(f"{folder}: holds no safetensors", fix="give a model directory with weights")
    return found
