"""The code around a model's blocks, with what a rank holds there, against itself with the whole of it.

From the first block to the final norm a rank's hidden state is its part of the sequence, and behind the head its logits are its
part of the vocabulary. A top level that adds positions or takes a mean over them there, or a softmax of the logits, would meet
the part and take it for the whole. So a copy whose blocks do next to nothing, with a small table and a head that multiplies
nothing, runs on a few tokens twice: whole, and as all ranks side by side, a thread for each.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullstride.engine.anatomy import Anatomy, logits_of, meta_inputs
from fullstride.engine.anatomy_region import Region
from fullstride.engine.parallel.tensor_meeting import UNUSABLE, Meeting, Numbers, apart
from fullstride.engine.parallel.tensor_trial import watch
from fullstride.errors import BadInput

_WORDS = 64
"""Different tokens of the copy."""


def try_stream(model: nn.Module, anatomy: Anatomy, found: Mapping[str, list[Region]], tp: int, *, sequence: bool) -> None:
    """Compare the top level with shares and with the whole; says nothing of one that does not run with blocks left out.

    Args:
        model: on meta or real; left as it is.
        anatomy: of it.
        found: regions by block.
        tp: degree.
        sequence: ranks hold their part of the sequence between regions.

    Raises:
        BadInput: it makes other numbers, does not run, or runs its blocks in another order.
    """
    seen = watch(model, anatomy, found, 2 * tp)
    order = tuple(seen.calls)  # as far as it ran
    if order != anatomy.blocks[: len(order)]:
        raise BadInput(
            f"layout.tp = {tp}: {type(model).__name__} runs {', '.join(order[:4])} in this order, and its blocks are "
            f"{', '.join(anatomy.blocks[:4])}: at the first one and behind the last one the sequence is cut and joined",
            fix="keep the blocks in the order in which they run, or name them so in model.blocks; or use layout.tp = 1",
        )
    trial = _Stream(model, anatomy, seen.made, tp)
    last, whole, times = anatomy.final_norm or anatomy.blocks[-1], trial.copy(), list[int]()
    whole.get_submodule(last).register_forward_hook(lambda *_: times.append(1))
    try:
        with torch.no_grad():
            wanted = trial.logits(whole)
    except (*UNUSABLE, BadInput):
        return
    if not bool(wanted.isfinite().all()):
        return
    said = f"layout.tp = {tp}: the code of {type(model).__name__} "
    if len(times) != 1:
        raise BadInput(
            f"{said}runs {last} {len(times)} times: behind it begins the head's part, which is one",
            fix="give the head a norm of its own, or use layout.tp = 1",
        )
    behind = said + f"behind {anatomy.head}"
    trial.compare(
        wanted, False, behind, "ranks hold parts of the vocabulary", "return the logits as they are, or use layout.tp = 1"
    )
    if sequence:
        fix = "set layout.sequence_parallel = false, or use layout.tp = 1"
        trial.compare(wanted, True, said + f"around {anatomy.stack}", "ranks hold parts of the sequence", fix)


class _Stream:
    """A model whose blocks are stand-ins."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, tuples: Mapping[str, tuple[Any, ...]], tp: int) -> None:
        self._model, self._anatomy, self._tuples, self._tp = model, anatomy, tuples, tp
        numbers = self._numbers = Numbers(torch.device("cpu"))
        parts = (anatomy.embedding, anatomy.head, *anatomy.blocks)
        inside = {id(p) for path in parts if path for p in model.get_submodule(path).parameters()}
        self._values = {id(p): numbers.weight(p.shape) for p in model.parameters() if id(p) not in inside}
        size = model.get_parameter(f"{anatomy.embedding}.weight").shape
        self._table, self._push = numbers.normal(torch.Size((_WORDS, size[1]))), numbers.normal(torch.Size((size[1],)))
        self._vocabulary = size[0]

    def compare(self, wanted: torch.Tensor, sequence: bool, who: str, where: str, fix: str) -> None:
        """Raise what came of the ranks' parts."""
        try:
            found = self.side_by_side(sequence)
        except UNUSABLE as error:
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadInput(f"{who} does not run where {where} ({line})", fix=fix) from None
        if apart(wanted, found):
            raise BadInput(f"{who} makes other numbers where {where}: it looks across them", fix=fix)

    def copy(self, rank: int = 0, ranks: int = 1) -> nn.Module:
        """Real, but for the weights of blocks, table and head; the head is one rank's of several."""
        memo = self._numbers.buffers(self._model)
        for param in self._model.parameters():
            value = self._values.get(id(param))
            memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta") if value is None else value, False)
        made: Any = copy.deepcopy(self._model, memo).eval()
        made.get_submodule(self._anatomy.embedding).forward = lambda ids: self._table[ids % _WORDS]
        if self._anatomy.head:
            spread = (torch.arange(self._vocabulary) % self._table.shape[1]).tensor_split(ranks)[rank]
            made.get_submodule(self._anatomy.head).forward = lambda hidden: hidden[..., spread]
        for number, path in enumerate(self._anatomy.blocks):
            made.get_submodule(path).forward = self._block(number, self._tuples.get(path))
        return made  # type: ignore[no-any-return]

    def _block(self, number: int, form: tuple[Any, ...] | None) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
            hidden = hidden * (1.1 + 0.1 * number) + self._push
            return hidden if form is None else (hidden, *self._numbers.real(form[1:]))

        return forward

    def logits(self, made: nn.Module) -> torch.Tensor:
        """Of a few tokens."""
        args, kwargs = meta_inputs(self._model, 2 * self._tp)
        return logits_of(made(*self._numbers.real(args), **self._numbers.real(kwargs)))

    def side_by_side(self, sequence: bool) -> torch.Tensor:
        """The same of all ranks, as tensor parallelism cuts and joins."""
        meeting = Meeting(self._tp)
        ranks = [self.copy(rank, self._tp) for rank in range(self._tp)]
        last = self._anatomy.final_norm or self._anatomy.blocks[-1]
        for rank, made in enumerate(ranks if sequence else ()):
            first: Any = made.get_submodule(self._anatomy.blocks[0])
            first.forward = self._cutting(first.forward, rank)
            made.get_submodule(last).register_forward_hook(self._joining(rank, meeting))
        return torch.cat(meeting.run(lambda rank: self.logits(ranks[rank])), dim=-1)

    def _cutting(self, forward: Any, rank: int) -> Any:
        def cut(*args: Any, **kwargs: Any) -> Any:
            hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
            return forward(hidden.chunk(self._tp, dim=1)[rank])

        return cut

    def _joining(self, rank: int, meeting: Meeting) -> Any:
        def join(_module: nn.Module, _args: Any, out: Any) -> Any:
            whole = torch.cat(meeting.exchange(rank, out[0] if isinstance(out, tuple) else out), dim=1)
            return (whole, *out[1:]) if isinstance(out, tuple) else whole

        return join
