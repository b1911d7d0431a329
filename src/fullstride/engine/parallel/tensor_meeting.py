"""What trials of tensor parallelism in one process share: threads that meet as ranks do, numbers, comparisons."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fullstride.errors import BadInput

APART = 1e-3
"""Of the largest number: far above rounding in fp32, far below what another order of heads does."""
UNUSABLE = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, KeyError, AttributeError)
"""What a module's code raises where it does not run."""


class Numbers:
    """Random numbers of its own on a device, the same each time."""

    def __init__(self, device: torch.device) -> None:
        """Seeded."""
        self.device = device
        self._random = torch.Generator(device=device).manual_seed(0)

    def weight(self, shape: torch.Size) -> torch.Tensor:
        """Values of a parameter. Norms and biases: nothing that hides behind zero or one."""
        if len(shape) == 1:
            return torch.rand(shape, generator=self._random, device=self.device) + 0.5
        return self.normal(shape) * (2 / math.sqrt(max(shape[-1], 1))) if shape else self.normal(shape)

    def normal(self, shape: torch.Size) -> torch.Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self._random, device=self.device)

    def real(self, item: Any) -> Any:
        """What was seen on meta, with numbers in it; what is no tensor as it is."""
        if isinstance(item, torch.Tensor):
            if item.dtype == torch.bool:
                return torch.ones(item.shape, dtype=torch.bool, device=self.device).tril()
            if not item.is_floating_point():
                return torch.arange(item.shape[-1] if item.ndim else 1, device=self.device).to(item.dtype).expand(item.shape)
            return self.normal(item.shape)
        if isinstance(item, dict):
            return {name: self.real(value) for name, value in item.items()}
        if type(item) in (tuple, list):
            return type(item)(self.real(value) for value in item)
        return item

    def buffers(self, module: nn.Module) -> dict[int, object]:
        """Copies of a module's buffers by the originals' identity."""
        return {id(b): self.real(b) if b.is_meta else b.detach().to(self.device, copy=True) for b in module.buffers()}


def hidden_of(where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden state in what a module is called with.

    Raises:
        BadInput: it is handed over in a way that nobody would find.
    """
    given = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(given, torch.Tensor):
        raise BadInput(
            f"{where} is called without a tensor as its first argument or as hidden_states "
            f"(looked at {', '.join([type(a).__name__ for a in args[:1]] + list(kwargs)) or 'nothing'})",
            fix="hand the hidden state over as the first argument",
        )
    return given


def made_by(where: str, out: Any) -> torch.Tensor:
    """The hidden state in what a module returned.

    Raises:
        BadInput: no tensor, and no tuple that begins with one.
    """
    made = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(made, torch.Tensor):
        raise BadInput(
            f"{where} returned a {type(out).__name__}", fix="return the hidden state, or a tuple that begins with it"
        )
    return made


def apart(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two results differ by more than rounding."""
    if wanted.shape != found.shape:
        return True
    return not float((wanted - found).abs().max()) <= APART * float(wanted.abs().max())


class Meeting:
    """Where threads meet as ranks do."""

    def __init__(self, size: int) -> None:
        """For so many."""
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size
        self._error: BaseException | None = None

    def exchange(self, rank: int, item: torch.Tensor) -> list[torch.Tensor]:
        """Every thread's item, in each of them."""
        self._slots[rank] = item
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What each thread's work returned, without gradients; what one of them raises ends them all and is raised."""
        made = [None] * len(self._slots)

        def one(rank: int) -> None:
            with torch.no_grad(), self._until_one_fails():
                made[rank] = work(rank)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return made

    @contextlib.contextmanager
    def _until_one_fails(self) -> Iterator[None]:
        try:
            yield
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # raised again by `run`
            self._error = self._error or error
            self._barrier.abort()
