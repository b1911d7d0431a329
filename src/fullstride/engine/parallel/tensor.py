"""Tensor parallelism: a model's products cut over ranks, its modules and names as they were.

Where collectives stand is said in docs/tensor.md. This file decides who holds what and replaces the forward of some modules'
instances: of regions (attention, MLP, experts), of the products at their borders, of the embedding. What passes the borders is
in tensor_ops.py, what a block consists of in anatomy_block.py.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullstride.engine.anatomy import Anatomy
from fullstride.engine.anatomy_block import regions
from fullstride.engine.anatomy_region import Part, Region, Slicing, is_transposed
from fullstride.engine.loss import Vocabulary
from fullstride.engine.memory.recompute import chosen
from fullstride.engine.mesh import Mesh
from fullstride.engine.parallel.collectives import Ranks, ranks_of
from fullstride.engine.parallel.tensor_forward import (
    Group,
    column,
    crossing,
    entering,
    looking_up,
    replace,
    row,
    scattering,
    wide_norm,
)
from fullstride.engine.parallel.tensor_ops import Border
from fullstride.engine.pieces import Cut
from fullstride.errors import BadInput, RuleBroken
from fullstride.plan.facts import BYTES
from fullstride.plan.plan import Plan


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


def tensor_parallel(model: nn.Module, whole: Anatomy, anatomy: Anatomy, plan: Plan, mesh: Mesh) -> TensorParallel | None:
    """Prepare a model for cut weights; None with one tensor-parallel rank.

    The weights themselves are cut when they are made, by `cut`. All ranks must call it: groups are made.

    Args:
        model: its parameters on meta, or real and whole.
        whole: of the model.
        anatomy: of the part that is this rank's stages; the same without a pipeline.
        plan: of which layout and recompute count.
        mesh: of all ranks.

    Raises:
        BadInput: parts that were not found, with the names that were looked at.
        RuleBroken: this model cannot be cut over so many ranks.
    """
    group = mesh.group("tp")
    if group is None:
        return None
    ranks = ranks_of(group)
    refuse_uncut(model, anatomy, ranks.size, first=anatomy is whole)
    hidden, item_bytes = _width(model, anatomy), BYTES[plan.precision.block]
    if anatomy is whole:  # a stage cannot tell: the name may be another stage's
        _require_named(model, anatomy, plan)
    found = [regions(model, block, hidden, ranks.size, plan.layout.parts, item_bytes) for block in anatomy.blocks]
    slicings = _vocabulary_slicings(model, anatomy)
    for region in (region for block in found for region in block):
        slicings |= region.slicings
    if anatomy is whole:
        try_on_meta(model, [region for block in found for region in block], ranks)
    border = Border(ranks, plan.layout.sequence_parallel)
    kept = set(chosen(len(anatomy.blocks), plan.recompute))
    for index, block in enumerate(found):
        for region in block:
            _cut_region(model, region, border, index in kept)
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


# What cannot be cut.


def _width(model: nn.Module, anatomy: Anatomy) -> int:
    """Of the residual stream: of the embedding, or where a stage has none, of the norms in its blocks."""
    if anatomy.embedding:
        return int(model.get_parameter(f"{anatomy.embedding}.weight").shape[1])
    for module in model.get_submodule(anatomy.blocks[0]).children():
        if "norm" in type(module).__name__.lower():
            return int(next(module.parameters()).shape[0])
    raise BadInput(f"{anatomy.blocks[0]} has no norm, which would say how wide its input is", fix="use layout.tp = 1")


def _require_named(model: nn.Module, anatomy: Anatomy, plan: Plan) -> None:
    """What the user named is there: a name that nothing has would do nothing."""
    paths = [f"{block}.{name}" for block in anatomy.blocks for name, _ in model.get_submodule(block).named_modules()]
    for end in plan.layout.parts:
        if not any(f".{path}".endswith(f".{end}") for path in paths):
            seen = ", ".join(name for name, module in model.get_submodule(anatomy.blocks[0]).named_modules() if name)
            raise BadInput(f"layout.parts names {end!r}, which no block has (one has {seen})", fix="correct the name")


def refuse_uncut(model: nn.Module, anatomy: Anatomy, tp: int, *, first: bool = True) -> None:
    """Refuse what cannot be cut, whatever its blocks are.

    Raises:
        RuleBroken: something random inside.
        BadInput: no head, or weights outside the blocks that nobody knows.
    """
    for path, module in model.named_modules():
        name = type(module).__name__
        dropped = getattr(module, "p", 0) if "dropout" in name.lower() else getattr(module, "attention_dropout", 0)
        noise = getattr(module, "jitter_noise", 0)
        for word, value in (("dropout", dropped), ("router noise", noise)):
            if isinstance(value, float) and value > 0:
                raise RuleBroken(
                    f"layout.tp = {tp}, {path} ({name}) draws {word} of {value}: tensor-parallel ranks would draw differently",
                    fix=f"set {word} to 0 in the model's configuration, or use layout.tp = 1",
                )
    if first and not isinstance(model.get_submodule(anatomy.head) if anatomy.head else None, nn.Linear):
        raise BadInput(
            f"layout.tp = {tp}: {type(model).__name__} has no nn.Linear that makes logits "
            f"(looked at {anatomy.head or 'get_output_embeddings and linear layers as wide as the vocabulary'})",
            fix="use an nn.Linear for the logits, or layout.tp = 1",
        )
    inside = [path for path in (anatomy.block_list, anatomy.embedding, anatomy.head) if path]
    for path, module in model.named_modules():
        if any(f"{path}.".startswith(f"{part}.") for part in inside) or "norm" in type(module).__name__.lower():
            continue
        own = [n for n, _ in module.named_parameters(recurse=False)]
        if own and not isinstance(module, nn.Embedding):
            raise BadInput(
                f"layout.tp = {tp}: {path or type(model).__name__} has {', '.join(own)} outside the blocks, which is neither "
                "embedding, norm nor head",
                fix="use layout.tp = 1",
            )


def try_on_meta(model: nn.Module, found: list[Region], ranks: Ranks) -> None:
    """Run a copy without memory whose blocks are one rank's, where the model is no family of transformers.

    A module that reckons with sizes of its own meets shapes that do not fit, and is refused here.
    """
    if hasattr(model, "get_input_embeddings"):
        return
    from fullstride.engine.anatomy import meta_twin

    tokens = torch.zeros(1, 2 * ranks.size, dtype=torch.int64, device="meta")
    twin = meta_twin(model)
    try:
        with torch.no_grad():
            twin(tokens)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return  # it does not run on meta at all, which says nothing
    entered = [found[0].path]
    for region in found:
        _set(twin, region)
        for name, slicing in region.slicings.items():
            _shorten(twin, name, slicing.cut(0, ranks.size))
        twin.get_submodule(region.path).register_forward_pre_hook(lambda _m, _a, path=region.path: entered.append(path))
    try:
        with torch.no_grad():
            twin(tokens)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        line = str(error).strip().splitlines()[0]
        looked = ", ".join(n for n, _ in model.get_submodule(entered[-1]).named_children())
        raise BadInput(
            f"layout.tp = {ranks.size}: {type(model).__name__}'s code does not take a rank's share of heads and columns "
            f"({line}; looked at {entered[-1]}: {looked})",
            fix="let it take sizes from its tensors (-1 in view) or from attributes such as num_heads, or use layout.tp = 1",
        ) from None


def _shorten(model: nn.Module, name: str, cut: Cut) -> None:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    old = getattr(module, attribute)
    shape = list(old.shape)
    shape[cut.dim] = sum(hi - lo for lo, hi in cut.ranges)
    setattr(module, attribute, nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=False))


# Regions.


def _set(model: nn.Module, region: Region) -> None:
    """Let modules reckon with a rank's share."""
    for path, name, value in region.settings:
        setattr(model.get_submodule(path), name, value)
    root: Any = model.get_submodule(region.path)
    if region.heads and _asks_configuration(root):
        root.config = copy.copy(root.config)
        for name, value in region.heads.items():
            if isinstance(getattr(root.config, name, None), int):
                setattr(root.config, name, value)


