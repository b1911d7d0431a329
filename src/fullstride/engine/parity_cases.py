"""Models and Plans for the parity check, and the drawing of them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from fullstride.engine.build import from_config, parameters_on_meta
from fullstride.files import Value
from fullstride.plan.plan import (
    Batch,
    Layout,
    Loss,
    ModelRef,
    Pipeline,
    Plan,
    Precision,
    Recipe,
    Recompute,
    Shard,
    Workload,
)
from fullstride.plan.rules import check

LENGTH = 12
"""Tokens of a sample."""
_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61, "max_position_embeddings": 32}
_LLAMA_LIKE = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_LIKE, "model_type": "llama"},
    "qwen3": {**_LLAMA_LIKE, "model_type": "qwen3", "head_dim": 8},
    "gemma": {**_LLAMA_LIKE, "model_type": "gemma", "head_dim": 8},
    "phi": {**_LLAMA_LIKE, "model_type": "phi", "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 32,
        "vocab_size": 61,
        "initializer_range": 0.2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mistral": {**_LLAMA_LIKE, "model_type": "mistral", "sliding_window": None},
    "qwen2": {**_LLAMA_LIKE, "model_type": "qwen2"},
    "gemma2": {**_LLAMA_LIKE, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    "phi3": {**_LLAMA_LIKE, "model_type": "phi3", "pad_token_id": 0},
    "olmo2": {**_LLAMA_LIKE, "model_type": "olmo2"},
    "gpt_neox": {**_LLAMA_LIKE, "model_type": "gpt_neox", "rotary_pct": 0.5},
    "qwen2_moe": {
        **_LLAMA_LIKE,
        "model_type": "qwen2_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "deepseek_v3": {
        **_LLAMA_LIKE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "mixtral": {**_LLAMA_LIKE, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2},
    "plain": {"vocab_size": 61},
    "modular": {"vocab_size": 61},
}
"""Small models by family; `plain` and `modular` are modules of this file. Vocabulary and experts divide by no ranks."""
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3")
WIDENING = frozenset(set(FAMILIES) - {"gpt2", "plain", "modular"})
"""Families whose own code computes norms or rotary angles in fp32, so that fp64 is not fp64 throughout."""

ONLY_FP32 = frozenset(_MIXTURES)
"""Families that use an operator without fp64 (grouped matrix products)."""


class Case(Value, frozen=True, kw_only=True):
    """A model, a Plan and the seed of its data."""

    name: str
    family: str
    tied: bool
    seed: int
    plan: Plan
    layers: int = 3
    """Blocks of the model."""
    changes: dict[str, Any] = {}
    """Entries of the family's configuration that are another here."""

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int({**FAMILIES[self.family], **self.changes}["vocab_size"])

    @property
    def widens(self) -> bool:
        """Whether the model itself computes parts in fp32."""
        return self.family in WIDENING


