"""What the recipe of each source has where its rows say nothing: stated once a source, with where it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Convention:
    """The habits of one source."""

    pattern: str
    """What the `source` column contains."""
    framework: str
    """Names the calibration, with the GPU's kind."""
    carrier: Literal["fsdp2", "megatron", "deepspeed"]
    stated: str
    """The conventions in words, and where they are from."""
    stage: Literal[0, 1, 2, 3] = 1
    """ZeRO stage where the column is empty."""
    recompute: Literal["none", "norm_activation", "attention", "full"] = "none"
    attention: Literal["sdpa", "fused_softmax", "unfused"] = "sdpa"
    vocab: int = 50257
    vocab_multiple: int = 128
    """The vocabulary is padded to a multiple of this times tp; 0: as it is."""
    pads_alone: bool = True
    """False: padded only where tp cuts it."""
    gated: bool = False
    bias: bool = True
    tied: bool = True
    rms: bool = False
    rotary: bool = False
    compiled: bool = False
    separate: bool = False
    """Queries, keys, values, gate and up are products of their own."""
    gradient_bytes: Literal[2, 4] = 4
    """Of main gradients and their reduction."""
    overlap_gradients: bool = True
    overlap_tensor: bool = False
    sequence_parallel: bool = True
    graphs_from: str = ""
    """From this release on, mixtures of experts run as CUDA graphs on Blackwell, their exchange overlapped, nothing made again;
    before it and on older GPUs, norms and activations are made again. Empty: no such change."""
    times: bool = True
    """False: the source itself says that its times mean nothing."""
    memory: bool = True
    reserved: bool = False
    """Memory is what torch's allocator reserved, not what stood allocated."""
    root_kept: bool = False
    """FSDP2 wraps blocks and the whole: embedding, head and the last block stay gathered; under a pipeline everything does, and
    whole gradients are summed up to the last micro-batch."""