def _asks_configuration(module: nn.Module) -> bool:
    names = set(getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ()))
    return hasattr(module, "config") and bool({"num_attention_heads", "num_key_value_heads"} & names)


def _cut_region(model: nn.Module, region: Region, border: Border, keep: bool) -> None:
    _set(model, region)
    root: Any = model.get_submodule(region.path)
    members = [model.get_submodule(path) for path in region.columns]
    group = Group(members, border, keep)
    for index, member in enumerate(members):
        replace(member, column(member, group, index))
    for path in region.inner:
        module: Any = model.get_submodule(path)
        if is_transposed(module):
            ranges = region.slicings[f"{path}.weight"].cut(0, border.ranks.size).ranges
            module.nf = sum(hi - lo for lo, hi in ranges)
    for path in region.rows:
        replace(model.get_submodule(path), row(model.get_submodule(path), border.ranks.rank == 0))
    for path, copies in region.wide_norms.items():
        replace(model.get_submodule(path), wide_norm(model.get_submodule(path), border.ranks, copies))
    replace(root, crossing(root.forward, group if members else None, border))


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
    """Weights that see one part of the sequence each: those of a block outside its regions, and the final norm's."""
    names = set()
    for block, inside in zip(anatomy.blocks, found, strict=True):
        for name, _ in model.get_submodule(block).named_parameters(prefix=block):
            if not any(name.startswith(f"{region.path}.") for region in inside):
                names.add(name)
    if anatomy.final_norm:
        names |= {name for name, _ in model.get_submodule(anatomy.final_norm).named_parameters(prefix=anatomy.final_norm)}
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
