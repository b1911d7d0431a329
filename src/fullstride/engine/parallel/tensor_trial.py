"""A block cut over the ranks against the same block whole, in numbers, before any weight of the model is made.

Names and shapes say how products may be cut. Whether a module's own code agrees (heads behind one another, keys in the order
of their queries, nothing but a sum behind the last product) its numbers alone tell: code that does not trains on wrong ones
without an error. So one block of each kind gets random weights and runs twice on a few tokens: whole, and as all ranks' shares
side by side, a thread for each. Families of transformers whose parity is tested are not tried again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy import Anatomy, meta_inputs, meta_twin
from fullstride.engine.anatomy_region import Region, is_product, is_transposed
from fullstride.engine.parallel.tensor_meeting import UNUSABLE, Meeting, Numbers, apart, hidden_of, made_by
from fullstride.engine.parallel.tensor_shares import set_shares
from fullstride.engine.pieces import Cut, Piece, take
from fullstride.errors import BadInput
from fullstride.model.config import FAMILIES

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Seen:
    """What passes between a model and its blocks in a copy without memory, by block; as far as that runs."""

    calls: dict[str, Call]
    made: dict[str, tuple[Any, ...]]
    """What they return, where it is a tuple."""


def is_tested(model: nn.Module, anatomy: Anatomy) -> bool:
    """Whether the model is of a family of transformers that the parity check knows, to the last module of its blocks."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        return False
    inside = {type(module).__module__ for block in anatomy.blocks for module in model.get_submodule(block).modules()}
    return all(name.split(".")[0] in ("torch", "transformers") for name in {*inside, type(model).__module__})


def try_numbers(
    model: nn.Module, anatomy: Anatomy, found: Mapping[str, list[Region]], tp: int, device: torch.device, *, sequence: bool
) -> bool:
    """Compare one block of each kind, cut, with itself whole.

    Args:
        model: on meta or real; left as it is.
        anatomy: of it.
        found: regions by block.
        tp: degree.
        device: where it is tried.
        sequence: ranks hold their part of the sequence between regions.

    Returns:
        Whether they could be tried: a block that does not run by itself says nothing.

    Raises:
        BadInput: the cut block makes other numbers, or does not run.
    """
    calls, kinds, tried = watch(model, anatomy, found, 2 * tp).calls, set[Any](), True
    for path in anatomy.blocks:
        kind = _kind(model.get_submodule(path), path, found[path])
        if kind in kinds:
            continue
        kinds.add(kind)
        call = calls.get(path) or next(iter(calls.values()), None)
        trial = _Trial(model.get_submodule(path), path, [_inside(region, path) for region in found[path]], tp, device, sequence)
        tried &= call is not None and trial.run(call)
    if device.type == "cuda":  # the model's own weights come into memory that is one piece
        torch.cuda.empty_cache()
    return tried


def _kind(block: nn.Module, path: str, found: list[Region]) -> Any:
    """Blocks of one kind are tried once."""
    weights = tuple((name, tuple(param.shape)) for name, param in block.named_parameters())
    code = tuple(type(module) for module in block.modules())
    return weights, code, tuple(tuple(_inside(region, path).slicings.items()) for region in found)


def _inside(region: Region, block: str) -> Region:
    """A region with paths as its block has them."""

    def short(path: str) -> str:
        return path.removeprefix(f"{block}.")

    return dataclasses.replace(
        region,
        path=short(region.path),
        columns=[short(path) for path in region.columns],
        inner=[short(path) for path in region.inner],
        rows=[short(path) for path in region.rows],
        wide_norms={short(path): copies for path, copies in region.wide_norms.items()},
        slicings={short(name): slicing for name, slicing in region.slicings.items()},
        terms=[short(name) for name in region.terms],
        settings=[(short(path), name, value) for path, name, value in region.settings],
    )


