"""From tapes to sublayers: one tape for each precision cast, eager and compiled, merged into one description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from fullstride.model.spec import Cast, CastCost, Saved, SavedDType, Sublayer
from fullstride.model.tape import Op, Per, Tape, Tensor

Forward: TypeAlias = Callable[[Tape], object]
CASTS: tuple[Cast, ...] = get_args(Cast)
Mode: TypeAlias = Literal["eager", "compiled"]
Tapes: TypeAlias = dict[tuple[Mode, Cast], Tape]
_Key: TypeAlias = tuple[int, str, float, Per, int]
_Found: TypeAlias = dict[_Key, dict[tuple[Mode, Cast], str]]

_WIDTH = {"compute": 1.0, "fp32": 2.0, "int64": 4.0, "bool": 0.5}
"""Bytes relative to a 2-byte compute element."""


def assemble(forward: Forward, *, compiles: bool = True) -> tuple[Sublayer, ...]:
    """Sublayers of the part that `forward` writes on a tape.

    Args:
        forward: writes one block (or the embedding, or the tail) on the tape it is given.
        compiles: whether a compiled block includes this part; ends of the model stay eager.
    """
    tapes: Tapes = {}
    for cast in CASTS:
        for mode in get_args(Mode):
            tapes[mode, cast] = Tape(cast, compiled=compiles and mode == "compiled")
            forward(tapes[mode, cast])
    return merge(tapes)


def merge(tapes: Tapes) -> tuple[Sublayer, ...]:
    """Sublayers from the tapes of one part under every cast, eager and compiled; their sections must agree."""
    found: _Found = {}
    for (mode, cast), tape in tapes.items():
        for tensor, sub in _kept(tape):
            key = (sub, tensor.name, float(tensor.elements), tensor.per, tensor.beyond)
            found.setdefault(key, {})[mode, cast] = tensor.dtype
    saved = _merged(found)
    costs = {cast: _costs(tapes["eager", cast], tapes["compiled", cast]) for cast in CASTS}
    plain = tapes["eager", "weights"]
    return tuple(
        Sublayer(
            name=section.name,
            kind=section.kind,
            parameters=tuple(section.parameters),
            matmuls=tuple(section.matmuls),
            attention=section.attention,
            saved=tuple(s for number, s in saved if number == index),
            moved_elements=costs["weights"][index].moved_elements,
            fused_elements=costs["weights"][index].fused_elements,
            operators=costs["weights"][index].operators,
            costs=tuple(costs[cast][index] for cast in CASTS),
        )
        for index, section in enumerate(plain.sections)
    )


def _kept(tape: Tape) -> list[tuple[Tensor, int]]:
    """Storages kept for backward, each once, with the sublayer that is the first to keep it."""
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor, op: Op) -> None:
        root = tensor.root
        if root.counted:
            kept.setdefault(id(root), (root, op.sub))

    def expand(tensor: Tensor, op: Op) -> None:
        """Keep what a pointwise result is made again from."""
        root = tensor.root
        if id(root) in kept or not root.counted:
            return
        if root.kind == "pointwise" and root.inputs:
            for source in root.inputs:
                expand(source, op)
        else:
            keep(root, op)

    heavy = [op for op in tape.ops if op.kind == "heavy"] if tape.compiled else tape.ops
    for op in heavy:
        for tensor in op.saves:
            keep(tensor, op)
    if tape.compiled:
        for op in tape.ops:
            if op.kind != "heavy":
                for tensor in op.saves:
                    expand(tensor, op)
    return list(kept.values())


def _merged(found: _Found) -> list[tuple[int, Saved]]:
    out = []
    for (sub, name, elements, per, beyond), seen in found.items():
        modes = {mode: _labels({c: d for (m, c), d in seen.items() if m == mode}) for mode in get_args(Mode)}
        same = modes["eager"] == modes["compiled"]
        rows = [("always", modes["eager"])] if same else list(modes.items())
        for when, labels in rows:
            for dtype, casts in labels:
                saved = Saved(name=name, elements=elements, dtype=dtype, when=when, cast=casts, per=per, beyond=beyond)  # type: ignore[arg-type]
                out.append((sub, saved))
    return out


def _labels(dtypes: dict[Cast, str]) -> list[tuple[SavedDType, tuple[Cast, ...]]]:
    """The dtype word for each group of casts: fp32 under autocast alone is the residual stream's."""
    if not dtypes:
        return []
    narrow, auto = dtypes.get("weights"), dtypes.get("autocast")
    if narrow is None or auto is None or narrow == auto:
        word = narrow or auto or "compute"
        return [(word, tuple(c for c in CASTS if c in dtypes))]  # type: ignore[list-item]
    if (narrow, auto) == ("compute", "fp32"):
        return [("residual", tuple(c for c in CASTS if c in dtypes))]
    plain: tuple[Cast, ...] = tuple(c for c in CASTS if c in dtypes and c != "autocast")
    return [(narrow, plain), (auto, ("autocast",))]  # type: ignore[list-item]


def _costs(eager: Tape, compiled: Tape) -> list[CastCost]:
    readers: dict[int, set[int]] = {}
    for op in compiled.ops:
        for tensor in op.reads:
            readers.setdefault(id(tensor.root), set()).add(op.sub)
    out = []
    for index in range(len(eager.sections)):
        light = [op for op in eager.ops if op.sub == index and op.kind != "heavy"]
        fused = [op for op in compiled.ops if op.sub == index and op.kind != "heavy"]
        heavy = sum(op.launches for op in eager.ops if op.sub == index and op.kind == "heavy")
        out.append(
            CastCost(
                cast=eager.cast,
                moved_elements=float(sum(_bytes(t, eager) for op in light for t in (*op.reads, op.out) if t.per == "token")),
                moved_pair_elements=float(
                    sum(_bytes(t, eager) for op in light for t in (*op.reads, op.out) if t.per == "pair")
                ),
                fused_elements=_fused(index, fused, readers, compiled),
                operators=heavy + sum(op.launches for op in light),
                fused_operators=heavy + bool(fused),
            )
        )
    return out


def _fused(index: int, ops: list[Op], readers: dict[int, set[int]], tape: Tape) -> float:
    """Each input from outside read once, each result that leaves (or is the last) written once."""
    made = {id(op.out.root) for op in ops}
    inputs = {id(t.root): t.root for op in ops for t in op.reads if id(t.root) not in made}
    heavy = {id(t.root) for op in tape.ops if op.sub == index and op.kind == "heavy" for t in op.reads}
    outputs = {
        id(op.out): op.out
        for op in ops
        if readers.get(id(op.out.root), set()) - {index} or id(op.out) in heavy or id(op.out.root) not in readers
    }
    return float(sum(_bytes(t, tape) for t in (*inputs.values(), *outputs.values()) if t.per == "token"))


def _bytes(tensor: Tensor, tape: Tape) -> float:
    """Compute elements that a tensor's bytes equal."""
    width = _WIDTH[tensor.dtype]
    return tensor.elements * (width if tape.cast != "none" or tensor.dtype == "compute" else width / 2)
