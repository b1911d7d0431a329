"""The networks that published rows name by their sizes: GPT as Megatron writes it, the Llama line, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from msgspec.structs import replace

from fullstride.model.assemble import assemble
from fullstride.model.config import spec_from_config
from fullstride.model.families import layered, moe, parts
from fullstride.model.families.shape import Experts, Shape
from fullstride.model.spec import Attention, ModelSpec, Stack, Sublayer
from fullstride.model.tape import Tape, Tensor


@dataclass(frozen=True)
class Network:
    """A decoder by its sizes and habits."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int
    """Rows of a learned position table; 0 for rotary positions."""
    head_dim: int = 0
    gated: bool = False
    bias: bool = True
    tied: bool = True
    rms: bool = False
    qk_norm: bool = False
    experts: int = 0
    per_token: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    """Blocks before the first mixture."""
    latent: bool = False
    separate: bool = False
    """Queries, keys, values, gate and up are products of their own, not fused ones."""
    window: int = 0
    """Every other block looks back so far; 0 for none."""
    expert_passes: float = 0.0
    """Passes over the experts' inner width that their activation makes beside the fused ones, in compute elements."""


@lru_cache(maxsize=512)
def spec_of(network: Network, name: str) -> ModelSpec:
    """The ModelSpec of such a network (one object for equal networks, so that pricing remembers it)."""
    if network.latent:
        return _deepseek(network, name)
    shape = _shape(network)
    embed = layered.gpt2_embedding if network.positions else partial(parts.embedding, path="embedding")
    return ModelSpec(
        name=name,
        family="gpt",
        hidden_size=network.hidden,
        vocab_size=network.vocab,
        max_sequence=network.positions,
        tied_embeddings=network.tied,
        embedding=assemble(lambda tape: embed(tape, shape), compiles=False),
        stacks=_stacks(network, shape),
        tail=assemble(partial(parts.tail, shape=shape, norm_path="final_norm"), compiles=False),
    )


def _shape(network: Network) -> Shape:
    head_dim = network.head_dim or network.hidden // network.heads
    experts = None
    if network.experts:
        experts = Experts(
            count=network.experts,
            per_token=network.per_token,
            ffn=network.expert_ffn or network.ffn,
            shared_ffn=network.shared_ffn,
            style="mixtral",
        )
    return Shape(
        family="gpt",
        hidden=network.hidden,
        blocks=network.layers,
        heads=network.heads,
        kv_heads=network.kv_heads,
        head_dim=head_dim,
        ffn=network.ffn,
        vocab=network.vocab,
        max_positions=network.positions,
        tied=network.tied,
        norm="llama" if network.rms else "layer",
        activation="silu" if network.gated else "gelu",
        rotary_dim=0 if network.positions else head_dim,
        experts=experts,
    )


def _stacks(network: Network, shape: Shape) -> tuple[Stack, ...]:
    dense = network.dense_layers if network.experts else network.layers
    windows = (network.window, 0) if network.window else (0,)
    found, first = [], 0
    for sparse, count in ((False, dense), (True, network.layers - dense)):
        for index, window in enumerate(windows):
            each = count // len(windows) + (index < count % len(windows))
            if each:
                stack = _stack(network, shape, sparse, window)
                found.append(Stack(path="blocks", first=first, count=each, sublayers=stack))
                first += each
    return tuple(found)


def _stack(network: Network, shape: Shape, sparse: bool, window: int) -> tuple[Sublayer, ...]:
    writer: Callable[[Tape], None] = lambda tape: _block(tape, network, shape, sparse, window)  # noqa: E731
    sublayers = assemble(writer)
    if not (sparse and network.expert_passes):
        return sublayers
    more = network.expert_passes * network.per_token * network.expert_ffn
    return tuple(_with_traffic(item, more) if item.kind == "experts" else item for item in sublayers)


def _with_traffic(sublayer: Sublayer, more: float) -> Sublayer:
    """The same sublayer, moving so many elements more for each token."""
    costs = tuple(
        replace(cost, moved_elements=cost.moved_elements + more, fused_elements=cost.fused_elements + more)
        for cost in sublayer.costs
    )
    moved, fused = sublayer.moved_elements + more, sublayer.fused_elements + more
    return replace(sublayer, costs=costs, moved_elements=moved, fused_elements=fused)


