"""Runs a model without memory or arithmetic and writes what it does on tapes, one for each part of the model.

The model runs on fake tensors of the CPU kind: shapes, dtypes and autograd are real, values are not. Three things are watched:
every operator (a dispatch mode), every tensor that autograd keeps (saved-tensor hooks), and fused attention (a function mode,
because on a device without a fused kernel it would fall apart into products that no GPU keeps).

Samples and tokens are primes that divide no parameter's size, so a tensor's size tells how it grows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # the documented base of dispatch modes has no public path
from torch.utils._pytree import tree_leaves  # likewise

from fullstride.model.spec import Attention, Cast, Matmul, SublayerKind
from fullstride.model.tape import Op, Per, Section, Tape, Tensor, beyond_window

_HEAVY = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution"}
_LIGHT = {
    "cat",
    "_to_copy",
    "clone",
    "copy_",
    "native_layer_norm",
    "_fused_rms_norm",
    "stack",
    "repeat",
    "expand_copy",
    "split",
}
_GROUPED = [f for f in (getattr(functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None]
_VIEWS = {"_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias"}
_WIDENED = {  # on CUDA autocast's fp32 list, but not on the CPU's
    torch.pow,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.rsqrt,
    torch.Tensor.rsqrt,
    torch.exp,
    torch.Tensor.exp,
    functional.layer_norm,
    functional.softmax,
    torch.softmax,
    torch.Tensor.softmax,
}


def storage_key(tensor: torch.Tensor) -> int:
    """What names a storage: fake ones have no address, and torch offers no public identity (`_cdata` is all there is)."""
    return int(tensor.untyped_storage()._cdata)


class Part:
    """One block, or an end of the model: its tapes under one cast, eager and compiled."""

    def __init__(self, cast: Cast, entry: set[int]) -> None:
        self.eager, self.compiled = Tape(cast), Tape(cast, compiled=True)
        self.entry = entry
        """Storages that are the part's own input."""
        self.sections: dict[str, int] = {}
        self.known: dict[int, tuple[Tensor, Tensor]] = {}
        self.names: dict[tuple[int, str], int] = {}
        self.casts: dict[tuple[int, str], Tensor] = {}

    def section(self, path: str, kind: SublayerKind) -> int:
        """Index of the sublayer of that module, made when new."""
        if path not in self.sections:
            self.sections[path] = len(self.sections)
            for tape in (self.eager, self.compiled):
                tape.sections.append(Section(name=path or "block", kind=kind))
        return self.sections[path]

    def both(self, sub: int) -> tuple[Section, Section]:
        """The sublayer on both tapes."""
        return self.eager.sections[sub], self.compiled.sections[sub]

    def name(self, sub: int, word: str) -> str:
        """A name that is new in the sublayer."""
        number = self.names.get((sub, word), 0)
        self.names[sub, word] = number + 1
        return f"{word}.{number}" if number else word


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches one run under one cast."""

    def __init__(self, cast: Cast, samples: int, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cast, self.samples, self.length = cast, samples, length
        self.parts: list[Part] = [Part(cast, set())]
        self.blocks: dict[int, Part] = {}
        self.shared: dict[int, tuple[float, str, Per]] = {}
        """Kept by a block but made outside it, and not its input: rotary tables."""
        self.constants: set[int] = set()
        self.alive: list[torch.Tensor] = []
        self.stack: list[tuple[str, SublayerKind]] = [("", "other")]
        self.paused = False
        self.window = 0
        """Window of the attention that is being called, where the model says it."""

    @property
    def part(self) -> Part:
        """Where operators are written now."""
        return self.parts[-1]

    # -- sizes -------------------------------------------------------------------------------------------------

    def measure(self, tensor: torch.Tensor) -> tuple[float, Per] | None:
        """Elements and how they grow; None for what does not grow with the tokens."""
        if storage_key(tensor) in self.constants:
            return None
        number = tensor.untyped_storage().nbytes() / tensor.element_size()
        tokens = self.samples * self.length
        if number % (tokens * self.length) == 0 and number:
            return number / (tokens * self.length), "pair"
        if number % tokens == 0 and number:
            return number / tokens, "token"
        if number % self.length == 0 and number and number % (self.length * self.length):
            return number / self.length, "position"
        return None

    def dtype(self, tensor: torch.Tensor) -> str:
        """The dtype's class under this cast."""
        if tensor.dtype == torch.bool or tensor.element_size() == 1:
            return "bool"
        if not tensor.dtype.is_floating_point:
            return "int64"
        return "compute" if self.cast == "none" or tensor.element_size() == 2 else "fp32"

    # -- operators ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        reads = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.alive += made
        word = str(func).split(".")[1]
        if made and not self.paused and not getattr(func, "is_view", False) and word not in _VIEWS:
            self.record(word, func, reads, made)
        return out

    def record(self, word: str, func: Any, reads: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """One operator that is not a view."""
        if reads and all(storage_key(t) in self.constants for t in reads):
            self.constants |= {storage_key(t) for t in made}
            return
        path, kind = self.stack[-1]
        sub = self.part.section(path, kind)
        if word in _HEAVY:
            self.product(word, reads, sub, path)
        growing = [t for t in reads if self.measure(t)]
        pointwise = word in _LIGHT or torch.Tag.pointwise in getattr(func, "tags", ())
        for number, tensor in enumerate(made):
            first_kind = "heavy" if word in _HEAVY else "pointwise" if pointwise else "reduction"
            self.write(word, sub, first_kind if number == 0 else "reduction", growing if number == 0 else [], tensor, number)

    def write(self, word: str, sub: int, kind: Any, reads: list[torch.Tensor], made: torch.Tensor, number: int = 0) -> None:
        """Add a result to both tapes."""
        size = self.measure(made)
        if size is None:
            return
        part, dtype, key = self.part, self.dtype(made), storage_key(made)
        sources = [self.known(t) for t in reads]
        name = part.name(sub, word)
        copied = (storage_key(reads[0]), dtype) if word == "_to_copy" and reads else None
        pair = []
        for index, tape in enumerate((part.eager, part.compiled)):
            inputs = tuple(s[index] for s in sources)
            tensor = Tensor(name, size[0], dtype, kind, sub, inputs, per=size[1])
            if tape.compiled and copied and copied in part.casts:
                pair.append(part.casts[copied])
                continue
            if tape.compiled and copied:
                part.casts[copied] = tensor
            saves = inputs if tape.compiled and kind == "heavy" else ()
            tape.ops.append(Op(sub, kind, inputs, tensor, saves, launches=int(number == 0)))
            pair.append(tensor)
        part.known.setdefault(key, (pair[0], pair[1]))

    def known(self, tensor: torch.Tensor) -> tuple[Tensor, Tensor]:
        """The tapes' names for a storage; one from outside the part becomes a source."""
        key, part = storage_key(tensor), self.part
        if key not in part.known:
            size = self.measure(tensor) or (0.0, "token")
            own = len(self.parts) == 1 or key in part.entry
            word = "input" if key in part.entry else part.name(-1, "given")
            made = [Tensor(word, size[0], self.dtype(tensor), "source", -1, per=size[1], counted=own) for _ in range(2)]
            part.known[key] = (made[0], made[1])
        return part.known[key]

    def keep(self, tensor: torch.Tensor) -> None:
        """Autograd keeps this tensor."""
        size = self.measure(tensor)
        if size is None:
            return
        self.alive.append(tensor)
        pair = self.known(tensor)
        if not pair[0].counted:
            self.shared.setdefault(storage_key(tensor), (size[0], self.dtype(tensor), size[1]))
            return
        path, kind = self.stack[-1]
        sub = self.part.section(path, kind)
        for tape, kept in zip((self.part.eager, self.part.compiled), pair, strict=True):
            marker = Tensor("kept", 0.0, kept.dtype, "view", sub, base=kept)
            tape.ops.append(Op(sub, "view", (), marker, (kept,), launches=0))

    # -- products and attention --------------------------------------------------------------------------------

    def product(self, word: str, reads: list[torch.Tensor], sub: int, path: str) -> None:
        """Note a matrix product with weights, or the two halves of attention written out."""
        a, b = reads[-2:]
        if word == "convolution":
            a, b = reads[0], reads[1].flatten(1).t()
        fixed = [storage_key(t) in self.constants for t in (a, b)]
        if not any(fixed):
            self.written_attention(a, b, sub)
            return
        weight, rows = (a.mT, b.mT) if fixed[0] else (b, a)
        k, n = int(weight.shape[-2]), int(weight.shape[-1])
        groups = (
            int(weight.shape[0])
            if weight.dim() == 3 and weight.untyped_storage().nbytes() > n * k * weight.element_size()
            else 1
        )
        per_token = rows.numel() / k / (self.samples * self.length)
        for section in self.part.both(sub):
            section.matmuls.append(Matmul(name=path or "block", n=n, k=k, rows_per_token=per_token, groups=groups))

    def grouped(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Note a grouped product: rows x [rows, k] divided over weights [groups, k, n]."""
        path, kind = self.stack[-1]
        sub = self.part.section(path, kind)
        groups, k, n = (int(size) for size in weight.shape)
        rows = x.shape[0] / (self.samples * self.length)
        for section in self.part.both(sub):
            section.matmuls.append(Matmul(name=path or "block", n=n, k=k, rows_per_token=rows, groups=groups))
        self.write("grouped_mm", sub, "heavy", [x], out)

    def written_attention(self, a: torch.Tensor, b: torch.Tensor, sub: int) -> None:
        """Scores [.., T, T] or weights [.., T, T] times values."""
        square = self.length
        for section in self.part.both(sub):
            old = section.attention
            if a.shape[-2] == b.shape[-1] == square:
                heads = a.shape[:-2].numel() // self.samples or 1
                dim = int(a.shape[-1])
                section.attention = Attention(num_heads=heads, num_kv_heads=heads, head_dim=dim, value_dim=dim)
            elif a.shape[-2] == a.shape[-1] == square and old is not None:
                section.attention = Attention(
                    num_heads=old.num_heads, num_kv_heads=old.num_heads, head_dim=old.head_dim, value_dim=int(b.shape[-1])
                )

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, made: list[torch.Tensor], causal: bool) -> None:
        """Note fused attention: q [samples, heads, T, dim] and its results."""
        path, _ = self.stack[-1]
        sub = self.part.section(path, "attention")
        heads, kv = (int(t.shape[1]) if t.dim() > 3 else 1 for t in (q, k))
        shape = Attention(
            num_heads=heads,
            num_kv_heads=kv,
            head_dim=int(q.shape[-1]),
            value_dim=int(v.shape[-1]),
            causal=causal,
            window=self.window,
        )
        for section in self.part.both(sub):
            section.attention, section.kind = shape, "attention"
        for number, (word, tensor) in enumerate(zip(("context", "lse"), made, strict=True)):
            self.write(word, sub, "heavy", [q, k, v] if number == 0 else [], tensor, number)
        if shape.window:
            for tape in (self.part.eager, self.part.compiled):
                extra = beyond_window(shape, sub)
                tape.ops.append(Op(sub, "heavy", (), extra[0], extra, launches=0))


class FusedAttention(TorchFunctionMode):
    """Stands in for scaled dot-product attention, and for the operators that autocast widens on CUDA alone."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func in _GROUPED:
            result: torch.Tensor = _Grouped.apply(args[0], args[1], self.tracer)  # type: ignore[no-untyped-call]
            return result
        if func in _WIDENED and torch.is_autocast_enabled("cpu") and args[0].is_floating_point():
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """For q [.., heads, T, dim], k and v: the result has q's layout, and q, k, v, result and log-sum-exp are kept."""
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
        result: torch.Tensor = _Attend.apply(query, key, value, self.tracer, is_causal or attn_mask is not None)  # type: ignore[no-untyped-call]
        return result


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tracer: Tracer, causal: bool) -> torch.Tensor:
        tracer.paused = True
        same = q.shape[-1] == v.shape[-1]
        out = torch.empty_like(q) if same else q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        tracer.paused = False
        tracer.attention(q, k, v, [out, lse], causal)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing runs backward here")


class _Grouped(torch.autograd.Function):
    """Grouped products x [rows, k] with weights [groups, k, n]; torch's own takes bf16 alone on fake tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, tracer: Tracer) -> torch.Tensor:
        tracer.paused = True
        out = x.new_empty((x.shape[0], weight.shape[-1]))
        tracer.paused = False
        tracer.grouped(x, weight, out)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing runs backward here")
