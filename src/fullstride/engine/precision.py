"""In which dtype each thing is held and computed, and where gradients gather.

Three ways to a lower compute dtype: none; autocast, where each operator casts fp32 weights by itself; and weights, where the
model computes with weights in the lower dtype beside fp32 masters that the optimizer steps (mixed precision training,
Micikevicius et al., 2018). Under FSDP2 the sharded parameters are the masters and the gathered ones the compute copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullstride.engine.anatomy import Role, Unit
from fullstride.engine.parallel.tensor import TensorParallel
from fullstride.engine.pieces import piece_of
from fullstride.plan.plan import DType, Plan, Precision

TORCH_DTYPE: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(precision: Precision, role: Role) -> torch.dtype:
    """What a part's weights are in while it computes."""
    if precision.cast != "weights":
        return TORCH_DTYPE[precision.master]
    named: dict[Role, DType] = {"embedding": precision.embedding, "block": precision.block, "head": precision.head}
    return TORCH_DTYPE[named[role]]


def compute_context(plan: Plan, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What stands around forward."""
    if plan.precision.cast == "autocast":
        return torch.autocast(device.type, dtype=TORCH_DTYPE[plan.precision.block])
    return contextlib.nullcontext()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            part: torch.Tensor = tensor.to_local()
        return part
    return tensor.detach()


class Weights:
    """The parameters of a built model: what computes, what the optimizer steps, and where gradients gather.

    Attributes:
        names: of all parameters, as in the unmodified model; a tied one stands once, under its first name.
        params: the module's own parameters (DTensors when sharded).
        masters: what the optimizer steps: the same objects, or fp32 copies when weights are cast on one rank.
        pieces: where this rank's part of each master, gradient and moment lies in the unmodified model.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        roles: dict[int, Role],
        shapes: dict[str, tuple[int, ...]],
        uncounted: Set[str] = frozenset(),
        tensor: TensorParallel | None = None,
    ) -> None:
        """Take the parameters of a model that has memory and is sharded.

        Args:
            model: with its weights.
            plan: of which `precision` counts.
            roles: by id of the parameter.
            shapes: of the whole parameters, by name.
            uncounted: names that another rank counts (see `Piece.counted`).
            tensor: who holds what of them, with tensor parallelism.
        """
        named = dict(model.named_parameters())
        self.names = tuple(named)
        self.params = tuple(named.values())
        self._sharded = any(isinstance(p, DTensor) for p in self.params)
        self.cast = plan.precision.cast == "weights" and not self._sharded
        self.masters: tuple[torch.Tensor, ...] = self.params
        self._tensor = tensor
        self._reduction = TORCH_DTYPE[plan.precision.reduction]
        self.pieces = tuple(
            piece_of(
                name,
                shapes[name],
                param,
                tensor.cut(name) if tensor else None,
                counted=name not in uncounted and (tensor is None or tensor.counted(name)),
            )
            for name, param in named.items()
        )
        self._gathered: dict[int, torch.Tensor] = {}
        self._touched: set[int] = set()
        self._hooks: list[Any] = []
        self._make_masters(plan, roles)

    def _make_masters(self, plan: Plan, roles: dict[int, Role]) -> None:
        if self.cast:
            self.masters = tuple(p.detach() for p in self.params)
            for index, param in enumerate(self.params):
                param.data = self.masters[index].to(compute_dtype(plan.precision, roles[id(param)]))
            self._gather(plan)

    def _gather(self, plan: Plan) -> None:
        """Gradients in a wider dtype than the weights gather in buffers of their own, and leave `.grad` at once."""
        wide = TORCH_DTYPE[plan.precision.gradient]
        for index, param in enumerate(self.params):
            if param.requires_grad and param.dtype != wide:
                self._gathered[index] = torch.zeros_like(param, dtype=wide)
                tensor: Any = param
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._hook(index)))

    def _hook(self, index: int) -> Any:
        def take(param: torch.Tensor) -> None:
            if param.grad is None:
                return
            if index in self._touched:
                self._gathered[index].add_(param.grad)
            else:  # what the last step left there is overwritten, which saves a pass of zeros
                self._gathered[index].copy_(param.grad)
                self._touched.add(index)
            param.grad = None

        return take

    def gradient(self, index: int) -> torch.Tensor | None:
        """This rank's part of a gradient after the last micro-batch; None if nothing reached the parameter."""
        if index in self._gathered:
            return self._gathered[index] if index in self._touched else None
        grad = self.params[index].grad
        return None if grad is None else local(grad)

    def counted(self) -> list[torch.Tensor]:
        """Gradients that this rank counts in the norm."""
        found = [self.gradient(index) for index, piece in enumerate(self.pieces) if piece.counted]
        return [grad for grad in found if grad is not None]

    def ready(self) -> None:
        """Let the device wait until masters and moments can be read or written."""

    def settle(self) -> None:
        """After the last micro-batch: sum the gradients that are terms over tensor-parallel ranks. Once a step."""
        if self._tensor is not None:
            found = {name: grad for i, name in enumerate(self.names) if (grad := self.gradient(i)) is not None}
            self._tensor.settle(found, self._reduction)

    def narrow(self, index: int) -> torch.Tensor | None:
        """The weight that computes, where it is a copy of a master in another dtype."""
        weight = self.params[index].data
        return weight if self.cast and weight.dtype != self.masters[index].dtype else None

    def publish(self, indices: list[int] | None = None) -> None:
        """Copy masters into the weights that compute; nothing to do where they are the same."""
        if not self.cast:
            return
        chosen = range(len(self.params)) if indices is None else indices
        with torch.no_grad():
            torch._foreach_copy_([self.params[i].data for i in chosen], [self.masters[i] for i in chosen])

    def clear(self) -> None:
        """Forget the gradients."""
        self._touched.clear()
        for param in self.params:
            param.grad = None

    def close(self) -> None:
        """Take the hooks off and free the buffers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gathered.clear()


def cast_at_borders(units: tuple[Unit, ...], precision: Precision) -> None:
    """Where parts of one rank's model compute in different dtypes, floating inputs are cast as they enter a part.

    FSDP2 does this by itself; blocks of equal dtype need it at the first one alone.
    """
    if precision.cast != "weights" or len({precision.embedding, precision.block, precision.head}) == 1:
        return
    for unit in units:
        if unit.role == "embedding" or unit.name == "root":
            continue
        for module in unit.modules:
            module.register_forward_pre_hook(_casting(compute_dtype(precision, unit.role)), with_kwargs=True)


def _casting(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, tuple):
            return tuple(cast(item) for item in value)
        return value

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast(args), {key: cast(value) for key, value in kwargs.items()}

    return hook
