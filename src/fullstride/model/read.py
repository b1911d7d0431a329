"""A Hugging Face configuration, read key by key with transformers' own defaults and plain refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullstride.errors import BadInput
from fullstride.model.families.shape import ActivationKind

_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu_new",
    "relu": "relu",
}


class Keys:
    """The keys of one configuration; every refusal names the value, the rule and the fix."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    def size(self, *keys: str, default: int | None = None) -> int:
        """A size, one or more, under the first of `keys` that is there (and not null).

        Raises:
            BadInput: missing without a default, no whole number, or below one.
        """
        key, value = self._find(keys)
        if value is None:
            if default is None:
                raise BadInput(f"{self.name}: {keys[0]} is missing, and a {self.kind} model cannot do without", fix="add it")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"{self.name}: {key} is {value!r}, a size is a whole number of 1 or more", fix="correct it")
        return value

    def optional(self, *keys: str) -> int:
        """A size that may be missing or null: 0 then."""
        _, value = self._find(keys)
        return 0 if value in (None, 0) else self.size(*keys)

    def flag(self, key: str, default: bool) -> bool:
        """True or false (`BadInput` otherwise)."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadInput(f"{self.name}: {key} is {value!r}, expected true or false", fix="correct it")
        return value

    def number(self, *keys: str, default: float = 0.0) -> float:
        """A number (`BadInput` otherwise)."""
        key, value = self._find(keys)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadInput(f"{self.name}: {key} is {value!r}, expected a number", fix="correct it")
        return float(value)

    def activation(self, key: str, default: str) -> ActivationKind:
        """One of the activations whose kept tensors are known (`BadInput` otherwise)."""
        value = self.config.get(key) or default
        if value not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise BadInput(f"{self.name}: {key} is {value!r}, known are {known}", fix="give the model as module:function")
        return _ACTIVATIONS[value]

    def words(self, key: str) -> list[Any] | None:
        """A list, or None where it is missing (`BadInput` otherwise)."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise BadInput(f"{self.name}: {key} is {value!r}, expected a list", fix="correct it")
        return None if value is None else list(value)

    def rope(self, key: str, default: float) -> float:
        """A number of the rotary settings: in `rope_parameters` (transformers 5) or beside the sizes (before)."""
        for holder in ("rope_parameters", "rope_scaling"):
            table = self.config.get(holder)
            if isinstance(table, Mapping) and isinstance(table.get(key), int | float):
                return float(table[key])
        return self.number(key, default=default)

    @property
    def kind(self) -> str:
        """The architecture's word."""
        return str(self.config.get("model_type"))

    def divides(self, part: str, part_size: int, whole: str, whole_size: int) -> None:
        """Refuse a part that does not divide its whole (`BadInput`)."""
        if whole_size % part_size:
            raise BadInput(
                f"{self.name}: {part} {part_size} does not divide {whole} {whole_size}",
                fix=f"choose a {part} that divides {whole_size}",
            )

    def _find(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self.config.get(key) is not None:
                return key, self.config[key]
        return keys[0], None
