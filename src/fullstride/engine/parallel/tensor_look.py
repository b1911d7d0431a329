"""What tensor parallelism finds in a whole model before anything in it is replaced: its regions, and how they begin and end."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy import Anatomy, meta_inputs, meta_twin
from fullstride.engine.anatomy_block import regions
from fullstride.engine.anatomy_region import FUSED, FUSED_ELSE, Region
from fullstride.engine.parallel.collectives import Ranks
from fullstride.engine.parallel.tensor_random import draws
from fullstride.engine.parallel.tensor_shares import set_shares
from fullstride.engine.parallel.tensor_stream import try_stream
from fullstride.engine.parallel.tensor_trial import is_tested, try_numbers
from fullstride.engine.pieces import Cut
from fullstride.errors import BadInput, RuleBroken
from fullstride.plan.facts import BYTES
from fullstride.plan.plan import Plan


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a region's own code does at its borders."""

    entry: bool
    """The products that read its input are handed it as it is."""
    exit: bool
    """Its result is that of one product, as it is."""


UNKNOWN = Ends(entry=False, exit=False)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A whole model's regions."""

    regions: Mapping[str, list[Region]]
    """By block."""
    ends: Mapping[str, Ends]
    """By region; those that could not be seen are missing."""


def look(model: nn.Module, anatomy: Anatomy, plan: Plan, device: torch.device | None = None) -> Seen | None:
    """Look at a model before a pipeline cuts it; None with one tensor-parallel rank.

    Args:
        model: unmodified, its parameters on meta, or real and whole.
        anatomy: of all of it.
        plan: of which layout, precision and overlap count.
        device: where blocks of unknown code are tried; the CPU by default.

    Raises:
        BadInput: parts that were not found, with the names that were looked at; code that a rank's share does not go with.
        RuleBroken: this model cannot be cut over so many ranks, or has no product whose exchange could be overlapped.
    """
    tp = plan.layout.tp
    if tp == 1:
        return None
    refuse_uncut(model, anatomy, tp)
    _require_named(model, anatomy, plan)
    found = _that_holds(model, anatomy, plan, device or torch.device("cpu"))
    every = [region for block in found.values() for region in block]
    ends = ends_of(model, every)
    if plan.overlap.tensor and not any(end.exit or end.entry for end in ends.values()):
        raise RuleBroken(
            f"overlap.tensor = true: no region of {type(model).__name__} begins or ends with a product (looked at "
            f"{', '.join(region.path for region in every[:2])}), and only products at a border are cut into parts",
            fix="leave overlap.tensor out",
        )
    return Seen(regions=found, ends=ends)


def _that_holds(model: nn.Module, anatomy: Anatomy, plan: Plan, device: torch.device) -> dict[str, list[Region]]:
    """The regions by block, tried where nobody has before; fused products may be arranged in two ways."""
    found = _read(model, anatomy, plan, FUSED)
    if is_tested(model, anatomy):
        return found
    try_stream(model, anatomy, found, plan.layout.tp, sequence=plan.layout.sequence_parallel)
    try:
        _try(model, anatomy, found, plan, device)
    except BadInput:
        with contextlib.suppress(BadInput, RuleBroken):
            other = _read(model, anatomy, plan, FUSED_ELSE)
            if other != found:
                _try(model, anatomy, other, plan, device)
                return other
        raise
    return found


def _read(model: nn.Module, anatomy: Anatomy, plan: Plan, fused: Mapping[str, str]) -> dict[str, list[Region]]:
    hidden, item_bytes = int(model.get_parameter(f"{anatomy.embedding}.weight").shape[1]), BYTES[plan.precision.block]
    tp, named = plan.layout.tp, plan.layout.parts
    return {block: regions(model, block, hidden, tp, named, item_bytes, fused) for block in anatomy.blocks}


def _try(model: nn.Module, anatomy: Anatomy, found: Mapping[str, list[Region]], plan: Plan, device: torch.device) -> None:
    tp, sequence = plan.layout.tp, plan.layout.sequence_parallel
    try_on_meta(model, [region for block in found.values() for region in block], Ranks(tp, 0, ""))
    if not try_numbers(model, anatomy, found, tp, device, sequence=sequence):
        warnings.warn(
            f"layout.tp = {tp}: blocks of {type(model).__name__} do not run by themselves, so that nobody has seen whether its "
            "code goes with a rank's share of heads and columns",
            stacklevel=2,
        )