def _block(tape: Tape, network: Network, shape: Shape, sparse: bool, window: int) -> None:
    """One block: norm, fused projection, attention, projection, residual; norm, MLP or experts, residual."""
    hidden, q_size, kv_size = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    x = parts.stream(tape, hidden)
    tape.at("norm1", "norm")
    normed = parts.norm(tape, x, "norm1", hidden, shape.norm)
    tape.at("attn.qkv", "linear")
    q, k, v = _products(tape, normed, network, "attn.qkv", (q_size, kv_size, kv_size))
    if network.qk_norm:
        tape.at("attn.qk_norm", "norm")
        q, k = (parts.norm(tape, t, f"attn.{n}_norm", shape.head_dim, shape.norm) for t, n in ((q, "q"), (k, "k")))
    if shape.rotary_dim:
        tape.at("attn.rotary", "rotary")
        tables = parts.rotary_tables(tape, shape)
        q, k = (parts.rotate(tape, t, shape.rotary_dim, shape.head_dim, tables) for t in (q, k))
    tape.at("attn.core", "attention")
    core = Attention(
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, value_dim=shape.head_dim, window=window
    )
    context = tape.attention(q, k, v, core)
    tape.at("attn.out", "linear")
    out = tape.linear(context, "attn.out", hidden, q_size, bias=network.bias)
    tape.at("residual1", "residual")
    x = tape.add(out, x)
    tape.at("norm2", "norm")
    normed = parts.norm(tape, x, "norm2", hidden, shape.norm)
    out = _feed_forward(tape, normed, network, shape, sparse)
    tape.at("residual2", "residual")
    tape.add(x, out)


def _products(tape: Tape, x: Tensor, network: Network, path: str, sizes: tuple[int, ...]) -> list[Tensor]:
    """Products of one input: one whose result is cut, or each by itself."""
    if network.separate:
        return [tape.linear(x, f"{path}.{index}", size, network.hidden, bias=network.bias) for index, size in enumerate(sizes)]
    whole = tape.linear(x, path, sum(sizes), network.hidden, bias=network.bias)
    return [tape.view(whole, size) for size in sizes] if len(sizes) > 1 else [whole]


def _feed_forward(tape: Tape, x: Tensor, network: Network, shape: Shape, sparse: bool) -> Tensor:
    if sparse and network.gated:
        return moe.experts(tape, x, shape)
    if sparse:
        return _plain_experts(tape, x, shape, network.bias)
    ffn, name = shape.ffn, "gate_up" if network.gated else "up"
    tape.at(f"mlp.{name}", "linear")
    made = _products(tape, x, network, f"mlp.{name}", (ffn, ffn) if network.gated else (ffn,))
    tape.at("mlp.activation", "activation")
    if network.gated:
        product = tape.mul(parts.activation(tape, made[0], "silu"), made[1])
    else:
        product = parts.activation(tape, made[0], "gelu")
    tape.at("mlp.down", "linear")
    return tape.linear(product, "mlp.down", shape.hidden, ffn, bias=network.bias)


def _plain_experts(tape: Tape, x: Tensor, shape: Shape, bias: bool) -> Tensor:
    """Experts without a gate, as Megatron makes them from a GPT's MLP."""
    sizes = shape.experts
    assert sizes is not None
    count, k, ffn, hidden = sizes.count, sizes.per_token, sizes.ffn, shape.hidden
    tape.at("router", "router")
    tape.parameter("router.weight", (count, hidden), "router")
    logits = tape.product(x, "router", count, hidden)
    weights = tape.softmax(tape.to(logits, tape.fp32))
    tape.at("experts", "experts")
    tape.parameter("experts.up", (count, ffn, hidden), "expert")
    tape.parameter("experts.down", (count, hidden, ffn), "expert")
    if bias:
        tape.parameter("experts.up_bias", (count, ffn), "expert")
        tape.parameter("experts.down_bias", (count, hidden), "expert")
    rows = tape.source("rows", k, "int64", grad=False)
    picked = tape.gather(x, rows, k * hidden, name="rows_sorted")
    shares = tape.gather(weights, rows, k, name="shares_sorted")
    up = parts.activation(tape, tape.product(picked, "experts.up", ffn, hidden, rows=k, groups=count), "gelu")
    out = tape.product(up, "experts.down", hidden, ffn, rows=k, groups=count)
    return tape.to(tape.op("summed", (tape.mul(out, shares),), hidden, kind="reduction"), x.dtype)


def _deepseek(network: Network, name: str) -> ModelSpec:
    """Latent attention with DeepSeek-V3's own inner sizes (arXiv 2412.19437), which rows do not publish."""
    ffn = network.expert_ffn or 2048
    config = {
        "model_type": "deepseek_v3",
        "hidden_size": network.hidden,
        "intermediate_size": network.ffn,
        "num_hidden_layers": network.layers,
        "num_attention_heads": network.heads,
        "num_key_value_heads": network.heads,
        "vocab_size": network.vocab,
        "max_position_embeddings": 163840,
        "n_routed_experts": network.experts or 1,
        "num_experts_per_tok": network.per_token,
        "moe_intermediate_size": ffn,
        "n_shared_experts": max(1, network.shared_ffn // ffn) if network.shared_ffn else 1,
        "first_k_dense_replace": network.dense_layers if network.experts else network.layers,
        "tie_word_embeddings": network.tied,
    }
    return spec_from_config(config, name)
