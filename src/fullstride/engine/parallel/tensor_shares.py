"""A rank's share of heads and columns, as modules' own code reckons with it."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import nn

from fullstride.engine.anatomy_region import Region


def set_shares(model: nn.Module, region: Region) -> None:
    """Let modules reckon with a rank's share."""
    for path, name, value in region.settings:
        setattr(model.get_submodule(path), name, value)
    root: Any = model.get_submodule(region.path)
    if region.heads and _asks_configuration(root):
        root.config = copy.copy(root.config)
        for name, value in region.heads.items():
            if isinstance(getattr(root.config, name, None), int):
                setattr(root.config, name, value)


def _asks_configuration(module: nn.Module) -> bool:
    names = set(getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ()))
    return hasattr(module, "config") and bool({"num_attention_heads", "num_key_value_heads"} & names)