class _PlainBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(samples, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        added: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + added


class _HeadedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width, bias=False)  # softmax is blind to a bias of keys: its gradient is rounding alone
        self.to_v = nn.Linear(width, width)
        self.back = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (f(x).view(samples, length, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.back(mixed.transpose(1, 2).reshape(samples, length, -1))
        return result


class _ModularBlock(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _HeadedAttention(width, heads)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        fed: torch.Tensor = self.feed(self.between(x))
        return x + fed


class PlainModel(nn.Module):
    """A language model that owes nothing to transformers: int64 [samples, seq] to logits [samples, seq, vocab]."""

    def __init__(self, vocab: int = 61, width: int = 32, depth: int = 3, *, tied: bool = False, modular: bool = False) -> None:
        """Make `depth` blocks of `width`; `modular`: attention and MLP are modules of their own."""
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.stack = nn.ModuleList((_ModularBlock if modular else _PlainBlock)(width) for _ in range(depth))
        self.last_norm = nn.LayerNorm(width)
        self.to_vocab = nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.to_vocab.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every position."""
        x: torch.Tensor = self.table(tokens)
        for block in self.stack:
            x = block(x)
        logits: torch.Tensor = self.to_vocab(self.last_norm(x))
        return logits


def model_of(case: Case) -> nn.Module:
    """The unmodified model of a case, parameters on meta."""
    if case.family in ("plain", "modular"):
        with parameters_on_meta():
            return PlainModel(case.vocab, depth=case.layers, tied=case.tied, modular=case.family == "modular")
    layers: dict[str, Any] = {name: case.layers for name in ("num_hidden_layers", "n_layer") if name in FAMILIES[case.family]}
    told = {**FAMILIES[case.family], **layers, **case.changes, "tie_word_embeddings": case.tied}
    return from_config(told, case.family)


def make_case(
    family: str,
    *,
    tied: bool = False,
    stage: int = 0,
    ranks: int = 1,
    replicate: int = 1,
    accumulation: int = 1,
    recompute: Recompute | None = None,
    loss: Loss | None = None,
    dtype: str = "fp64",
    reshard: dict[str, bool] | None = None,
    seed: int = 0,
    micro_batch: int = 2,
    carrier: str = "",
    pp: int = 1,
    schedule: str = "1f1b",
    chunks: int = 1,
    layers_per_stage: tuple[int, ...] = (),
    micro_batch_per_stage: tuple[int, ...] = (),
    layers: int = 3,
    tp: int = 1,
    sequence_parallel: bool = True,
    changes: dict[str, Any] | None = None,
) -> Case:
    """A case from the choices that matter; its name lists them. `ranks` are those of data parallelism."""
    carrier = carrier or ("none" if ranks == 1 else "ddp" if stage == 0 else "fsdp2")
    recompute, loss = recompute or Recompute(), loss or Loss()
    layout = Layout(
        dp_replicate=ranks if stage == 0 else replicate,
        dp_shard=1 if stage == 0 else ranks // replicate,
        pp=pp,
        tp=tp,
        sequence_parallel=sequence_parallel,
    )
    pipeline = Pipeline(
        schedule=schedule,  # type: ignore[arg-type]
        chunks=chunks,
        layers_per_stage=layers_per_stage,
        micro_batch_per_stage=micro_batch_per_stage,
    )
    roles = ("embedding", "block", "head", "loss", "gradient", "reduction", "master", "optimizer_state")
    plan = Plan(
        model=ModelRef(source="parity"),
        workload=Workload(sequence_length=LENGTH, samples_per_step=micro_batch * accumulation * ranks),
        recipe=Recipe(steps=10, learning_rate=1e-3, warmup_steps=2, seed=seed, clip_norm=0.5),
        layout=layout,
        pipeline=Pipeline() if pp == 1 else pipeline,
        shard=Shard(carrier=carrier, stage=stage, reshard=reshard or {}),  # type: ignore[arg-type]
        batch=Batch(micro_batch=micro_batch, accumulation=accumulation),
        recompute=recompute,
        precision=Precision(**dict.fromkeys(roles, dtype)),  # type: ignore[arg-type]
        loss=loss,
    )
    name = f"{family}{' tied' if tied else ''} ranks={ranks} stage={stage} replicate={layout.dp_replicate}"
    name += f" {carrier} accumulation={accumulation} recompute={recompute.mode}/{recompute.every} loss={loss.kind}"
    name += f" {dtype} reshard={sorted((reshard or {}).items())} seed={seed}"
    if pp > 1:
        name += f" pp={pp} {schedule} chunks={chunks} layers={layers_per_stage or layers} sizes={micro_batch_per_stage}"
    name += f" tp={tp}{' sequence' if sequence_parallel else ''}" if tp > 1 else ""
    name += f" {sorted(changes.items())}" if changes else ""
    return Case(name=name, family=family, tied=tied, seed=seed, plan=plan, layers=layers, changes=changes or {})


def draw_cases(rng: random.Random, count: int, ranks: int) -> tuple[Case, ...]:
    """Random cases that the rules allow, each for `ranks` ranks."""
    drawn: list[Case] = []
    while len(drawn) < count:
        stage = rng.choice((0, 1, 2, 3)) if ranks > 1 else 0
        family = rng.choice(sorted(FAMILIES))
        case = make_case(
            family,
            tied=rng.random() < 0.5,
            stage=stage,
            ranks=ranks,
            replicate=2 if stage and ranks % 2 == 0 and ranks > 2 and rng.random() < 0.4 else 1,
            accumulation=rng.choice((1, 3)),
            recompute=Recompute(mode=rng.choice(("none", "norm_activation", "full")), every=rng.choice((1, 2))),
            loss=Loss(kind=rng.choice(("model", "chunked")), chunk_tokens=rng.choice((5, 7, 4096))),
            dtype="fp32" if family in ONLY_FP32 else rng.choice(("fp64", "fp32")),
            reshard={"blocks": rng.random() < 0.5, "head": rng.random() < 0.5} if stage == 3 and rng.random() < 0.5 else None,
            seed=rng.randrange(1000),
            micro_batch=rng.choice((1, 2)),
            carrier=rng.choice(("fsdp2", "flat")) if stage else "",
        )
        if not check(case.plan):
            drawn.append(case)
    return tuple(drawn)