def watch(model: nn.Module, anatomy: Anatomy, found: Mapping[str, list[Region]], tokens: int) -> Seen:
    """With what each block is called and what it returns.

    Args:
        model: left as it is.
        anatomy: of it.
        found: regions by block.
        tokens: of the one sample.
    """
    twin, seen = meta_twin(model), Seen({}, {})
    for region in (region for regions in found.values() for region in regions):
        if any(slicing.dim > 0 and model.get_parameter(name).ndim == 3 for name, slicing in region.slicings.items()):
            experts: Any = twin.get_submodule(region.path)  # who routes by value has none here
            experts.forward = lambda hidden_states, *_args, **_kwargs: hidden_states

    def before(path: str) -> Callable[..., None]:
        return lambda _module, args, kwargs: seen.calls.setdefault(path, (args, kwargs)) and None

    def behind(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            if isinstance(out, tuple):
                seen.made.setdefault(path, out)

        return hook

    for path in anatomy.blocks:
        twin.get_submodule(path).register_forward_pre_hook(before(path), with_kwargs=True)
        twin.get_submodule(path).register_forward_hook(behind(path))
    args, kwargs = meta_inputs(model, tokens)
    for left_out in ((), ("attention_mask",), ("attention_mask", "position_ids")):  # masks have other forms than the usual, too
        given = {name: value for name, value in kwargs.items() if name not in left_out}
        with torch.no_grad(), contextlib.suppress(*UNUSABLE):
            twin(*args, **given)
        if seen.calls:
            break
    return seen


class _Trial:
    """One block."""

    def __init__(
        self, block: nn.Module, path: str, regions: list[Region], tp: int, device: torch.device, sequence: bool
    ) -> None:
        self._block, self._path, self._regions, self._tp, self._sequence = block, path, regions, tp, sequence
        self._numbers = Numbers(device)
        self._met: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """What each region read and made, whole."""
        self._stray = ""
        """The first region that makes something else from shares of the same."""
        self._between = False
        """A region read something else before any region made it."""

    def run(self, call: Call) -> bool:
        """False where the whole block does not run, or makes no finite numbers."""
        if self._sequence:
            hidden_of(self._said(""), *call)
        values = {name: self._numbers.weight(param.shape) for name, param in self._block.named_parameters()}
        args, kwargs = self._numbers.real(call[0]), self._numbers.real(call[1])
        whole = self._copy(values)
        for region in self._regions:
            whole.get_submodule(region.path).register_forward_hook(self._keep(region.path), with_kwargs=True)
        try:
            with torch.no_grad():
                wanted = made_by(self._said(""), whole(*args, **kwargs))
        except UNUSABLE:
            return False
        if not bool(wanted.isfinite().all()) or wanted.ndim != 3:
            return False
        self._compare(wanted, self._side_by_side(values, args, kwargs))
        return True

    def _copy(self, values: Mapping[str, torch.Tensor]) -> nn.Module:
        """The block with these weights; the root mean square of norms over what is cut is left out, on both sides."""
        memo = self._numbers.buffers(self._block)
        for name, param in self._block.named_parameters():
            memo[id(param)] = nn.Parameter(values[name], requires_grad=False)
        made: nn.Module = copy.deepcopy(self._block, memo).eval()
        for path in (path for region in self._regions for path in region.wide_norms):
            norm: Any = made.get_submodule(path)
            norm.forward = lambda hidden, norm=norm: hidden * norm.weight
        return made

    def _keep(self, path: str) -> Callable[..., None]:
        where = self._said(path)

        def hook(_module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            # Code behind it may write into it.
            self._met.setdefault(path, (hidden_of(where, args, kwargs).clone(), made_by(where, out).clone()))

        return hook

    # The ranks.

    def _side_by_side(self, values: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> torch.Tensor:
        """What the ranks make of the block together."""
        meeting = Meeting(self._tp)
        shares = [self._share(values, rank) for rank in range(self._tp)]
        for rank, share in enumerate(shares):
            for region in self._regions:
                self._cross(share, region, rank, meeting)
        try:
            outs = meeting.run(lambda rank: shares[rank](*self._outside(args, rank), **self._outside(kwargs, rank)))
            made = [made_by(self._said(""), out) for out in outs]
        except UNUSABLE as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._refusal(f"does not run with a rank's share of heads and columns ({line})") from None
        return torch.cat(made, dim=1) if self._sequence else made[0]

    def _share(self, values: Mapping[str, torch.Tensor], rank: int) -> nn.Module:
        cut = dict(values)
        for region in self._regions:
            for name, slicing in region.slicings.items():
                cut[name] = _part(name, values[name], slicing.cut(rank, self._tp))
            if rank:  # a row's bias is added once
                cut |= {f"{path}.bias": torch.zeros_like(cut[f"{path}.bias"]) for path in region.rows if f"{path}.bias" in cut}
        share = self._copy(cut)
        for region in self._regions:
            set_shares(share, region)
            for path in (*region.columns, *region.inner):
                module: Any = share.get_submodule(path)
                if is_transposed(module):
                    module.nf = module.weight.shape[1]
        return share

    def _outside(self, given: Any, rank: int) -> Any:
        """A block's arguments, of which the hidden state is cut along the sequence."""
        if not self._sequence:
            return given
        if isinstance(given, dict):
            return {n: self._mine(v, rank) if n == "hidden_states" else v for n, v in given.items()}
        return (self._mine(given[0], rank), *given[1:]) if given else given

    def _mine(self, hidden: torch.Tensor, rank: int) -> torch.Tensor:
        return hidden.chunk(self._tp, dim=1)[rank]

    def _cross(self, share: nn.Module, region: Region, rank: int, meeting: Meeting) -> None:
        """Let a region's input and result pass between the ranks."""
        root: Any = share.get_submodule(region.path)
        forward, where = root.forward, self._said(region.path)

        def across(*args: Any, **kwargs: Any) -> Any:
            hidden, met = hidden_of(where, args, kwargs), self._met.get(region.path)
            if self._sequence:
                hidden = torch.cat(meeting.exchange(rank, hidden), dim=1)
            if rank == 0 and met and not self._stray and apart(met[0], hidden):
                self._between = True
            try:
                out = forward(hidden, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": hidden})
            except UNUSABLE:
                self._stray = region.path
                raise
            whole = torch.stack(meeting.exchange(rank, made_by(where, out))).sum(0)
            if rank == 0 and met and not (self._stray or self._between) and apart(met[1], whole):
                self._stray = region.path
            mine = self._mine(whole, rank) if self._sequence else whole
            return (mine, *out[1:]) if isinstance(out, tuple) else mine

        root.forward = across

    # What came of it.

    def _compare(self, wanted: torch.Tensor, found: torch.Tensor) -> None:
        if self._stray:
            raise self._refusal("makes other numbers from the ranks' shares than from the whole")
        if apart(wanted, found):
            names = " and ".join(region.path for region in self._regions)
            if not self._sequence:
                raise BadInput(f"{self._said('')} makes other numbers of the sums of {names}", fix="use layout.tp = 1")
            raise BadInput(
                f"{self._said('')} makes other numbers where ranks hold parts of the sequence: its code looks across positions "
                f"outside {names}",
                fix="set layout.sequence_parallel = false, or use layout.tp = 1",
            )

    def _said(self, path: str) -> str:
        full = f"{self._path}.{path}".rstrip(".")
        return f"layout.tp = {self._tp}: {full} ({type(self._block.get_submodule(path)).__name__})"

    def _refusal(self, what: str) -> BadInput:
        path = self._stray or (self._regions[0].path if len(self._regions) == 1 else "")
        looked = ", ".join(name for name, module in self._block.get_submodule(path).named_modules() if is_product(module))
        return BadInput(
            f"{self._said(path)} {what} (looked at {looked})",
            fix="let outputs lie head by head, queries, keys, values, gate and up each by itself, sizes come from tensors or "
            "attributes such as num_heads, and nothing but the last product's sum leave the module; or use layout.tp = 1",
        )


def _part(name: str, whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    piece = Piece(name=name, shape=tuple(whole.shape), cut=cut)
    part = whole.new_empty(piece.cut_shape)
    take(whole, piece, part)
    return part