def ends_of(model: nn.Module, found: list[Region]) -> dict[str, Ends]:
    """How regions begin and end, seen in a copy without memory; empty where that does not run."""
    twin = meta_twin(model)
    for region in found:
        if any(slicing.dim > 0 and model.get_parameter(name).ndim == 3 for name, slicing in region.slicings.items()):
            experts: Any = twin.get_submodule(region.path)  # who routes by value has none here
            experts.forward = lambda hidden_states, *_args, **_kwargs: hidden_states
    watched = [_Watched(twin, region) for region in found]
    args, kwargs = meta_inputs(model)
    try:
        with torch.no_grad():
            twin(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
        return {}
    return {each.region.path: each.ends() for each in watched}


class _Watched:
    """One region of the copy while it runs."""

    def __init__(self, twin: nn.Module, region: Region) -> None:
        self.region = region
        self._inputs: list[Any] = []
        self._read: list[bool] = []
        self._made: list[Any] = []
        self._result: Any = None
        root = twin.get_submodule(region.path)
        root.register_forward_pre_hook(self._enter, with_kwargs=True)
        root.register_forward_hook(self._leave)
        for path in region.columns:
            twin.get_submodule(path).register_forward_pre_hook(self._reads)
        for path in region.rows:
            twin.get_submodule(path).register_forward_hook(lambda _m, _a, out: self._made.append(out))

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append(args[0] if args else kwargs.get("hidden_states"))

    def _reads(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._read.append(bool(self._inputs) and args[0] is self._inputs[-1])

    def _leave(self, _module: nn.Module, _args: Any, out: Any) -> None:
        self._result = out[0] if isinstance(out, tuple) else out

    def ends(self) -> Ends:
        """Each product was used once, and nothing stood between it and the border."""
        once = len(self._inputs) == 1
        entry = once and len(self._read) == len(self.region.columns) > 0 and all(self._read)
        exit_ = once and len(self._made) == 1 and self._made[0] is self._result and self._made[0].ndim == 3
        return Ends(entry=entry, exit=exit_)


# What cannot be cut.


def _require_named(model: nn.Module, anatomy: Anatomy, plan: Plan) -> None:
    """What the user named is there: a name that nothing has would do nothing."""
    paths = [f"{block}.{name}" for block in anatomy.blocks for name, _ in model.get_submodule(block).named_modules()]
    for end in plan.layout.parts:
        if not any(f".{path}".endswith(f".{end}") for path in paths):
            seen = ", ".join(name for name, module in model.get_submodule(anatomy.blocks[0]).named_modules() if name)
            raise BadInput(f"layout.parts names {end!r}, which no block has (one has {seen})", fix="correct the name")


def refuse_uncut(model: nn.Module, anatomy: Anatomy, tp: int) -> None:
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
    if drawn := draws(model):
        raise RuleBroken(
            f"layout.tp = {tp}, {drawn}: tensor-parallel ranks would draw differently",
            fix="leave it out, or use layout.tp = 1",
        )
    takes = "alibi" in inspect.signature(model.get_submodule(anatomy.blocks[0]).forward).parameters
    if getattr(getattr(model, "config", None), "alibi", takes):
        raise RuleBroken(
            f"layout.tp = {tp}, {type(model).__name__} has alibi: the bias is made for all heads outside attention",
            fix="use rotary positions (alibi = False) where the family has them, or layout.tp = 1",
        )
    table: Any = model.get_submodule(anatomy.embedding)
    odd = next((name for name in ("scale_grad_by_freq", "sparse") if getattr(table, name, False)), "")
    if odd:
        raise RuleBroken(
            f"layout.tp = {tp}, {anatomy.embedding} ({type(table).__name__}) has {odd} = True: its gradient would be another",
            fix=f"leave {odd} out, or use layout.tp = 1",
        )
    if not isinstance(model.get_submodule(anatomy.head) if anatomy.head else None, nn.Linear):
        raise BadInput(
            f"layout.tp = {tp}: {type(model).__name__} has no nn.Linear that makes logits "
            f"(looked at {anatomy.head or 'get_output_embeddings and linear layers as wide as the vocabulary'})",
            fix="use an nn.Linear for the logits, name it in model.head, or use layout.tp = 1",
        )
    ends = (anatomy.embedding, anatomy.head, anatomy.final_norm, *anatomy.late_norms)
    inside = [path for path in (*anatomy.inside, *ends) if path]
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
    tokens = torch.zeros(1, 2 * ranks.size, dtype=torch.int64, device="meta")
    twin = meta_twin(model)
    try:
        with torch.no_grad():
            twin(tokens)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return  # it does not run on meta at all, which says nothing
    entered = [found[0].path]
    for region in found:
        set_shares(twin, region)
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
