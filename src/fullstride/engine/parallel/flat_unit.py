"""One unit's weights and gradients as flat buffers.

    whole    | matrix 0 | matrix 1 | ... | vector 0 | ... | padding |      compute dtype; parameters are views of it
    master   |      rank 0's shard       |      rank 1's shard      |      master dtype; what is stepped

Matrices stand first, so that weight decay covers one run. Holes and padding hold zeros, in gradients too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from fullstride.engine.anatomy import Unit
from fullstride.engine.parallel.flat_comm import Lane, gather, join
from fullstride.plan.flat import aligned, flat_size


@dataclasses.dataclass(frozen=True)
class Slot:
    """A parameter's place in a buffer."""

    param: nn.Parameter
    offset: int
    count: int
    shape: torch.Size

    @property
    def decayed(self) -> bool:
        """Matrices are, vectors are not."""
        return len(self.shape) >= 2

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its view of a whole buffer."""
        return buffer[self.offset : self.offset + self.count].view(self.shape)


class Region:
    """Parameters in one buffer, and this rank's shard of it.

    Attributes:
        whole: 1-D, compute dtype; its memory is freed and taken again under stage 3, under which views of it stay valid.
        master: 1-D, this rank's shard; a view of `whole` where dtypes are equal and `whole` always stays.
        lo, hi: the shard's place in the buffer.
        narrowed: the optimizer wrote its results to this rank's place of `whole` as well.
    """

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, shards: int, rank: int, *, freed: bool) -> None:
        """Move whole, valued parameters in: from now on they are views."""
        first = params[0]
        self.size = flat_size((p.numel() for p in params), shards)
        self.slots = tuple(_slots(sorted(params, key=lambda p: p.ndim < 2)))
        self.lo, self.hi = rank * self.size // shards, (rank + 1) * self.size // shards
        self.whole = torch.zeros(self.size, dtype=dtype, device=first.device)
        self.narrowed = False
        shared = dtype == first.dtype and not freed
        self.master = self.own if shared else torch.zeros(self.hi - self.lo, dtype=first.dtype, device=first.device)
        for slot in self.slots:
            values = slot.param.detach().reshape(-1)
            slot.of(self.whole).view(-1).copy_(values)
            a, b = self.within(slot)
            if not shared and a < b:
                self.master[a:b].copy_(values[a + self.lo - slot.offset : b + self.lo - slot.offset])
            slot.param.data = slot.of(self.whole)

    @property
    def own(self) -> torch.Tensor:
        """This rank's place in the whole buffer."""
        return self.whole[self.lo : self.hi]

    def within(self, slot: Slot) -> tuple[int, int]:
        """A parameter's run of the shard, empty if none of it lies there."""
        a = min(max(slot.offset, self.lo), self.hi) - self.lo
        b = min(max(slot.offset + slot.count, self.lo), self.hi) - self.lo
        return a, b

    def holes(self, buffer: torch.Tensor, written: set[int]) -> list[torch.Tensor]:
        """Parts of a buffer that nothing was written to, given the numbers of the slots that were."""
        found, at = [], 0
        for number, slot in enumerate(self.slots):
            if number in written:
                if at < slot.offset:
                    found.append(buffer[at : slot.offset])
                at = slot.offset + slot.count
        return found + ([buffer[at:]] if at < self.size else [])

    def gather(self, group: dist.ProcessGroup) -> None:
        """Make the whole buffer from the masters of all ranks."""
        part = self.master
        if part.dtype != self.whole.dtype:
            part = self.own if self.narrowed else self.own.copy_(part)
        self.narrowed = False
        gather(self.whole, part, group)

    def hold(self) -> None:
        """Take memory for the whole buffer."""
        self.whole.untyped_storage().resize_(self.size * self.whole.element_size())

    def free(self) -> None:
        """Give it back."""
        self.whole.untyped_storage().resize_(0)


def _slots(params: Iterable[nn.Parameter]) -> Iterator[Slot]:
    at = 0
    for param in params:
        yield Slot(param, at, param.numel(), param.shape)
        at += aligned(param.numel())


