"""Weights from a model directory's safetensors, one parameter at a time: no copy of the whole model is ever made."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.saved_form import SavedForm
from fullstride.errors import BadInput

_READ = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose numbers are the weights; narrower ones need scales that stand elsewhere."""
_MADE_ANEW = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$")
"""Buffers that older versions saved and models make for themselves."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a whole model has a place for, asked before a pipeline takes its blocks apart."""

    names: frozenset[str]
    block_list: str

    @classmethod
    def by(cls, model: nn.Module, anatomy: Anatomy) -> Wanted:
        """Of a whole model."""
        return cls(frozenset(model.state_dict(keep_vars=True)), anatomy.block_list)


class WeightFiles:
    """The tensors of a model directory, under the names that the model gives them.

    Raises:
        BadInput: the folder holds no safetensors, or an index or file that cannot be read.
    """

    def __init__(self, folder: Path, model: nn.Module, wanted: Wanted | None = None) -> None:
        """Read names and shapes only.

        Args:
            folder: with `*.safetensors`.
            model: that the weights are for.
            wanted: of the whole model. What the files hold beside it is told, and more blocks than it has are refused.
        """
        base = getattr(model, "base_model_prefix", "")
        self._prefix = f"{base}." if base else ""  # which some directories leave out
        self._folder = folder
        self._form = SavedForm(model)
        self._files = _index(folder)
        shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(set(self._files.values())):
            with _opened(path) as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
        missing = next((name for name in self._files if name not in shapes), None)
        if missing:
            raise BadInput(f"{self._files[missing]}: lacks {missing}, which the index places there", fix="fetch it again")
        self._made_of = self._form.in_memory(shapes)
        if wanted:
            self._tell_unused(wanted, getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def _tell_unused(self, wanted: Wanted, ignored: Any) -> None:
        """Nothing is left out in silence: a model of fewer blocks than its files trains, only worse."""
        known = wanted.names | {name.removeprefix(self._prefix) for name in wanted.names if self._prefix}
        patterns = [re.compile(pattern) for pattern in ignored]
        unused = [
            name
            for name in self._made_of
            if name not in known and not _MADE_ANEW.search(name) and not any(p.search(name) for p in patterns)
        ]
        short = wanted.block_list.removeprefix(self._prefix)
        blocks = [n for n in unused if n.startswith((f"{wanted.block_list}.", f"{short}.")) and _beyond(n, known)]
        if blocks:
            raise BadInput(
                f"{self._folder}: holds {blocks[0]}, a block that the model does not have",
                fix="use the config.json that belongs to these weights",
            )
        if unused:
            some = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
            warnings.warn(f"{self._folder}: the model has no place for {len(unused)} of its tensors ({some})", stacklevel=4)

    def load(self, names: list[str], into: Tensor) -> None:
        """Copy the tensor that stands under the first of `names` that exists.

        Raises:
            BadInput: none exists, the shape differs, or the file is damaged.
        """
        found = self._found(names)
        if found is None:
            raise BadInput(
                f"{self._folder}: has no tensor {names[0]!r} (it has {', '.join(list(self._made_of)[:3])}, ...)",
                fix="give a directory that was saved for this architecture",
            )
        parts = self._made_of[found]
        tensor = self._form.join(found, parts, self._read)
        if tensor.shape != into.shape:
            raise BadInput(
                f"{self._files[parts[0]]}: {found} has shape {tuple(tensor.shape)}, the model needs {tuple(into.shape)}",
                fix="use the config.json that belongs to these weights",
            )
        if into.is_floating_point() and tensor.dtype not in _READ:
            raise BadInput(
                f"{self._files[parts[0]]}: {found} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised weights "
                "are not read",
                fix="give the directory of the model before it was quantised, or save it in bf16",
            )
        with torch.no_grad():
            into.copy_(tensor)

    def load_buffers(self, model: nn.Module) -> None:
        """Fill the buffers that the model saves with its weights (a router's bias, say), where the files hold them."""
        saved = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in saved and self._found([name]):
                self.load([name], buffer)

    def _found(self, names: list[str]) -> str | None:
        short = [name.removeprefix(self._prefix) for name in names if self._prefix]
        return next((name for name in (*names, *short) if name in self._made_of), None)

    def _read(self, name: str) -> Tensor:
        with _opened(self._files[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _beyond(name: str, known: frozenset[str]) -> bool:
    """Whether a name is of a block that no known name is of."""
    inside = re.match(r"(.*?\.\d+\.)", name)
    return inside is not None and not any(other.startswith(inside[1]) for other in known)


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The dtype of each tensor in a model directory, by its name there.

    Raises:
        BadInput: it holds no safetensors, or a file cannot be read.
    """
    found: dict[str, torch.dtype] = {}
    for path in sorted(set(_index(folder).values())):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                part = file.get_slice(name)
                found[name] = (part[:0] if part.get_shape() else file.get_tensor(name)).dtype
    return found


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path}: cannot be read ({error})", fix="fetch or save it again") from None


def _index(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            table = json.loads(index.read_text())["weight_map"]
            return {name: folder / file for name, file in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{index}: is not an index of safetensors", fix="save the directory again") from None
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    if not found:
        raise BadInput(f"{folder}: holds no safetensors", fix="give a model directory with weights")
    return found
