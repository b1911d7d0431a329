"""Weights from nothing: values depend on the seed and the parameter's name alone, in every layout.

Each module is initialised by its own code (`_init_weights` of transformers and many others, `reset_parameters` of torch's
layers), with the generator seeded from the run's seed and the module's path. Only the modules of one unit are whole at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy import Unit
from fullstride.errors import BadInput

Places = dict[int, list[tuple[nn.Module, str, str]]]
"""For each parameter (by id) every (module, attribute, name) under which it stands, first to last."""


def places_of(model: nn.Module) -> Places:
    """Where each parameter stands; more than one place means that it is tied."""
    found: Places = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            found.setdefault(id(param), []).append((module, name, f"{path}.{name}" if path else name))
    return found


def seed_of(seed: int, name: str) -> int:
    """A generator seed for a name: 63 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1


def parameters_by_unit(units: tuple[Unit, ...]) -> list[list[nn.Parameter]]:
    """The parameters of each unit that no unit before it owns, each once. To be asked before anything is sharded."""
    owned: set[nn.Parameter] = set()
    found = []
    for unit in units:
        mine = [p for p in dict.fromkeys(p for m in unit.modules for p in m.parameters()) if p not in owned]
        owned |= set(mine)
        found.append(mine)
    return found


def materialise(
    params: list[nn.Parameter], places: Places, device: torch.device, dtype: torch.dtype
) -> dict[int, nn.Parameter]:
    """Give parameters memory on the device, filled with NaN where they were on meta; ties are kept.

    Returns:
        New parameter for each old one's id. `places` learns the new ids.
    """
    made: dict[int, nn.Parameter] = {}
    for old in params:
        # NaN, so that a parameter which nothing initialises cannot pass for one that has a value.
        data = torch.full(old.shape, torch.nan, dtype=dtype, device=device) if old.is_meta else old.detach().to(device, dtype)
        new = nn.Parameter(data, requires_grad=old.requires_grad)
        made[id(old)] = new
        where = places.pop(id(old))
        places[id(new)] = where
        for module, name, _ in where:
            setattr(module, name, new)
    return made


def initialise(model: nn.Module, unit: Unit, fresh: set[int], places: Places, seed: int) -> None:
    """Initialise the parameters `fresh` (by id) of a unit by the modules' own code.

    Raises:
        BadInput: a module owns parameters and has no way to initialise them.
    """
    first_owner = {(id(where[0][0]), where[0][1]) for where in places.values()}
    with torch.no_grad():
        for path, module in _postorder(unit):
            own = dict(module.named_parameters(recurse=False))
            # The root reaches the other units too: what they own is done. A tied parameter is made under its first name.
            mine = [n for n, p in own.items() if id(p) in fresh and (id(module), n) in first_owner]
            inside = all(id(p) in fresh for p in module.parameters())
            parent = not own and inside and any(True for _ in module.parameters())
            if mine or parent:
                torch.manual_seed(seed_of(seed, path))
                with _aside(module, [n for n in own if n not in mine] if mine else []):
                    _initialise_module(model, module, bool(mine))
            if any(bool(own[name].isnan().any()) for name in mine):
                where = path or "the model"
                raise BadInput(
                    f"{where} ({type(module).__name__}) has parameters that nothing initialises: {', '.join(mine)}",
                    fix="give the class a reset_parameters method, or the model an _init_weights(module)",
                )


@contextlib.contextmanager
def _aside(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Something else stands in the place of a module's parameters: what has its values, from its first name or a user, keeps
    them when the rest of the module (the bias of a tied head, say) gets its own.
    """
    kept = {name: module._parameters[name] for name in names}
    for name, param in kept.items():
        assert param is not None
        module._parameters[name] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=param.device))
    try:
        yield
    finally:
        module._parameters.update(kept)


def _initialise_module(model: nn.Module, module: nn.Module, owns: bool) -> None:
    """The class's own values first, the model's wishes after, as when the model is built for real."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if owns and callable(reset):
        reset()
    custom = getattr(model, "_init_weights", None)
    if callable(custom):
        custom(module)
    layer: Any = module
    if callable(getattr(layer, "reset_lora_parameters", None)):  # PEFT's: its children's own code is no start for an adapter
        for name in layer.lora_A:
            layer.reset_lora_parameters(name, True)


def _postorder(unit: Unit) -> Iterator[tuple[str, nn.Module]]:
    """Children before parents, as transformers does: a parent may scale what its children made."""
    for path, module in zip(unit.paths, unit.modules, strict=True):
        yield from _walk(path, module)


def _walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}" if path else name, child)
    yield path, module
