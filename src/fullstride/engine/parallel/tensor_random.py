"""Whether a model draws random numbers while it trains: ranks that compute the same activations would each draw their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fullstride.engine.anatomy import meta_inputs, meta_twin

_DROPPING = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DRAWING = (
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "bernoulli",
    "multinomial",
    "normal",
)
_IN_PLACE = ("bernoulli_", "uniform_", "normal_", "exponential_", "random_")


def draws(model: nn.Module) -> str:
    """Where a model draws random numbers in training, and by what; empty if nowhere, or where it does not run without memory.

    Args:
        model: left as it is; a copy of it is called, in training mode, without memory.
    """
    twin, watch = meta_twin(model).train(), _Watch()
    for path, module in twin.named_modules():
        module.register_forward_pre_hook(watch.entering(f"{path} ({type(module).__name__})" if path else type(module).__name__))
    args, kwargs = meta_inputs(model)
    with torch.no_grad(), contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError), watch:
        twin(*args, **kwargs)
    return watch.said


class _Watch(TorchFunctionMode):
    """Listens for functions that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self._where = "", ""

    def entering(self, where: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            self._where = where

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        what = _drawn(func, args, kwargs or {})
        if what and not self.said:
            self.said = f"{self._where} draws {what}"
        return func(*args, **(kwargs or {}))


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a call draws; empty if nothing."""
    name = getattr(func, "__name__", "")
    if func is functional.scaled_dot_product_attention:
        share = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return f"dropout of {share} in attention" if share else ""
    if name in _DROPPING:
        share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return f"dropout of {share}" if share and training else ""
    return f"random numbers ({name})" if name in (*_DRAWING, *_IN_PLACE) else ""
