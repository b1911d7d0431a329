"""Low-rank adapters (LoRA, Hu et al., arXiv 2106.09685): two small matrices beside a product, and everything else frozen.

    y = x W' + b + (alpha / rank) x A' B'        A [rank, in], B [out, rank]

A product (`nn.Linear`, or transformers' `Conv1D`) stays the object it was: A and B become its children `lora_A` and `lora_B`,
and its instance's `forward` adds their part. Names and initial values are PEFT's (A Kaiming-uniform, B zero), so that what is
trained can be saved in PEFT's form (`engine/adapter_export.py`). Frozen weights are held once, in the compute dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.anatomy_region import is_transposed, widths
from fullstride.engine.init import seed_of
from fullstride.errors import BadInput, RuleBroken
from fullstride.model.config import spec_from_config
from fullstride.plan.adapted import is_target, listed, unmet
from fullstride.plan.plan import Adapter, Plan


class LowRank(nn.Module):
    """One of the two matrices of an adapter."""

    def __init__(self, rows: int, columns: int, scale: float = 0.0) -> None:
        """On meta. With a `scale`, by which the adapter's part is multiplied, it is B, which begins as zeros."""
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(rows, columns, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., columns] to [..., rows]."""
        return functional.linear(hidden, self.weight)

    def reset_parameters(self) -> None:
        """PEFT's initial values, which are nn.Linear's own for A."""
        if not self.scale:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        else:
            nn.init.zeros_(self.weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        modules: the products that have one, by path.
        matrices: A's and B's by the name of their parameter.
    """

    modules: Mapping[str, nn.Module]
    matrices: Mapping[str, LowRank]

    def fill(self, name: str, seed: int) -> None:
        """Give a matrix its initial values, which depend on the seed and its name alone."""
        torch.manual_seed(seed_of(seed, name.rpartition(".")[0]))
        with torch.no_grad():
            self.matrices[name].reset_parameters()


def scale_of(adapter: Adapter) -> float:
    """By what the adapter's part is multiplied: alpha / rank."""
    return adapter.alpha / adapter.rank if adapter.alpha else 1.0


def attach(model: nn.Module, anatomy: Anatomy, plan: Plan) -> Adapters | None:
    """Freeze a model and give its products adapters, in place; None where the Plan has none.

    Args:
        model: parameters on meta or real. The adapters' are on meta.
        anatomy: its parts.
        plan: of which `adapter` counts.

    Raises:
        RuleBroken: a target that no block has, or what no adapter can be put beside; says which names there are.
        BadInput: the model brings adapters of its own.
    """
    if plan.adapter.rank == 0:
        return None
    chosen = _chosen(model, anatomy, plan.adapter)
    for param in model.parameters():
        param.requires_grad_(False)
    matrices: dict[str, LowRank] = {}
    for path, module in chosen.items():
        if hasattr(module, "lora_A") or hasattr(module, "base_layer"):
            raise BadInput(f"{path}: brings an adapter of its own", fix="set adapter.rank = 0, or give the model without it")
        _beside(module, plan.adapter)
        matrices |= {f"{path}.{name}.weight": getattr(module, name) for name in ("lora_A", "lora_B")}
    return Adapters(modules=chosen, matrices=matrices)


def _chosen(model: nn.Module, anatomy: Anatomy, adapter: Adapter) -> dict[str, nn.Module]:
    """The products that are meant, by path; a module that stands in two places once."""
    known, found = _sublayers(model), list[tuple[str, str, nn.Module]]()
    for block in anatomy.blocks:
        for local, module in model.get_submodule(block).named_modules():
            path = f"{block}.{local}"
            if local and (isinstance(module, nn.Linear) or is_transposed(module)) and known.get(path, path) != "router":
                found.append((known.get(path, local), path, module))
    products = tuple((sublayer, path) for sublayer, path, _ in found)
    if missing := unmet(adapter.targets, products):
        raise RuleBroken(
            f"adapter.targets names {missing}, and the blocks of {type(model).__name__} have {listed(products)}"
            + _joined(model, anatomy, adapter),
            fix="name products that the blocks have",
        )
    return {path: module for sublayer, path, module in found if is_target(adapter.targets, sublayer, path)}


def _sublayers(model: nn.Module) -> dict[str, str]:
    """For each product of a known family of transformers, by its path, the name that plans give its sublayer."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    try:
        spec = spec_from_config(config.to_dict(), type(model).__name__)
    except BadInput:
        return {}
    return {
        f"{stack.path}.{index}.{product.name}": sublayer.name
        for stack in spec.stacks
        for index in range(stack.first, stack.first + stack.count)
        for sublayer in stack.sublayers
        for product in sublayer.matmuls
    }


def _joined(model: nn.Module, anatomy: Anatomy, adapter: Adapter) -> str:
    """The reason, where a target names weights of experts that are one tensor."""
    names = [name for block in anatomy.blocks for name, p in model.get_submodule(block).named_parameters() if p.ndim > 2]
    joined = next((name for name in names if is_target(adapter.targets, "", name) or "experts" in adapter.targets), "")
    return f" ({joined} joins experts in one tensor, which has no product to adapt)" if joined else ""


def _beside(module: nn.Module, adapter: Adapter) -> None:
    width, height = widths(module)
    module.lora_A = LowRank(adapter.rank, width)
    module.lora_B = LowRank(height, adapter.rank, scale_of(adapter))
    instance: Any = module
    if "forward" in vars(module):  # somebody replaced it before
        instance.forward = functools.partial(_around, module, instance.forward)
    else:  # a method, not a closure: compiled blocks that are equal share their code
        instance.forward = types.MethodType(_adapted, module)


def _adapted(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The product's own forward, and the adapter's part."""
    return _sum(module, type(module).forward(module, hidden), hidden)


def _around(module: Any, forward: Any, hidden: torch.Tensor) -> torch.Tensor:
    return _sum(module, forward(hidden), hidden)


def _sum(module: Any, made: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    part = module.lora_B(module.lora_A(hidden))
    return torch.add(made, part, alpha=module.lora_B.scale)
