"""Data parallelism and ZeRO: who holds what, who sums what.

`ddp`: torch's DistributedDataParallel. `fsdp2`: torch's fully_shard, a block at a time. `flat`: this project's own buffers.
Stages after ZeRO (Rajbhandari et al., 2020): 1 shards optimizer states and sums gradients once a step, 2 shards gradients as
each micro-batch makes them, 3 also frees weights after use. All average over the data-parallel ranks; the loss scale makes up
for it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fullstride.engine.anatomy import Unit
from fullstride.engine.mesh import Mesh
from fullstride.engine.parallel.carrier import Carrier as Carrier
from fullstride.engine.parallel.carrier import Make
from fullstride.engine.parallel.flat import carry_flat
from fullstride.engine.parallel.resharding import reshards
from fullstride.engine.precision import TORCH_DTYPE, compute_dtype
from fullstride.plan.plan import Plan


class _Ddp(Carrier):
    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last:
            return contextlib.nullcontext()
        wrapped: Any = self.module
        held: contextlib.AbstractContextManager[Any] = wrapped.no_sync()
        return held


class _Fsdp(Carrier):
    stage = 3

    def micro_batch(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_is_last_backward(last)
        root.set_requires_all_reduce(last)
        if self.stage < 3:  # weights stay gathered through the step
            root.set_reshard_after_backward(last)
        if self.stage == 1:
            root.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def reshard(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def carry(model: nn.Module, units: tuple[Unit, ...], plan: Plan, mesh: Mesh, make: Make) -> Carrier:
    """Lay a model over the ranks, a unit at a time: made whole, then cut, so that one unit at most is ever whole.

    Args:
        model: parameters on meta, or real and equal on all ranks.
        units: as `anatomy.units` gives them.
        plan: of which `shard`, `precision` and `overlap` count.
        mesh: of all ranks.
        make: gives a unit's parameters memory and values on the device.
    """
    device = mesh.device
    _move_buffers(model, device)
    if plan.shard.carrier == "flat":
        return carry_flat(model, units, plan, mesh, make)
    if plan.shard.carrier == "fsdp2":
        return _fsdp(model, units, plan, mesh, make)
    for unit in units:
        make(unit)
    if plan.shard.carrier == "none":
        return Carrier(model)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.group("dp_replicate", "dp_shard"),
        bucket_cap_mb=plan.overlap.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    return _Ddp(wrapped)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)


def _fsdp(model: nn.Module, units: tuple[Unit, ...], plan: Plan, mesh: Mesh, make: Make) -> Carrier:
    data = mesh.data()
    for unit in units:
        make(unit)
        fully_shard(
            list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],
            mesh=data,
            reshard_after_forward=reshards(unit, plan),
            mp_policy=_policy(unit, plan),
        )
    _prefetch([unit.modules[0] for unit in units if unit.role == "block"], plan.overlap.prefetch)
    carrier = _Fsdp(model)
    carrier.stage = plan.shard.stage
    return carrier


def _policy(unit: Unit, plan: Plan) -> MixedPrecisionPolicy:
    master = TORCH_DTYPE[plan.precision.master]
    compute, reduction = compute_dtype(plan.precision, unit.role), TORCH_DTYPE[plan.precision.reduction]
    return MixedPrecisionPolicy(
        param_dtype=None if compute == master else compute,
        reduce_dtype=None if reduction == compute else reduction,
    )


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    """Gather more than the one block ahead that FSDP2 gathers by itself."""
    if ahead <= 1:
        return
    for index, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        later: list[Any] = blocks[index + 1 : index + 1 + ahead]
        earlier: list[Any] = blocks[max(index - ahead, 0) : index][::-1]
        if later:
            block.set_modules_to_forward_prefetch(later)
        if earlier:
            block.set_modules_to_backward_prefetch(earlier)