class FlatUnit:
    """A unit's regions, its gradients on their way, and whether its weights are there.

    Attributes:
        trained, frozen: None if there are no such parameters.
        pending: numbers of the slots whose `.grad` waits to be taken.
        dormant: slots that no rank ever had a gradient for; nobody waits for them once a first step has `settled` it.
        reached: slots that had a gradient on this rank since the last step.
        stored: sums over micro-batches, whole, in the gradient dtype; None until something is added.
        gradient: this rank's shard of the mean over ranks; None until something was reduced.
        partial: `gradient` still misses the mean over replicas.
    """

    def __init__(self, unit: Unit, position: int, trained: Region | None, frozen: Region | None) -> None:
        """Weights are there."""
        self.name, self.role, self.modules, self.position = unit.name, unit.role, unit.modules, position
        self.trained, self.frozen = trained, frozen
        self.pending: set[int] = set()
        self.dormant = set(range(len(trained.slots))) if trained else set()
        self.settled = False
        self.reached: set[int] = set()
        self.stored: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        self.partial = False
        self.gathered = True
        self._stored_slots: set[int] = set()
        self._ready: torch.cuda.Event | None = None
        self._stepped: torch.cuda.Event | None = None
        self._spent: torch.Tensor | None = None

    @property
    def regions(self) -> tuple[Region, ...]:
        """Those that are there."""
        return tuple(region for region in (self.trained, self.frozen) if region is not None)

    @property
    def only_looked_up(self) -> bool:
        """Backward of an embedding does not read its weights."""
        return all(type(module) is nn.Embedding and module.max_norm is None for module in self.modules)

    @property
    def complete(self) -> bool:
        """Every gradient that is awaited has come."""
        assert self.trained is not None
        awaited = len(self.trained.slots)
        return len(self.pending | self.dormant if self.settled else self.pending) == awaited

    @property
    def busy(self) -> bool:
        """Gradients wait to be reduced."""
        return bool(self.pending) or self.stored is not None

    def start_gather(self, lane: Lane, group: dist.ProcessGroup, regions: tuple[Region, ...]) -> None:
        """Queue the gathering of current weights."""
        with lane.after_compute(self._stepped):
            for region in regions:
                region.gather(group)
            self._ready = lane.mark()
        self.gathered = True

    def stepped(self, event: torch.cuda.Event | None) -> None:
        """The optimizer's step was queued, up to this point of its lane; the gradient's memory is its until then."""
        self._stepped = event
        self._spent = self.gradient if event is not None else None

    def wait(self) -> None:
        """Let computation wait until the masters are stepped and the weights are there."""
        join(self._stepped)
        join(self._ready)
        self._ready = self._stepped = self._spent = None

    def free(self) -> None:
        """Let the gathered weights go, after whatever was queued on them."""
        if self.gathered:
            self.wait()
            for region in self.regions:
                region.free()
            self.gathered = False

    def take(self, numbers: set[int]) -> tuple[list[int], list[torch.Tensor]]:
        """The `.grad`s of slots, which are None afterwards."""
        assert self.trained is not None
        chosen, grads = sorted(numbers), []
        self.reached |= numbers
        for number in chosen:
            param = self.trained.slots[number].param
            assert param.grad is not None
            grads.append(param.grad)
            param.grad = None
        self.pending -= numbers
        return chosen, grads

    def store(self, numbers: set[int], dtype: torch.dtype) -> None:
        """Add the `.grad`s of slots to the sums of this rank."""
        assert self.trained is not None
        if self.stored is None:
            self.stored = torch.empty(self.trained.size, dtype=dtype, device=self.trained.whole.device)
            self._stored_slots = set()
        chosen, grads = self.take(numbers)
        stored, slots = self.stored, self.trained.slots
        first = [(slots[n].of(stored), g) for n, g in zip(chosen, grads, strict=True) if n not in self._stored_slots]
        later = [(slots[n].of(stored), g) for n, g in zip(chosen, grads, strict=True) if n in self._stored_slots]
        if first:
            torch._foreach_copy_([view for view, _ in first], [grad for _, grad in first])
        for view, grad in later:  # of unequal dtypes, so that one kernel widens and adds
            view.add_(grad)
        self._stored_slots |= numbers

    def collect(self, dtype: torch.dtype) -> torch.Tensor:
        """All gradients that wait, as one whole buffer; zeros where there are none.

        A single parameter that fills its buffer is not copied at all.
        """
        assert self.trained is not None
        if self.stored is not None:
            if self.pending:
                self.store(set(self.pending), self.stored.dtype)
            buffer, self.stored = self.stored, None
            _zero(self.trained.holes(buffer, self._stored_slots))
            return buffer.to(dtype)
        written, grads = self.take(set(self.pending))
        alone = grads[0] if len(grads) == 1 else None
        if alone is not None and alone.numel() == self.trained.size and alone.dtype == dtype and alone.is_contiguous():
            return alone.view(-1)
        buffer = torch.empty(self.trained.size, dtype=dtype, device=self.trained.whole.device)
        torch._foreach_copy_([self.trained.slots[number].of(buffer) for number in written], grads)
        _zero(self.trained.holes(buffer, set(written)))
        return buffer

    def drop(self) -> None:
        """Forget the gradients."""
        self.pending.clear()
        self.reached.clear()
        self.stored = self.gradient = None
        self.partial = False


def _zero(parts: list[torch.Tensor]) -> None:
    if parts:
        torch._foreach_zero_(parts)
