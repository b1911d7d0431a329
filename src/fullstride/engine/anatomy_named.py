"""The parts of a model that the user names, in place of those that would be found."""

from __future__ import annotations

import torch
from torch import nn

from fullstride.errors import BadInput

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_SHOWN = 12


def part_named(model: nn.Module, entry: str, path: str, inside: tuple[str, ...]) -> str:
    """The path of one part; empty if none is given.

    Args:
        model: on meta or real.
        entry: `embedding`, `final_norm` or `head`, of `[model]` in a plan.
        path: as given.
        inside: below these paths are the blocks.

    Raises:
        BadInput: nothing outside the blocks is called so, or it is not of that kind; says which names were looked at.
    """
    if not path:
        return ""
    fits = _usable if entry == "final_norm" else _is_table
    around = {p: m for p, m in model.named_modules(remove_duplicate=False) if p and not _within(p, inside)}
    looked = [p for p, m in around.items() if fits(m)]
    what = "module with parameters" if entry == "final_norm" else "module with a weight of two dims"
    if path not in around:
        where = "lies in the blocks" if _within(path, inside) and path in dict(model.named_modules()) else "is not there"
        raise _refusal(model, entry, path, f"which {where}", f"each {what} outside the blocks", looked)
    if not fits(around[path]):
        raise _refusal(model, entry, path, f"a {type(around[path]).__name__}", f"each {what} outside the blocks", looked)
    return path


def blocks_named(model: nn.Module, named: str | tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The list that holds the blocks alone (empty if there is none), and their paths.

    Args:
        model: on meta or real.
        named: path of the list, or the blocks' own, in their order.

    Raises:
        BadInput: nothing is called so, or it is no list, or a block without parameters; says which names were looked at.
    """
    there = dict(model.named_modules(remove_duplicate=False))
    if isinstance(named, str):
        lists = [p for p, m in there.items() if p and isinstance(m, LISTS)]
        if named not in there:
            raise _refusal(model, "blocks", named, "which is not there", "each list", lists)
        if not isinstance(there[named], LISTS):
            inner = [f"{named}.{name}" for name, m in there[named].named_children() if _usable(m)]
            kind = f"a {type(there[named]).__name__}, no ModuleList, Sequential or ModuleDict"
            raise _refusal(model, "blocks", named, kind, "what it holds", inner, "name the blocks one by one, in their order")
        blocks = tuple(f"{named}.{name}" for name, _ in there[named].named_children())
    else:
        blocks = named
    if not blocks:
        raise _refusal(model, "blocks", str(named), "which is empty", "each list", [])
    for path in blocks:
        if path not in there or not _usable(there[path]):
            beside = path.rpartition(".")[0]
            among = [p for p, m in there.items() if p and p.rpartition(".")[0] == beside and _usable(m)]
            what = "which has no parameters" if path in there else "which is not there"
            raise _refusal(model, "blocks", path, what, f"modules with parameters in {beside or 'the model'}", among)
    if len({id(there[path]) for path in blocks}) < len(blocks):
        raise _refusal(model, "blocks", ", ".join(blocks), "of which two are one module", "their paths", list(blocks))
    parent = blocks[0].rpartition(".")[0]
    held = tuple(f"{parent}.{name}" for name, _ in there[parent].named_children()) if parent in there else ()
    return (parent if parent and isinstance(there[parent], LISTS) and held == blocks else ""), blocks


def _refusal(model: nn.Module, entry: str, path: str, what: str, among: str, looked: list[str], fix: str = "") -> BadInput:
    seen = ", ".join(looked[:_SHOWN]) + (", ..." if len(looked) > _SHOWN else "")
    message = f"model.{entry} names {path!r} in {type(model).__name__}, {what} (looked at {among}: {seen or 'none'})"
    return BadInput(message, fix=fix or "correct the name, or leave it out")


def _within(path: str, inside: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{each}.") for each in inside)


def _is_table(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def _usable(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
