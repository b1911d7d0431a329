"""What a network is made of, in the numbers that planning needs; no framework in sight.

A ModelSpec is an embedding, some stacks of equal blocks, and a tail (final norm, head, loss). Each part is a list of
sublayers in the order of execution; a sublayer knows its parameters, its matrix products for one token, its attention, and what
it keeps for backward.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from fullstride.files import FileValue, Value, digest

SublayerKind: TypeAlias = Literal[
    "embedding",
    "norm",
    "linear",
    "rotary",
    "attention",
    "activation",
    "residual",
    "router",
    "experts",
    "head",
    "loss",
    "other",
]
ParameterRole: TypeAlias = Literal["embedding", "weight", "bias", "norm", "head", "router", "expert"]
SavedDType: TypeAlias = Literal["compute", "residual", "fp32", "int64", "bool"]
"""`compute`: what matrix products take; `residual`: what the residual stream carries (fp32 under autocast, else compute)."""
Cast: TypeAlias = Literal["none", "weights", "autocast"]
"""How a lower compute dtype comes about, as in a plan's precision: not at all, by weights of that dtype, by autocast."""
FlopConvention: TypeAlias = Literal["full", "causal"]
"""How attention is counted: over the whole square (PaLM, torchtitan), or the half that a causal kernel does (Megatron)."""


class Parameter(Value, frozen=True, kw_only=True):
    """One tensor of a block, named as in the unmodified model, relative to the block."""

    name: str
    shape: tuple[int, ...]
    role: ParameterRole
    trainable: bool = True

    @property
    def count(self) -> int:
        """Elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


class Matmul(Value, frozen=True, kw_only=True):
    """For each token a product of a row of k elements with a [k, n] weight."""

    name: str
    n: int
    k: int
    rows_per_token: float = 1.0
    """Rows for each token: 1, or the experts a token visits."""
    groups: int = 1
    """Separate products the rows are divided over (experts)."""


class Attention(Value, frozen=True, kw_only=True):
    """Scaled dot-product attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = True
    window: int = 0
    """Tokens that a query may look back; 0 for all."""


class Saved(Value, frozen=True, kw_only=True):
    """A tensor kept from forward to backward, counted once where it is first made (storage that is shared counts once)."""

    name: str
    elements: float
    """Elements for each token."""
    dtype: SavedDType
    when: Literal["always", "eager", "compiled"] = "always"
    """Compiled blocks keep fewer: pointwise results are made again from their inputs."""
    cast: tuple[Cast, ...] = ("none", "weights", "autocast")
    """Precision casts under which it is kept: norms copy only a narrower stream to fp32, autocast copies at each product."""
    per: Literal["token", "position", "pair"] = "token"
    """How often: for each token; `position`: one copy for all samples of a micro-batch (rotary tables), elements x sequence;
    `pair`: attention that keeps its scores, elements x tokens x sequence length."""
    beyond: int = 0
    """Kept only when the sequence is longer than this (a window's mask); 0: always."""


class CastCost(Value, frozen=True, kw_only=True):
    """Memory traffic and launches of one forward of a sublayer under one precision cast."""

    cast: Cast
    moved_elements: float
    """As `Sublayer.moved_elements`; an fp32 element counts for as many compute elements as it has bytes."""
    fused_elements: float
    operators: int
    fused_operators: int
    """Kernels of a compiled block: products, attention, and one for each group of memory-bound operators."""
    moved_pair_elements: float = 0.0
    """Elements for each token and each token of the sequence, where attention keeps its scores whole."""


class Sublayer(Value, frozen=True, kw_only=True):
    """One step of a block."""

    name: str
    """Path inside the block with dots: `attn.qkv`, `mlp.activation`."""
    kind: SublayerKind
    parameters: tuple[Parameter, ...] = ()
    matmuls: tuple[Matmul, ...] = ()
    attention: Attention | None = None
    saved: tuple[Saved, ...] = ()
    moved_elements: float = 0.0
    """Elements read and written for each token by memory-bound operators in one eager forward, at the compute dtype."""
    fused_elements: float = 0.0
    """The same when the block is compiled: each input read once, each output written once."""
    operators: int = 1
    """Kernels launched in one eager forward, for the host's launch cost."""
    costs: tuple[CastCost, ...] = ()
    """The same three for each precision cast; the plain fields hold those of cast `weights` (2-byte compute)."""


class Stack(Value, frozen=True, kw_only=True):
    """A run of equal blocks."""

    path: str
    """Where the list of blocks stands in the module: `model.layers`."""
    first: int
    """Index of the first of them in that list."""
    count: int
    sublayers: tuple[Sublayer, ...]


class ModelSpec(FileValue, frozen=True, kw_only=True, tag="model"):
    """A network, ready to be priced."""

    name: str
    family: str
    """`llama`, `gpt2`, ...; `module` for an inspected nn.Module."""
    hidden_size: int
    vocab_size: int
    max_sequence: int
    """Longest sequence its positions allow; 0 for no limit."""
    tied_embeddings: bool
    embedding: tuple[Sublayer, ...]
    stacks: tuple[Stack, ...]
    tail: tuple[Sublayer, ...]
    """Final norm, head (no parameters of its own when tied), loss."""

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return sum(stack.count for stack in self.stacks)

    @property
    def num_parameters(self) -> int:
        """Elements in all parameters, a tied one counted once; equals the unmodified model's own count."""
        ends = sum(p.count for part in (*self.embedding, *self.tail) for p in part.parameters)
        return ends + sum(stack.count * p.count for stack in self.stacks for s in stack.sublayers for p in s.parameters)

    @property
    def digest(self) -> str:
        """Name of this content."""
        return digest(self)
