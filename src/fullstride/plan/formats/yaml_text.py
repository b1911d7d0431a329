"""YAML in and out, by PyYAML's safe half: plain values only, no objects made by tags."""

from __future__ import annotations

from typing import Any

from fullstride.errors import BadInput


def load_yaml(text: str, where: str) -> Any:
    """The file's content.

    Raises:
        BadInput: it is not YAML, or asks for objects.
    """
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = " ".join(str(error).split())
        raise BadInput(f"{where}: is not YAML ({line[:200]})", fix="check that the file is complete") from None


def dump_yaml(raw: dict[str, Any]) -> str:
    """Text that `load_yaml` gives back equal, keys in their order."""
    import yaml

    text: str = yaml.safe_dump(raw, sort_keys=False)
    return text
