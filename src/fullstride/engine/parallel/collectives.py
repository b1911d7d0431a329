"""Collectives that compile: a start that returns at once, and a wait.

They are torch's functional collectives by their operators' names (`torch.ops._c10d_functional`, what the public-looking
`torch.distributed._functional_collectives` calls inside), which have no public door yet. This is the one file that names
them: `torch.distributed`'s own functions, which write into tensors they are given, break a compiled block into pieces.
A started result may be used only after `wait`; between the two, whatever is computed runs beside it.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

_ops = torch.ops._c10d_functional
SENT = "fullstride::product_summed"
"""The operator of a product and its sum over ranks in one (`tensor_exit.py`), by which a selective recomputation knows it."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks that share one copy of a model's products, and this rank's place among them."""

    size: int
    rank: int
    name: str
    """Of the process group."""


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """Describe a group in what a compiler can hold as constants."""
    return Ranks(dist.get_world_size(group), dist.get_rank(group), group.group_name)


def start_all_reduce(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum over the ranks; the input stays as it is."""
    started: torch.Tensor = _ops.all_reduce(tensor.contiguous(), "sum", ranks.name)
    return started


def start_gather(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All ranks' tensors, one behind the other on dim 0."""
    started: torch.Tensor = _ops.all_gather_into_tensor(tensor.contiguous(), ranks.size, ranks.name)
    return started


def start_reduce_scatter(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """This rank's part, on dim 0, of the sum over the ranks."""
    started: torch.Tensor = _ops.reduce_scatter_tensor(tensor.contiguous(), "sum", ranks.size, ranks.name)
    return started


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """A started result, ready for use by what follows on this stream."""
    done: torch.Tensor = _ops.wait_tensor(tensor)
    return done


def sequence_first(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """[samples, seq, ...] as [parts x samples, seq / parts, ...], so that dim 0 can be cut; a view of one sample."""
    samples, length = tensor.shape[:2]
    return tensor.view(samples, parts, length // parts, *tensor.shape[2:]).transpose(0, 1).flatten(0, 1)


def sequence_back(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """The other way round."""
    samples, length = tensor.shape[0] // parts, tensor.shape[1]
    return tensor.view(parts, samples, length, *tensor.shape[2:]).transpose(0, 1).flatten(1, 2)
