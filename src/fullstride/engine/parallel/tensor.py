"""Tensor parallelism: a model's products cut over ranks, its modules and names as they were.

Where collectives stand is said in docs/tensor.md. This file decides who holds what and replaces the forward of some modules'
instances: of regions (attention, MLP, experts), of the products at their borders, of the embedding. What passes the borders is
in tensor_ops.py, what a block consists of in anatomy_block.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.anatomy_region import Part, Region, Slicing, is_transposed
from fullstride.engine.loss import Vocabulary
from fullstride.engine.memory.recompute import chosen
from fullstride.engine.mesh import Mesh
from fullstride.engine.parallel.collectives import Ranks, ranks_of
from fullstride.engine.parallel.tensor_exit import Exit
from fullstride.engine.parallel.tensor_forward import (
    Group,
    closing,
    column,
    crossing,
    entering,
    looking_up,
    replace,
    row,
    scattering,
    wide_norm,
)
from fullstride.engine.parallel.tensor_look import UNKNOWN, Ends, Seen
from fullstride.engine.parallel.tensor_parts import Border
from fullstride.engine.parallel.tensor_shares import set_shares
from fullstride.engine.pieces import Cut
from fullstride.errors import RuleBroken
from fullstride.plan.plan import Plan

PARTS = 2
"""Parts of a product whose exchange is overlapped: half of each exchange can hide. A further part hides less than the one
before (1 / n stays outside), and each costs the start of a collective and a smaller product."""


@dataclasses.dataclass(kw_only=True)
class TensorParallel:
    """Who holds what."""

    ranks: Ranks
    vocabulary: Vocabulary | None
    """Rows of the head; None on a pipeline's stage without it."""
    slicings: dict[str, Slicing]
    """Of the parameters that are cut, by name."""
    terms: frozenset[str]
    """Parameters held whole whose gradient is a sum over the ranks."""
    groups: dict[int, dist.ProcessGroup]
    """Of the ranks that hold one share, by their number; `size` of all for `terms`."""

    def cut(self, name: str) -> Cut | None:
        """This rank's share of a parameter; None if it holds all of it."""
        slicing = self.slicings.get(name)
        return None if slicing is None else slicing.cut(self.ranks.rank, self.ranks.size)

    def counted(self, name: str) -> bool:
        """Whether this rank counts its elements, of the ranks that hold the same."""
        slicing = self.slicings.get(name)
        return self.ranks.rank % (self.ranks.size if slicing is None else slicing.copies) == 0

    def sharers(self, name: str) -> int:
        """Over how many ranks a gradient is summed after the last micro-batch; 1: it is whole as it is."""
        slicing = self.slicings.get(name)
        if slicing is not None:
            return slicing.copies
        return self.ranks.size if name in self.terms else 1

    def settle(self, gradients: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Sum what are terms, in place: one collective for each number of sharers.

        Args:
            gradients: this rank's parts by name, equal in order and shape on all ranks that share them.
            dtype: they are summed in it.
        """
        for size, group in self.groups.items():
            found = [grad for name, grad in gradients.items() if self.sharers(name) == size and grad.numel()]
            if not found:
                continue
            flat = torch.cat([grad.reshape(-1).to(dtype) for grad in found])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [grad.numel() for grad in found])
            torch._foreach_copy_(found, [part.view(grad.shape) for part, grad in zip(parts, found, strict=True)])


def tensor_parallel(
    model: nn.Module, whole: Anatomy, anatomy: Anatomy, plan: Plan, mesh: Mesh, seen: Seen | None
) -> TensorParallel | None:
    """Prepare a model for cut weights; None with one tensor-parallel rank.

    The weights themselves are cut when they are made, by `cut`. All ranks must call it: groups are made.

    Args:
        model: its parameters on meta, or real and whole.
        whole: of the model.
        anatomy: of the part that is this rank's stages; the same without a pipeline.
        plan: of which layout, overlap and recompute count.
        mesh: of all ranks.
        seen: what `look` found in the whole model.

    Raises:
        RuleBroken: a vocabulary smaller than the ranks.
    """
    group = mesh.group("tp")
    if group is None or seen is None:
        return None
    ranks = ranks_of(group)
    found = [seen.regions[block] for block in anatomy.blocks]
    slicings = _vocabulary_slicings(model, anatomy)
    for region in (region for block in found for region in block):
        slicings |= region.slicings
    border = Border(ranks, plan.layout.sequence_parallel, PARTS if plan.overlap.tensor else 1)
    again = set(chosen(len(anatomy.blocks), plan.recompute))
    for index, block in enumerate(found):
        mode = plan.recompute.mode if index in again else "none"
        for region in block:
            _cut_region(model, region, border, mode, seen.ends.get(region.path, UNKNOWN))
    vocabulary = _cut_vocabulary(model, anatomy, slicings, ranks)
    _cut_stream(model, whole, anatomy, border)
    terms = {name for block in found for region in block for name in region.terms}
    if border.sequence:
        terms |= _norms_of_the_stream(model, anatomy, found, slicings)
    groups = {ranks.size: group}
    for copies in range(2, ranks.size):  # all of them, because other stages may need others
        if ranks.size % copies == 0 and (part := mesh.part("tp", copies)) is not None:
            groups[copies] = part
    return TensorParallel(ranks=ranks, vocabulary=vocabulary, slicings=slicings, terms=frozenset(terms), groups=groups)


# Regions.


def _cut_region(model: nn.Module, region: Region, border: Border, mode: str, ends: Ends) -> None:
    """Replace the forwards of one region; `mode`: how its block is made again."""
    set_shares(model, region)
    root: Any = model.get_submodule(region.path)
    members = [model.get_submodule(path) for path in region.columns]
    in_parts = border.parts > 1 and border.sequence and ends.entry and bool(members)
    group = Group(members, border, mode != "none", in_parts)
    for index, member in enumerate(members):
        replace(member, column(member, group, index))
    for path in region.inner:
        module: Any = model.get_submodule(path)
        if is_transposed(module):
            ranges = region.slicings[f"{path}.weight"].cut(0, border.ranks.size).ranges
            module.nf = sum(hi - lo for lo, hi in ranges)
    first = border.ranks.rank == 0
    for path in region.rows:
        module = model.get_submodule(path)
        how = Exit(border, is_transposed(module), first, whole=mode == "norm_activation")
        replace(module, closing(module, how) if ends.exit else row(module, first))
    for path, copies in region.wide_norms.items():
        replace(model.get_submodule(path), wide_norm(model.get_submodule(path), border.ranks, copies))
    replace(root, crossing(root.forward, group if members else None, border, closed=ends.exit))


# The stream between regions.


def _cut_stream(model: nn.Module, whole: Anatomy, anatomy: Anatomy, border: Border) -> None:
    """Cut the sequence before the first block, and enter the last region, that of the head, behind the final norm."""
    if border.sequence and whole.blocks[0] in anatomy.blocks:
        model.get_submodule(whole.blocks[0]).register_forward_pre_hook(scattering(border), with_kwargs=True)
    last = whole.final_norm or whole.blocks[-1]
    if last in (anatomy.final_norm, *anatomy.blocks):
        model.get_submodule(last).register_forward_hook(entering(border))


def _norms_of_the_stream(
    model: nn.Module, anatomy: Anatomy, found: list[list[Region]], slicings: dict[str, Slicing]
) -> set[str]:
    """Weights that see one part of the sequence each: those of a block outside its regions, and of norms behind the blocks."""
    names = set()
    for block, inside in zip(anatomy.blocks, found, strict=True):
        for name, _ in model.get_submodule(block).named_parameters(prefix=block):
            if not any(name.startswith(f"{region.path}.") for region in inside):
                names.add(name)
    for path in (path for path in (*anatomy.late_norms, anatomy.final_norm) if path):
        names |= {name for name, _ in model.get_submodule(path).named_parameters(prefix=path)}
    return names - set(slicings)


# Embedding and head.


def _vocabulary_slicings(model: nn.Module, anatomy: Anatomy) -> dict[str, Slicing]:
    made = {}
    for path in (path for path in (anatomy.embedding, anatomy.head) if path):
        for name, param in model.get_submodule(path).named_parameters(prefix=path, recurse=False):
            made[name] = Slicing(0, (Part(param.shape[0]),))
    return made


def _cut_vocabulary(model: nn.Module, anatomy: Anatomy, slicings: dict[str, Slicing], ranks: Ranks) -> Vocabulary | None:
    for path in (path for path in (anatomy.embedding, anatomy.head) if path):
        size = model.get_parameter(f"{path}.weight").shape[0]
        if ranks.size > size:
            raise RuleBroken(
                f"layout.tp = {ranks.size}, {path} has {size} rows: each tensor-parallel rank holds a row of the vocabulary",
                fix="lower layout.tp",
            )
    if anatomy.embedding:
        ((lo, hi),) = slicings[f"{anatomy.embedding}.weight"].cut(ranks.rank, ranks.size).ranges
        embedding: Any = model.get_submodule(anatomy.embedding)
        padding = getattr(embedding, "padding_idx", None)
        if padding is not None:
            embedding.padding_idx = padding - lo if lo <= padding < hi else None
        replace(embedding, looking_up(embedding.forward, lo, hi, ranks))
    if not anatomy.head:
        return None
    ((lo, hi),) = slicings[f"{anatomy.head}.weight"].cut(ranks.rank, ranks.size).ranges
    return Vocabulary(ranks=ranks, lo=lo, hi=hi)