CONVENTIONS: tuple[Convention, ...] = (
    Convention(
        pattern="torchtitan",
        framework="torchtitan",
        carrier="fsdp2",
        stage=3,
        recompute="norm_activation",
        vocab=128256,
        vocab_multiple=0,
        gated=True,
        bias=False,
        tied=False,
        rms=True,
        rotary=True,
        compiled=True,
        separate=True,
        reserved=True,
        root_kept=True,
        stated="FSDP2, bf16 weights, fp32 reduction and masters, blocks compiled, SDPA, logits whole; `selective` makes all "
        "but attention and every second product again; memory is the most that any rank's allocator reserved (the source's "
        "own pages, train_configs and metrics.py)",
    ),
    Convention(
        pattern="llm-foundry",
        framework="llm-foundry",
        carrier="fsdp2",
        stage=3,
        recompute="none",
        vocab=50368,
        vocab_multiple=0,
        bias=False,
        stated="MPT: no biases, learned positions, tied head, low-precision LayerNorm; FSDP full shard, eager, flash "
        "attention (Triton on A100); PURE reduces in bf16, DEFAULT in fp32 (its benchmarking README)",
    ),
    Convention(
        pattern="vTrain",
        framework="megatron-deepspeed",
        carrier="deepspeed",
        stage=0,
        recompute="full",
        attention="fused_softmax",
        vocab=50257,
        pads_alone=False,
        gradient_bytes=2,
        overlap_gradients=False,
        sequence_parallel=False,
        stated="Megatron-DeepSpeed, fp16, ZeRO 0, full recompute, 1F1B, fused softmax, gradients all-reduced in fp16 after "
        "backward (the authors' repository); vocabulary of GPT-2, padded only where tp cuts it (by the head's times)",
    ),
    Convention(
        pattern="bigscience",
        framework="megatron-deepspeed",
        carrier="deepspeed",
        stage=1,
        recompute="full",
        attention="fused_softmax",
        vocab=50257,
        overlap_gradients=False,
        sequence_parallel=False,
        stated="Megatron-DeepSpeed, ZeRO 1, full recompute, fused softmax, heads of 128 where none are given, vocabulary of "
        "GPT-2 (tr11's chronicles)",
    ),
    Convention(
        pattern="Megatron-Bridge",
        framework="megatron-bridge",
        overlap_tensor=True,
        carrier="megatron",
        gated=True,
        bias=False,
        tied=False,
        rms=True,
        rotary=True,
        gradient_bytes=2,
        vocab=128256,
        vocab_multiple=128,
        graphs_from="26.06",
        stated="Megatron-Core with Transformer Engine: distributed optimizer overlapped, bf16 gradients, sequence "
        "parallelism and overlap of tp, no recompute in dense models, balanced experts (scripts/performance recipes); "
        "mixtures: norms and activations made again; on Blackwell from container 26.06 on CUDA graphs and overlapped exchange",
    ),
    Convention(
        pattern="NVIDIA/NeMo",
        framework="nemo",
        overlap_tensor=True,
        carrier="megatron",
        gated=True,
        bias=False,
        tied=False,
        rms=True,
        rotary=True,
        gradient_bytes=2,
        vocab=128256,
        stated="NeMo 2 recipes on Megatron-Core: as Megatron-Bridge",
    ),
    Convention(
        pattern="SimuMax",
        framework="megatron-simumax",
        carrier="megatron",
        gated=True,
        bias=False,
        tied=False,
        rms=True,
        rotary=True,
        vocab=128256,
        overlap_gradients=False,
        stated="Megatron-LM, distributed optimizer, fp32 gradients, overlaps switched off, fused cross-entropy, no recompute "
        "(the case files)",
    ),
    Convention(
        pattern="test_cases",
        framework="megatron-ci",
        carrier="megatron",
        stage=0,
        times=False,
        stated="Megatron-LM's functional tests: GPT-2 vocabulary padded to 128 x tp, learned positions, biases and a tied head "
        "unless an argument says otherwise; fp32 main gradients; times are of deterministic tiny runs and not predicted",
    ),
    Convention(
        pattern="DLPerf",
        framework="megatron-2021",
        carrier="megatron",
        stage=0,
        recompute="full",
        attention="fused_softmax",
        vocab=51200,
        overlap_gradients=False,
        sequence_parallel=False,
        stated="Megatron-LM and OneFlow of 2021: fp16, full recompute, fused softmax, all-reduce after backward (the report)",
    ),
    Convention(
        pattern="2104.04473",
        framework="megatron-2021",
        carrier="megatron",
        stage=0,
        recompute="full",
        attention="fused_softmax",
        vocab=51200,
        overlap_gradients=False,
        sequence_parallel=False,
        stated="the paper's runs: fp16, full recompute, interleaved 1F1B, all-reduce after backward",
    ),
    Convention(
        pattern="2205.05198",
        framework="megatron-2021",
        carrier="megatron",
        stage=0,
        recompute="attention",
        attention="fused_softmax",
        vocab=51200,
        overlap_gradients=False,
        sequence_parallel=False,
        stated="the paper's runs: fp16, recompute and sequence parallelism as the row says, all-reduce after backward",
    ),
    Convention(
        pattern="images/tables.tex",
        framework="megatron-2021",
        carrier="megatron",
        stage=0,
        recompute="full",
        attention="fused_softmax",
        vocab=50257,
        overlap_gradients=False,
        sequence_parallel=False,
        stated="Megatron-LM of 2020: fp16, full recompute, micro-batch = global batch / dp",
    ),
    Convention(
        pattern="model_table.png",
        framework="megatron-core",
        carrier="megatron",
        vocab=131072,
        stated="Megatron-Core r0.8: bf16, flash attention, all overlaps on",
    ),
    Convention(
        pattern="Primus",
        framework="primus",
        carrier="megatron",
        gated=True,
        bias=False,
        tied=False,
        rms=True,
        rotary=True,
        vocab=128256,
        stated="Primus' Megatron backend: distributed optimizer, overlaps on, no recompute",
    ),
)
"""The first whose pattern stands in the row's source is taken."""

GENERAL = Convention(
    pattern="",
    framework="unknown",
    carrier="fsdp2",
    stage=3,
    gated=True,
    bias=False,
    tied=False,
    rms=True,
    rotary=True,
    vocab=32000,
    vocab_multiple=0,
    stated="a source that is not listed: FSDP2, no recompute, flash attention, a Llama-like network",
)


def convention_of(source: str) -> Convention:
    """The habits of a source, by what its name contains."""
    return next((item for item in CONVENTIONS if item.pattern in source), GENERAL)
