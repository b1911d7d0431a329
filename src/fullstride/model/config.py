"""A ModelSpec from a Hugging Face configuration: one row of the table for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from fullstride.errors import BadInput
from fullstride.model.assemble import assemble
from fullstride.model.families import decoder, layered, parts, readers
from fullstride.model.families.shape import Shape
from fullstride.model.read import Keys
from fullstride.model.spec import ModelSpec, Stack
from fullstride.model.tape import Tape


def _decoder_block(tape: Tape, shape: Shape, index: int) -> None:
    window = shape.windows[index] if shape.windows else 0
    decoder.block(tape, shape, window=window, sparse=index in shape.expert_blocks)


def _same_block(forward: Callable[[Tape, Shape], None]) -> Callable[[Tape, Shape, int], None]:
    return lambda tape, shape, index: forward(tape, shape)


@dataclass(frozen=True)
class _Family:
    """How one architecture is read, and the paths of its parts."""

    read: Callable[[Keys], Shape]
    block: Callable[[Tape, Shape, int], None] = _decoder_block
    path: str = "model.layers"
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    head_bias: bool = False
    positions: bool = False


FAMILIES: dict[str, _Family] = {
    "llama": _Family(readers.llama),
    "mistral": _Family(readers.mistral),
    "qwen2": _Family(readers.qwen2),
    "qwen3": _Family(readers.qwen3),
    "gemma": _Family(readers.gemma),
    "gemma2": _Family(readers.gemma2),
    "gemma3_text": _Family(readers.gemma3),
    "phi": _Family(readers.phi, _same_block(layered.phi_block), norm="model.final_layernorm", head_bias=True),
    "phi3": _Family(readers.phi3),
    "olmo2": _Family(readers.olmo2),
    "gpt2": _Family(
        readers.gpt2,
        _same_block(layered.gpt2_block),
        path="transformer.h",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        positions=True,
    ),
    "gpt_neox": _Family(
        readers.gpt_neox,
        _same_block(layered.neox_block),
        path="gpt_neox.layers",
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
    ),
    "mixtral": _Family(readers.mixtral),
    "qwen2_moe": _Family(readers.qwen2_moe),
    "qwen3_moe": _Family(readers.qwen3_moe),
    "deepseek_v3": _Family(readers.deepseek_v3),
}
"""Architectures that can be read from a configuration, by `model_type`."""


def spec_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The network that transformers would build from `config`.

    Args:
        config: the content of a Hugging Face `config.json`.
        name: what to call it in messages and in the spec.

    Raises:
        BadInput: unknown architecture, a size that is missing or impossible; names key, rule and fix.
    """
    if not isinstance(config, Mapping):
        raise BadInput(f"{name}: holds a {type(config).__name__}, not a table of settings", fix="give a config.json")
    word = config.get("model_type")
    family = FAMILIES.get(word) if isinstance(word, str) else None
    if family is None:
        raise BadInput(
            f"{name}: model_type is {word!r}, known are {', '.join(sorted(FAMILIES))}",
            fix="give the model as file.py:function or package.module:function",
        )
    shape = family.read(Keys(config, name))
    embed = layered.gpt2_embedding if family.positions else partial(parts.embedding, path=family.embedding)
    tail = partial(parts.tail, shape=shape, norm_path=family.norm, head_path=family.head, head_bias=family.head_bias)
    return ModelSpec(
        name=name,
        family=str(word),
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        max_sequence=shape.max_positions,
        tied_embeddings=shape.tied,
        embedding=assemble(lambda tape: embed(tape, shape), compiles=False),
        stacks=_stacks(shape, family),
        tail=assemble(tail, compiles=False),
    )


def _writer(shape: Shape, family: _Family, index: int) -> Callable[[Tape], None]:
    return lambda tape: family.block(tape, shape, index)


def _stacks(shape: Shape, family: _Family) -> tuple[Stack, ...]:
    """Runs of equal blocks; blocks of one kind are described once."""
    kinds = [(shape.windows[i] if shape.windows else 0, i in shape.expert_blocks) for i in range(shape.blocks)]
    described = {kind: assemble(_writer(shape, family, kinds.index(kind))) for kind in dict.fromkeys(kinds)}
    stacks, first = [], 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        stacks.append(Stack(path=family.path, first=first, count=count, sublayers=described[kind]))
        first += count
    return tuple(stacks)
