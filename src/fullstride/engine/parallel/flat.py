"""ZeRO on flat buffers, every byte and every collective in sight.

Each unit (embedding, block, head with the final norm, the rest) is one buffer of weights in the compute dtype, of which the
parameters are views, and one shard of masters, moments and gradients on each rank (ZeRO: Rajbhandari et al., 2020).

Forward waits, unit by unit, for the unit's weights. The optimizer steps on a lane of its own, beside the next forward; under
stages 1 and 2 each unit is gathered behind its own step, under stage 3 `overlap.prefetch` units ahead of use, and the memory is
freed after it. In backward, as soon as a unit's gradients have all come they are copied once, reduced to shards on a side
stream, two units on their way at most. Stage 1 adds micro-batches up before it reduces, stages 2 and 3 reduce each one. Hooks
stand on modules and parameters, outside of what is compiled and of what recomputation runs again.

Collectives come in one order on all ranks whatever each rank's gradients do: a unit is reduced only after every unit behind
it, what is incomplete is reduced as it is (zeros where nothing came) when its turn has come, and the rest of the model is last.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves  # has no public path

from fullstride.engine.anatomy import Unit
from fullstride.engine.mesh import Mesh
from fullstride.engine.optimizer import AdamW
from fullstride.engine.parallel.carrier import Holding, Make
from fullstride.engine.parallel.flat_comm import Lane, join, mean, scatter_mean
from fullstride.engine.parallel.flat_unit import FlatUnit, Region
from fullstride.engine.parallel.flat_weights import FlatAdamW, FlatWeights
from fullstride.engine.parallel.resharding import reshards
from fullstride.engine.precision import TORCH_DTYPE, Weights, compute_dtype
from fullstride.errors import RuleBroken
from fullstride.plan.plan import Plan

IN_FLIGHT = 2
"""Units whose gradients may be on their way at once."""


class Flat(Holding):
    """Carries a model on flat buffers.

    A hand-written loop needs none of the methods: every backward reduces, and `optimizer.step()` finishes.
    """

    def __init__(self, model: nn.Module, units: list[FlatUnit], stays: set[int], plan: Plan, mesh: Mesh) -> None:
        """Take units whose weights are in their buffers; `stays`: positions of those that are not freed after forward."""
        super().__init__(model)
        self.units = units
        self._stage = plan.shard.stage
        self._ahead = plan.overlap.prefetch
        self._stays = stays
        group = mesh.group("dp_shard")
        assert group is not None
        self._shards, self._replicas = group, mesh.group("dp_replicate")
        self._everyone = mesh.group("dp_replicate", "dp_shard")
        self._reduction = TORCH_DTYPE[plan.precision.reduction]
        self.gradient_dtype = TORCH_DTYPE[plan.precision.gradient]
        self._gathers, self._reduces = Lane(mesh.device), Lane(mesh.device)
        self._steps = Lane(mesh.device, urgent=False)
        self._flying: collections.deque[tuple[torch.cuda.Event | None, torch.Tensor]] = collections.deque()
        self._held, self._last, self._agreed = False, True, False
        self._order: dict[str, list[FlatUnit]] = {"forward": [], "backward": []}
        self._hooks = list(self._hook_up())
        if self._stage == 3:
            self.reshard()

    # What the run and the schedule call.

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are added up here (stage 1) or in shards (2, 3) until the last one's come."""
        self._last = last
        try:
            yield
            if not self._held:
                self._flush()
        finally:
            self._last = True

    def hold(self, on: bool) -> None:
        """While on, gradients add up whole on this rank, in the gradient dtype, until `reduce` names their unit."""
        self._held = on

    def reduce(self, units: Sequence[str]) -> None:
        """Begin to reduce these units; every rank of the group in the same order."""
        named = {unit.name: unit for unit in self.units}
        for name in units:
            if name in named and named[name].busy:
                self._launch(named[name])

    def finish(self) -> None:
        """Reduce what was not yet, and let the device wait for all of it. Does nothing when called again."""
        self._held = False
        self._flush()
        while self._flying:
            self._land()
        if not self._agreed:
            self._agreed = True
            self._agree()

    def reshard(self) -> None:
        """Free what stage 3 gathered."""
        if self._stage == 3:
            for unit in self.units:
                unit.free()

    def weights(self, *parts: Any) -> Weights:
        """Masters are runs of the shards."""
        return FlatWeights(self, *parts)

    def optimizer(self, weights: Weights, plan: Plan) -> AdamW:
        """Steps unit by unit."""
        assert isinstance(weights, FlatWeights)
        return FlatAdamW(weights, plan.recipe, plan.optimizer.implementation)

    # What weights and optimizer call.

    def publish(self, unit: FlatUnit, *, all_regions: bool = False) -> None:
        """Make a unit's masters the weights of the next forward."""
        if self._stage == 3:
            unit.free()
            return
        regions = unit.regions if all_regions else unit.regions[:1] if unit.trained else ()
        unit.start_gather(self._gathers, self._shards, regions)

    @contextlib.contextmanager
    def stepping(self, unit: FlatUnit) -> Iterator[None]:
        """Around a unit's optimizer step, which runs beside the forward of units before it."""
        with self._steps.after_compute():
            yield
            unit.stepped(self._steps.mark())

    def ready(self) -> None:
        """Let the device wait until all units are stepped and gathered."""
        for unit in self.units:
            unit.wait()

    def forget(self) -> None:
        """Drop all gradients."""
        while self._flying:
            self._land()
        for unit in self.units:
            unit.drop()
        self._agreed = False

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.ready()
        self.forget()

    # Hooks.

    def _hook_up(self) -> Iterator[Any]:
        for unit in self.units:
            for module in unit.modules:
                yield module.register_forward_pre_hook(lambda *_, u=unit: self._enter(u), prepend=True)
            if self._stage == 3:
                yield unit.modules[-1].register_forward_hook(lambda _m, _a, out, u=unit: self._leave(u, out))
            for number, slot in enumerate(unit.trained.slots if unit.trained else ()):
                param: Any = slot.param
                yield param.register_post_accumulate_grad_hook(lambda _, u=unit, n=number: self._arrived(u, n))
        yield self.module.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)  # before the root unit's own

    def _begin(self) -> None:
        """What a hand-written loop's last backward left incomplete is reduced before the next begins."""
        if torch.is_grad_enabled() and not self._held:
            self._flush()

    def _enter(self, unit: FlatUnit) -> None:
        if self._stage == 3:
            self._need(unit, "forward")
        else:
            unit.wait()

    def _leave(self, unit: FlatUnit, output: Any) -> None:
        learning = torch.is_grad_enabled()
        if learning:
            for tensor in _tensors(output):
                tensor.register_hook(lambda _, u=unit: self._before_backward(u))  # type: ignore[no-untyped-call]
        if unit.position not in self._stays:
            unit.free()

    def _before_backward(self, unit: FlatUnit) -> None:
        self._flush_behind(unit)
        if not unit.only_looked_up:
            self._need(unit, "backward")

    def _arrived(self, unit: FlatUnit, number: int) -> None:
        assert unit.trained is not None
        if unit.trained.slots[number].param.grad is None:  # a deferred one: it comes later
            return
        unit.pending.add(number)
        if self._held:
            unit.store({number}, self.gradient_dtype)
        elif unit.name != "root" and unit.complete:
            self._flush_behind(unit)
            # Frozen weights may still be read: their products give gradients to what came before.
            self._done(unit, free=unit.frozen is None)

    # Weights under stage 3.

    def _need(self, unit: FlatUnit, way: str) -> None:
        """Gather a unit, and begin with the ones after it in the order in which the first step asked for them."""
        order = self._order[way]
        if unit not in order:
            order.append(unit)
        at = order.index(unit)
        for wanted in order[at : at + 1 + self._ahead]:
            if not wanted.gathered:
                for region in wanted.regions:
                    region.hold()
                wanted.start_gather(self._gathers, self._shards, wanted.regions)
        unit.wait()

    # Gradients.

    def _flush_behind(self, unit: FlatUnit) -> None:
        """What lies behind a unit in the model has done its backward."""
        for other in reversed(self.units):
            if other.name != "root" and other.position > unit.position:
                self._done(other)

    def _flush(self) -> None:
        """Backward has ended."""
        for unit in sorted(self.units, key=lambda u: (u.name == "root", -u.position)):
            self._done(unit)

    def _done(self, unit: FlatUnit, *, free: bool = True) -> None:
        if unit.busy and not self._held:
            if self._stage == 1 and not self._last:
                if unit.pending:
                    unit.store(set(unit.pending), self.gradient_dtype)
            else:
                self._launch(unit)
        if self._stage == 3 and free:
            unit.free()

    def _launch(self, unit: FlatUnit) -> None:
        """Copy a unit's gradients together and reduce them beside computation."""
        while len(self._flying) >= IN_FLIGHT:
            self._land()
        buffer = unit.collect(self._reduction)
        fresh = unit.gradient is None
        if unit.gradient is None:
            unit.gradient = buffer.new_empty(buffer.numel() // self._shards.size(), dtype=self.gradient_dtype)
        with self._reduces.after_compute():
            self._reduce_into(unit, unit.gradient, buffer, fresh)
            self._flying.append((self._reduces.mark(), buffer))

    def _reduce_into(self, unit: FlatUnit, gradient: torch.Tensor, buffer: torch.Tensor, fresh: bool) -> None:
        """Mean over shards at once, over replicas when the last micro-batch's came."""
        direct = fresh and gradient.dtype == buffer.dtype
        part = gradient if direct else buffer.new_empty(gradient.numel())
        scatter_mean(part, buffer, self._shards)
        whole = self._replicas is None or (self._last and not unit.partial)
        if self._replicas is not None and whole:
            mean(part, self._replicas)
        if not direct and fresh:
            gradient.copy_(part)
        elif not direct:
            gradient.add_(part)
        unit.partial = not whole
        if self._replicas is not None and self._last and unit.partial:
            part = gradient.to(self._reduction)
            mean(part, self._replicas)
            if part is not gradient:
                gradient.copy_(part)
            unit.partial = False

    def _land(self) -> None:
        event, _ = self._flying.popleft()  # the buffer's memory may be used again by what is queued from now on
        join(event)

    def _agree(self) -> None:
        """Which parameters had a gradient on some rank: the others are not stepped, as in one process.

        Asked as long as there are some, which for most models is after the first step alone.
        """
        dormant = [(unit, number) for unit in self.units for number in sorted(unit.dormant)]
        if not dormant:
            return
        reached = torch.tensor([int(number in unit.reached) for unit, number in dormant], dtype=torch.int32)
        assert self._everyone is not None
        reached = reached.to(self.units[0].regions[0].master.device)
        dist.all_reduce(reached, op=dist.ReduceOp.MAX, group=self._everyone)
        for (unit, number), found in zip(dormant, reached.tolist(), strict=True):
            if found:
                unit.dormant.discard(number)
        for unit in self.units:
            unit.settled = True


def _tensors(output: Any) -> list[torch.Tensor]:
    """What a module returned that gradients will reach."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    logits = getattr(output, "logits", None)
    if not found and isinstance(logits, torch.Tensor):
        found = [logits]
    return [tensor for tensor in found if tensor.requires_grad]


def carry_flat(model: nn.Module, units: tuple[Unit, ...], plan: Plan, mesh: Mesh, make: Make) -> Flat:
    """Lay a model out, a unit at a time: made whole, moved into its buffer, and its shard of masters kept.

    Raises:
        RuleBroken: stage 3 for a model whose blocks share weights.
    """
    made: list[FlatUnit] = []
    owner: dict[int, Unit] = {}
    shards, rank = plan.layout.dp_shard, mesh.coordinate("dp_shard")
    for position, unit in enumerate(units):
        make(unit)
        params = list(dict.fromkeys(p for m in unit.modules for p in m.parameters()))
        shared = [owner[id(p)].name for p in params if id(p) in owner]
        if shared and unit.name != "root" and plan.shard.stage == 3:
            raise RuleBroken(
                f"shard: flat at stage 3, but {unit.name} and {shared[0]} share weights, which one would free under the other",
                fix="use stage 2, or carrier fsdp2",
            )
        own = [p for p in params if id(p) not in owner]
        owner |= {id(p): unit for p in own}
        if own:
            made.append(_flat_unit(unit, position, own, plan, shards, rank))
    stays = {position for position, unit in enumerate(units) if not reshards(unit, plan)}
    return Flat(model, made, stays, plan, mesh)


def _flat_unit(unit: Unit, position: int, params: list[nn.Parameter], plan: Plan, shards: int, rank: int) -> FlatUnit:
    dtype = compute_dtype(plan.precision, unit.role)
    sorts = ([p for p in params if p.requires_grad], [p for p in params if not p.requires_grad])
    trained, frozen = (Region(p, dtype, shards, rank, freed=plan.shard.stage == 3) if p else None for p in sorts)
    made = FlatUnit(unit, position, trained, frozen)
    if plan.shard.stage == 3:
        made.free()
    return made
