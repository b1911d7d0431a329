"""How transformers stores a model: the names in its files, and how they are arranged, against those of the model in memory.

Since version 5 the two differ where a model fuses what files keep apart (the experts of a mixture, say). The rules are
transformers' own; they are private there, and this module alone touches them: without them a Mixtral directory could be neither
read nor written so that others can load it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn


class SavedForm:
    """A model's conversions, both ways; for what is no transformers model there are none."""

    def __init__(self, model: nn.Module) -> None:
        """Look the model's conversions up."""
        self._model = cast(Any, model)
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
            from transformers import conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming

            found = conversion_mapping.get_model_conversion_mapping(self._model, add_legacy=True)
            self._renamings = [item for item in found if isinstance(item, WeightRenaming)]
            self._converters = [item for item in found if isinstance(item, WeightConverter)]
        self._by_pattern = {pattern: item for item in self._converters for pattern in item.source_patterns}

    def in_memory(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, ...]]:
        """Which tensors of the files make up each of the model's, in the order in which `join` wants them.

        Args:
            shapes: of the tensors in the files, by name.

        Returns:
            By the name in memory (which may be one that this model does not have): names in the files.
        """
        if not (self._renamings or self._converters):
            return {name: (name,) for name in shapes}
        from transformers.core_model_loading import dot_natural_key

        groups: dict[str, list[str]] = {}
        plain: dict[str, tuple[str, ...]] = {}
        for name in sorted(shapes, key=dot_natural_key):
            renamed, pattern = self._renamed(name)
            if pattern is None:
                plain[renamed] = (name,)
            else:
                groups.setdefault(renamed, []).append(name)
        for names in groups.values():
            empty = {name: torch.empty(shapes[name], device="meta") for name in names}
            plain |= dict.fromkeys(self._convert(names, empty.__getitem__), tuple(names))
        return plain

    def join(self, name: str, files: Sequence[str], read: Callable[[str], Tensor]) -> Tensor:
        """A tensor as it is in memory.

        Args:
            name: in memory.
            files: names in the files, as `in_memory` gave them.
            read: gives the tensor that a name in the files stands for.
        """
        if len(files) == 1 and self._renamed(files[0])[1] is None:
            return read(files[0])
        return self._convert(files, read)[name]

    def _renamed(self, name: str) -> tuple[str, str | None]:
        if not (self._renamings or self._converters):
            return name, None
        from transformers.core_model_loading import rename_source_key

        renamed, pattern = rename_source_key(name, self._renamings, self._converters)
        return renamed, pattern

    def _convert(self, files: Sequence[str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        renamed, first = self._renamed(files[0])
        converter = copy.deepcopy(self._by_pattern[first or ""])
        for file in files:
            converter.add_tensor(renamed, file, self._renamed(file)[1], read(file))
        made = converter.convert(renamed, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, ...]]:
        """The model's tensors in sets that `in_files` must have together: one each, but where a file fuses several.

        Args:
            shapes: of the tensors in memory, by name.
        """
        if not self._converters:
            return [(name,) for name in shapes]
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        files = {name: tuple(value.shape) for name, value in self.in_files(empty).items()}
        made_of = self.in_memory(files)
        members: dict[tuple[str, ...], list[str]] = {}
        for name in shapes:
            members.setdefault(made_of.get(name, (name,)), []).append(name)
        return [tuple(names) for names in members.values()]

    def in_files(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model as the files have them, under their names there.

        Args:
            values: whole, by their names in memory; a group's all together.
        """
        if not (self._renamings or self._converters):
            return dict(values)
        from transformers.core_model_loading import revert_weight_conversion

        made: dict[str, Tensor] = revert_weight_conversion(self._model, dict(values))
        return made
