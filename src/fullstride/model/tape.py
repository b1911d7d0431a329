"""A symbolic tape: a block's eager forward written with shapes only, from which its costs are read off.

A family writes down its forward with the methods of `Tape`, in the order of the unmodified code. Each method knows what
PyTorch's autograd keeps for that operator (tools/autograd/derivatives.yaml) and what autocast does to its inputs
(torch.amp's operator lists), so kept tensors, memory traffic and launches follow from the code and are not listed by hand.
All sizes are elements for each token.

Compiled blocks: the partitioner of AOTAutograd keeps what a matrix product or attention needs in backward (it would have to be
materialised again), results of products, attention and reductions, and makes pointwise results again from those
(torch/_functorch/partitioners.py, min-cut rematerialisation).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fullstride.model.spec import Attention, Cast, Matmul, Parameter, ParameterRole, SublayerKind

OpKind: TypeAlias = Literal["pointwise", "reduction", "heavy", "view", "source"]
Per: TypeAlias = Literal["token", "position", "pair"]


@dataclass(eq=False, slots=True)
class Tensor:
    """A value of the forward: elements for each token, dtype class, and where it comes from."""

    name: str
    elements: float
    dtype: str
    kind: OpKind
    sub: int
    inputs: tuple[Tensor, ...] = ()
    base: Tensor | None = None
    per: Per = "token"
    grad: bool = True
    counted: bool = True
    beyond: int = 0

    @property
    def root(self) -> Tensor:
        """The tensor that owns the storage."""
        return self.base.root if self.base is not None else self


@dataclass(eq=False, slots=True)
class Op:
    """One operator: what it reads, makes and needs in backward."""

    sub: int
    kind: OpKind
    reads: tuple[Tensor, ...]
    out: Tensor
    saves: tuple[Tensor, ...]
    launches: int = 1


@dataclass(slots=True)
class Section:
    """The part of the tape that belongs to one sublayer."""

    name: str
    kind: SublayerKind
    parameters: list[Parameter] = field(default_factory=list)
    matmuls: list[Matmul] = field(default_factory=list)
    attention: Attention | None = None


def beyond_window(shape: Attention, sub: int) -> tuple[Tensor, ...]:
    """What attention keeps besides where the sequence is longer than its window and a mask is given.

    Each call widens the mask to the compute dtype, and grouped keys and values are repeated: fused kernels that take groups
    take no mask.
    """
    more = (shape.num_heads - shape.num_kv_heads) * (shape.head_dim + shape.value_dim)
    mask = Tensor("mask", 1, "compute", "heavy", sub, per="pair", beyond=shape.window)
    repeated = Tensor("repeated", more, "compute", "heavy", sub, beyond=shape.window)
    return (mask, repeated) if more else (mask,)


class Tape:
    """Records a forward under one precision cast, eager or compiled."""

    def __init__(self, cast: Cast, *, compiled: bool = False) -> None:
        self.cast = cast
        self.compiled = compiled
        self.fp32 = "compute" if cast == "none" else "fp32"
        self.weights = "fp32" if cast == "autocast" else "compute"
        self.sections: list[Section] = []
        self.ops: list[Op] = []
        self._names: dict[tuple[int, str], int] = {}
        self._casts: dict[tuple[int, str], Tensor] = {}

    # -- structure ---------------------------------------------------------------------------------------------

    def at(self, name: str, kind: SublayerKind) -> None:
        """What follows belongs to this sublayer: a new one, unless it is the newest."""
        if self.sections and self.sections[-1].name == name:
            return
        assert all(section.name != name for section in self.sections), f"{name} is closed"
        self.sections.append(Section(name=name, kind=kind))

    @property
    def section(self) -> Section:
        """The sublayer being written."""
        return self.sections[-1]

    def parameter(self, name: str, shape: tuple[int, ...], role: ParameterRole) -> None:
        """Add a tensor of weights to the sublayer."""
        self.section.parameters.append(Parameter(name=name, shape=shape, role=role))

    def source(
        self, name: str, elements: float, dtype: str, *, per: Per = "token", grad: bool = True, counted: bool = True
    ) -> Tensor:
        """A value from outside; `counted=False` when another part counts its storage."""
        return Tensor(name, elements, dtype, "source", -1, per=per, grad=grad, counted=counted)

    # -- the recorder ------------------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        reads: tuple[Tensor, ...],
        elements: float,
        *,
        dtype: str | None = None,
        kind: OpKind = "pointwise",
        saves: tuple[Tensor, ...] = (),
        keeps_result: bool = False,
        per: Per = "token",
        grad: bool | None = None,
        launches: int = 1,
    ) -> Tensor:
        """Record one operator; its result's dtype is the widest it reads unless given."""
        sub = len(self.sections) - 1
        number = self._names.get((sub, name), 0)
        self._names[sub, name] = number + 1
        wide = any(t.dtype == "fp32" for t in reads)
        out = Tensor(
            f"{name}.{number}" if number else name,
            elements,
            dtype or ("fp32" if wide else "compute"),
            kind,
            sub,
            reads,
            per=per,
            grad=any(t.grad for t in reads) if grad is None else grad,
        )
        self.ops.append(Op(sub, kind, reads, out, (*saves, out) if keeps_result else saves, launches))
        return out

    def view(self, x: Tensor, elements: float | None = None) -> Tensor:
        """A slice or another shape of the same storage."""
        out = Tensor(x.name, x.elements if elements is None else elements, x.dtype, "view", len(self.sections) - 1, (x,), x)
        out.grad, out.per = x.grad, x.per
        return out

    # -- operators ---------------------------------------------------------------------------------------------

    def to(self, x: Tensor, dtype: str) -> Tensor:
        """A copy in another dtype; the tensor itself where it has that dtype already."""
        if x.dtype == dtype:
            return x
        key = (id(x), dtype)
        if self.compiled and key in self._casts:  # common subexpressions are made once
            return self._casts[key]
        out = self.op(f"{x.name}.{dtype}", (x,), x.elements, dtype=dtype)
        self._casts[key] = out
        return out

    def autocast(self, x: Tensor, dtype: str) -> Tensor:
        """What autocast does to an input of an operator on its lists: `compute` or `fp32`."""
        return self.to(x, dtype) if self.cast == "autocast" else x

    def add(self, a: Tensor, b: Tensor | None = None, *, name: str = "sum") -> Tensor:
        """Sum of a and b; plus a number when b is None. Keeps nothing."""
        reads = (a,) if b is None else (a, b)
        return self.op(name, reads, max(t.elements for t in reads))

    def scale(self, x: Tensor, *, name: str = "scaled") -> Tensor:
        """Times a number, or negated. Keeps nothing."""
        return self.op(name, (x,), x.elements)

    def mul(self, a: Tensor, b: Tensor, *, name: str = "product") -> Tensor:
        """Product a x b; keeps each factor that the other one's gradient needs."""
        saves = tuple(kept for kept, other in ((a, b), (b, a)) if other.grad)
        return self.op(name, (a, b), max(a.elements, b.elements), saves=saves)

    def weighted(self, x: Tensor, *, dtype: str | None = None, name: str = "weighted") -> Tensor:
        """Times a vector of weights, which promotes like any tensor; keeps x."""
        wide = dtype or ("fp32" if "fp32" in (x.dtype, self.weights) else x.dtype)
        return self.op(name, (x,), x.elements, dtype=wide, saves=(x,))

    def unary(self, name: str, x: Tensor, *, keeps: Literal["input", "result"] = "input") -> Tensor:
        """A pointwise function that keeps its input or its result."""
        return self.op(name, (x,), x.elements, saves=(x,) if keeps == "input" else (), keeps_result=keeps == "result")

    def power(self, x: Tensor, *, name: str = "power") -> Tensor:
        """Raise x to a constant power: on autocast's fp32 list; keeps its input."""
        wide = self.autocast(x, "fp32")
        return self.op(name, (wide,), x.elements, saves=(wide,))

    def mean(self, x: Tensor, groups: float) -> Tensor:
        """A mean that leaves `groups` elements for each token; keeps nothing."""
        return self.op("mean", (x,), groups, kind="reduction")

    def cat(self, parts: tuple[Tensor, ...], *, name: str = "cat") -> Tensor:
        """Joined into new storage; keeps nothing."""
        return self.op(name, parts, sum(t.elements for t in parts))

    def gather(self, x: Tensor, index: Tensor, elements: float, *, name: str = "gathered", launches: int = 1) -> Tensor:
        """Rows picked by an index, which is kept."""
        return self.op(name, (x, index), elements, dtype=x.dtype, saves=(index,), kind="reduction", launches=launches)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Keeps a mask of bytes (CUDA's fused kernel) when p > 0, else does nothing."""
        if p <= 0:
            return x
        mask = Tensor(f"{x.name}.mask", x.elements, "bool", "heavy", len(self.sections) - 1)
        return self.op("dropout", (x,), x.elements, saves=(mask,))

    def linear(self, x: Tensor, path: str, n: int, k: int, *, bias: bool = False, conv1d: bool = False) -> Tensor:
        """A dense layer named `path`: weight [n, k] ([k, n] for GPT-2's Conv1D); keeps its input."""
        self.parameter(f"{path}.weight", (k, n) if conv1d else (n, k), "weight")
        if bias:
            self.parameter(f"{path}.bias", (n,), "bias")
        return self.product(x, path, n, k)

    def product(self, x: Tensor, path: str, n: int, k: int, *, rows: float = 1.0, groups: int = 1, name: str = "") -> Tensor:
        """The matrix product alone: on autocast's list, unless grouped (then in the weights' dtype); keeps its input."""
        self.section.matmuls.append(Matmul(name=path, n=n, k=k, rows_per_token=float(rows), groups=groups))
        x = self.to(x, self.weights) if groups > 1 else self.autocast(x, "compute")
        return self.op(name or path.rsplit(".", 1)[-1], (x,), n * rows, dtype=x.dtype, kind="heavy", saves=(x,))

    def layer_norm(self, x: Tensor, path: str, size: int, *, bias: bool = True) -> Tensor:
        """LayerNorm of torch: one kernel, on autocast's fp32 list; keeps input, mean and 1/std."""
        self.parameter(f"{path}.weight", (size,), "norm")
        if bias:
            self.parameter(f"{path}.bias", (size,), "norm")
        x = self.autocast(x, "fp32")
        groups = x.elements / size
        statistics = [Tensor(n, groups, self.fp32, "reduction", len(self.sections) - 1, (x,)) for n in ("mean", "rstd")]
        return self.op("normed", (x,), x.elements, saves=(x, *statistics))

    def softmax(self, x: Tensor, *, per: Per = "token", name: str = "softmax") -> Tensor:
        """In fp32; keeps its result."""
        return self.op(name, (x,), x.elements, dtype=self.fp32, keeps_result=True, kind="reduction", per=per)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, shape: Attention, *, head_major: bool = False) -> Tensor:
        """Fused attention (flash, cuDNN): keeps q, k, v, its result and one fp32 log-sum-exp a head.

        The result is laid out like q. Where q was joined anew, heads stand before tokens (`head_major`), and bringing tokens
        to the front again is a copy.
        """
        sub = len(self.sections) - 1
        self.section.attention = shape
        q, k, v = (self.autocast(t, "compute") for t in (q, k, v))
        extra = [Tensor("lse", shape.num_heads, self.fp32, "heavy", sub)]
        extra += beyond_window(shape, sub) if shape.window else ()
        width = shape.num_heads * shape.value_dim
        out = self.op("context", (q, k, v), width, dtype=q.dtype, kind="heavy", saves=(q, k, v, *extra), keeps_result=True)
        return self.op("context.contiguous", (out,), width) if head_major else out
