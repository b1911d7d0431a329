"""From a row of a published table to a case that can be priced, or to the reason why not."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fullstride.cluster.cluster import Cluster, Coefficients
from fullstride.errors import BadInput
from fullstride.model.spec import ModelSpec
from fullstride.plan.calibration import calibration_for
from fullstride.plan.plan import (
    Adapter,
    Batch,
    Compile,
    Data,
    Kernels,
    Layout,
    Loss,
    ModelRef,
    Overlap,
    Pipeline,
    Plan,
    Precision,
    Recompute,
    Shard,
    Workload,
)
from fullstride.plan.validation.conventions import Convention, convention_of
from fullstride.plan.validation.machines import cluster_of, kind_of_gpu
from fullstride.plan.validation.megatron_rows import refine
from fullstride.plan.validation.networks import Network, spec_of

GIB = 2**30
OFF = 4.0
"""Times by which a row's parameters and 12 layers x hidden^2 may differ: small vocabularies and wide MLPs stay far below."""
MIXTURES: dict[str, tuple[int, int, int, int, int]] = {
    "deepseekv2": (160, 6, 1536, 2, 1),
    "deepseekv3": (256, 8, 2048, 1, 3),
    "kimi_k2": (384, 8, 2048, 1, 1),
    "qwen3_30b": (128, 8, 768, 0, 0),
    "qwen3_235b": (128, 8, 1536, 0, 0),
    "gpt oss 120b": (128, 4, 2880, 0, 0),
    "moonlight": (64, 6, 1408, 2, 1),
}
"""Experts, experts a token, inner width, shared experts, dense blocks first, by name, where a note does not say (the models'
own configurations)."""
CLAMPED_PASSES = 28.0
"""GPT-OSS clamps both halves of its gated activation and shifts one; written out in fp32: seven operators, each reading and
writing two compute elements' worth. Fused from the release on that `Convention.graphs_from` names."""
BLACKWELL = ("b200", "b300", "gb200", "gb300")
"""GPUs whose recipes run mixtures as graphs (`Convention.graphs_from`)."""
NEEDED = ("source", "layers", "hidden", "seq_len", "gpu", "gpus", "tp", "pp", "micro_batch", "global_batch")
"""Columns that a file must have."""


@dataclass(frozen=True)
class Case:
    """One published run, ready to be priced."""

    file: str
    line: int
    source: str
    model: str
    framework: str
    kind: str
    plan: Plan
    spec: ModelSpec
    cluster: Cluster
    seconds: float | None
    static_bytes: float | None
    peak_bytes: float | None
    last_rank: bool = False
    """Memory is that of the last rank, not of the fullest."""
    whole_device: bool = False
    """Memory is what the driver showed (nvidia-smi), context included, not what torch's allocator held."""
    reserved: bool = False
    """Memory is what torch's allocator reserved, not what stood allocated."""
    row: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Skip:
    """A row that is not predicted, and why; `eligible` when it should have been."""

    file: str
    line: int
    reason: str
    eligible: bool = False


class _Reason(Exception):
    """Why a row is left out."""

    def __init__(self, text: str, *, eligible: bool = False) -> None:
        super().__init__(text)
        self.eligible = eligible


def read_rows(path: Path, coefficients: dict[tuple[str, str], Coefficients] | None = None) -> list[Case | Skip]:
    """Every row of a CSV file.

    Args:
        path: the file.
        coefficients: by GPU kind and framework, in place of the shipped calibrations.

    Raises:
        BadInput: not readable, or columns are missing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise BadInput(f"{path}: has no column {missing[0]!r}", fix="give a CSV file in the format of the docs")
            return [_case_or_skip(path, index + 2, row, coefficients) for index, row in enumerate(reader)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: cannot be read ({error})", fix="give a CSV file") from None


def _case_or_skip(path: Path, line: int, raw: dict[str, Any], coefficients: Any) -> Case | Skip:
    row = {key: (value or "").strip() for key, value in raw.items() if isinstance(key, str)}
    try:
        return _case(path, line, row, coefficients)
    except _Reason as reason:
        return Skip(path.name, line, str(reason), reason.eligible)
    except ValueError as error:
        return Skip(path.name, line, f"not a number: {error}")


def arguments_of(note: str) -> dict[str, str]:
    """`key=value` entries of a note: the arguments that a Megatron run was given."""
    return {k.strip(): v.strip() for k, _, v in (part.partition("=") for part in note.split(";")) if v and " " not in k.strip()}


def _case(path: Path, line: int, row: dict[str, str], coefficients: Any) -> Case:
    _require_eligible(row)
    convention, note = convention_of(row["source"]), row.get("note", "")
    kind = kind_of_gpu(row["gpu"])
    if kind == "unknown":
        raise _Reason(f"GPU {row['gpu']!r} is not in the catalogue", eligible=True)
    seconds = _number(row, "step_time_s") if convention.times else None
    static = _number(row, "static_memory_gib") if convention.memory else None
    peak = _number(row, "memory_gib") if convention.memory else None
    if seconds is None and static is None and peak is None:
        raise _Reason("no time or memory published" if convention.times else "only a time of a run that is no benchmark")
    network = network_of(row, convention)
    _require_agreement(row, network)
    spec = spec_of(network, row.get("model", ""))
    plan = plan_of(row, convention, spec)
    arguments = arguments_of(row.get("note", ""))
    plan, spec = refine(row, arguments, convention.framework, network, plan, spec)
    given = (coefficients or {}).get((kind, convention.framework)) or calibration_for(kind, convention.framework)
    cluster = cluster_of(
        kind,
        plan.layout.world_size,
        _whole(row, "gpus_per_node") or 8,
        row.get("interconnect_intra", ""),
        row.get("interconnect_inter", ""),
        given,
    )
    if plan.layout.world_size != _whole(row, "gpus"):
        raise _Reason("layout and number of GPUs do not agree")
    return Case(
        file=path.name,
        line=line,
        source=row["source"],
        model=row.get("model", ""),
        framework=convention.framework,
        kind=kind,
        plan=plan,
        spec=spec,
        cluster=cluster,
        seconds=seconds,
        static_bytes=static * GIB if static else None,
        peak_bytes=peak * GIB if peak else None,
        last_rank="LAST rank" in note,
        whole_device="nvidia-smi" in note,
        reserved=convention.reserved,
        row=row,
    )


def _require_eligible(row: dict[str, str]) -> None:
    note = row.get("note", "")
    if "NOT a decoder" in note:
        raise _Reason("not a decoder-only network")
    if "hybrid-layer-pattern" in note or "hybrid-override-pattern" in note or "Mamba" in row.get("model", ""):
        raise _Reason("not a decoder-only network")
    if "internally inconsistent" in note:
        raise _Reason("the source's own numbers do not agree")
    for column, what in (("hidden", "hidden size"), ("layers", "layers"), ("seq_len", "sequence length"), ("gpus", "GPUs")):
        if not row.get(column):
            raise _Reason(f"no {what} published")
    if not row.get("tp") or not row.get("pp"):
        raise _Reason("no layout published")
    if not row.get("micro_batch") and not row.get("global_batch"):
        raise _Reason("no batch published")
    if "distill" in row.get("model", "") or "distill" in note:
        raise _Reason("trains against a second network", eligible=True)
    if "optimizer=muon" in note:
        raise _Reason("optimizer is not AdamW", eligible=True)


def _require_agreement(row: dict[str, str], network: Network) -> None:
    """A dense network's layers and width make about its parameters; a row where they are far from it is of another network."""
    try:
        stated = float(row.get("params_b") or 0) * 1e9
    except ValueError:
        return
    made = 12 * network.layers * network.hidden**2
    if stated and not network.experts and not made / OFF < stated < made * OFF:
        raise _Reason("the source's own numbers do not agree")


def _number(row: dict[str, str], column: str) -> float | None:
    text = row.get(column, "")
    value = float(text) if text else None
    return value if value and value > 0 else None


def _whole(row: dict[str, str], column: str) -> int:
    text = row.get(column, "")
    return int(float(text)) if text else 0


def network_of(row: dict[str, str], convention: Convention) -> Network:
    """The network, from the columns, the note's arguments and words, and the source's habits."""
    note, model = row.get("note", ""), row.get("model", "").lower()
    given = arguments_of(note)
    layers, hidden, tp = _whole(row, "layers"), _whole(row, "hidden"), max(1, _whole(row, "tp"))
    heads = _whole(row, "heads") or max(1, hidden // 128)
    gpt = convention.gated and model.startswith("gpt") and "oss" not in model
    gated = (convention.gated and not gpt) or given.get("swiglu") == "True"
    vocab = _whole(row, "vocab") or convention.vocab
    multiple = convention.vocab_multiple * tp if convention.pads_alone or tp > 1 else 0
    vocab = -(-vocab // multiple) * multiple if multiple else vocab
    experts = _experts(row, given, note)
    rotary = (convention.rotary and not gpt) or given.get("position-embedding-type") in ("rope", "none")
    return Network(
        layers=layers,
        hidden=hidden,
        ffn=_whole(row, "ffn_hidden") or 4 * hidden,
        heads=heads,
        kv_heads=_whole(row, "kv_heads") or heads,
        vocab=vocab,
        positions=0 if rotary or given.get("multi-latent-attention") == "True" else _whole(row, "seq_len"),
        head_dim=_head_dim(model, given),
        gated=gated,
        bias=(convention.bias or gpt) and given.get("disable-bias-linear") != "True",
        tied=(convention.tied or gpt) and given.get("untie-embeddings-and-output-weights") != "True",
        rms=convention.rms and not gpt,
        qk_norm="qwen3" in model,
        separate=convention.separate,
        window=128 if "gpt oss" in model or "gpt-oss" in model else 0,
        expert_passes=CLAMPED_PASSES if ("gpt oss" in model and _modern(note, convention) is False) else 0.0,
        latent="MLA" in note or "deepseek" in model or "kimi" in model or given.get("multi-latent-attention") == "True",
        **experts,
    )


def _head_dim(model: str, given: dict[str, str]) -> int:
    if "kv-channels" in given:
        return int(given["kv-channels"])
    return next((size for name, size in (("qwen3", 128), ("gpt oss", 64)) if name in model), 0)


def _experts(row: dict[str, str], given: dict[str, str], note: str) -> dict[str, int]:
    """Sizes of a mixture, from arguments (`num-experts=8`) or words (`128 experts top8, moe ffn 768`)."""
    words = re.search(r"(\d+) experts top(\d+)(?: \+ (\d+) shared)?(?:, moe ffn (\d+))?", note)
    dense = re.search(r"(\d+) dense layers?", note)
    if words:
        ffn = int(words[4]) if words[4] else _whole(row, "ffn_hidden")
        return {
            "experts": int(words[1]),
            "per_token": int(words[2]),
            "expert_ffn": ffn,
            "shared_ffn": int(words[3] or 0) * ffn,
            "dense_layers": int(dense[1]) if dense else 0,
        }
    if "num-experts" in given:
        pattern = re.match(r"\(\[0\]\*(\d+)", given.get("moe-layer-freq", ""))
        return {
            "experts": int(given["num-experts"]),
            "per_token": int(given.get("moe-router-topk", 2)),
            "expert_ffn": int(given.get("moe-ffn-hidden-size", _whole(row, "ffn_hidden") or 4 * _whole(row, "hidden"))),
            "shared_ffn": int(given.get("moe-shared-expert-intermediate-size", 0)),
            "dense_layers": int(pattern[1]) if pattern else 0,
        }
    if "mixtral" in row.get("model", "").lower():
        return {"experts": 8, "per_token": 2, "expert_ffn": _whole(row, "ffn_hidden")}
    model = row.get("model", "").lower()
    for name, (count, top, ffn, shared, first) in MIXTURES.items():
        if name in model:
            sizes = {"experts": count, "per_token": top, "expert_ffn": ffn, "shared_ffn": shared * ffn}
            return {**sizes, "dense_layers": 0 if "cut to" in model else first}
    return {}


FP8: tuple[tuple[str, str], ...] = (
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8-mx", "mxfp8"),
    ("blockwise", "blockwise"),
    ("rowwise", "rowwise"),
    ("fp8", "tensorwise"),
)


def plan_of(row: dict[str, str], convention: Convention, spec: ModelSpec) -> Plan:
    """The plan that the row ran."""
    note, given = row.get("note", ""), arguments_of(row.get("note", ""))
    tp, pp = _whole(row, "tp"), _whole(row, "pp")
    cp, ep = max(1, _whole(row, "cp")), max(1, _whole(row, "ep"))
    dp = _whole(row, "dp") or _whole(row, "gpus") // max(1, tp * pp * cp)
    if dp < 1:
        raise _Reason("layout and number of GPUs do not agree")
    micro, accumulation, samples = _batch(row, dp)
    fsdp = "fsdp" in row.get("zero_stage_or_fsdp", "").lower()
    carrier = "fsdp2" if fsdp and convention.carrier == "megatron" else convention.carrier
    fused = carrier != convention.carrier  # Transformer Engine's kernels, whoever carries the shards
    stage = _stage(row.get("zero_stage_or_fsdp", ""), convention.stage)
    chunks = max(1, _whole(row, "vpp"))
    schedule: Any = "none" if pp == 1 else "interleaved" if chunks > 1 else "1f1b"
    mixture = any(m.groups > 1 for stack in spec.stacks for s in stack.sublayers for m in s.matmuls)
    modern = _modern(note, convention)
    if modern and not kind_of_gpu(row["gpu"]).startswith(BLACKWELL):
        modern = False
    sharded = dp > 1 and (stage > 0 or carrier == "fsdp2")
    shared = dp > 1 or (cp > 1 and carrier == "fsdp2")
    parallel = convention.sequence_parallel or given.get("sequence-parallel") == "True" or "with SP" in note
    if convention.framework == "megatron-ci":
        parallel = given.get("sequence-parallel") == "True"
    return Plan(
        model=ModelRef(source=row.get("model", "") or "row"),
        workload=Workload(sequence_length=_whole(row, "seq_len"), samples_per_step=samples),
        layout=Layout(
            dp_shard=dp if sharded else 1,
            dp_replicate=1 if sharded else dp,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            sequence_parallel=parallel,
        ),
        shard=_shard(carrier, stage if shared else 0, pp, convention, spec),
        pipeline=Pipeline(schedule=schedule, chunks=chunks if pp > 1 else 1),
        batch=Batch(micro_batch=micro, accumulation=accumulation),
        recompute=_recompute(row.get("recompute", ""), note, convention, mixture and modern is False),
        precision=_precision(row.get("precision", ""), note, convention),
        kernels=Kernels(attention=_attention(row.get("flash_attention", ""), convention)),
        adapter=Adapter(rank=8 if "LoRA Performance" in note or note.startswith("LoRA") else 0),
        loss=Loss(fused="operators" if convention.root_kept and tp > 1 else "no"),
        compile=Compile(mode="block" if convention.compiled or fused else "off", graphs=bool(mixture and modern)),
        data=Data(workers=2, pin=True),
        overlap=Overlap(
            gradients=_overlaps(given, convention),
            tensor="AsyncTP" in note or given.get("tp-comm-overlap") == "True" or convention.overlap_tensor,
            experts="EP overlap on" in note or bool(mixture and modern),
        ),
    )


def _shard(carrier: Any, stage: Any, pp: int, convention: Convention, spec: ModelSpec) -> Shard:
    """ZeRO as the source wraps it."""
    if not convention.root_kept or stage != 3:
        return Shard(carrier=carrier, stage=stage)
    last = spec.stacks[-1]
    kept = {"embedding": False, "head": False, f"{last.path}.{last.first + last.count - 1}": False}
    return Shard(carrier=carrier, stage=1) if pp > 1 else Shard(carrier=carrier, stage=3, reshard=kept)


def _overlaps(given: dict[str, str], convention: Convention) -> bool:
    return given.get("overlap-grad-reduce") == "True" if convention.framework == "megatron-ci" else convention.overlap_gradients


def _batch(row: dict[str, str], dp: int) -> tuple[int, int, int]:
    """Micro-batch, accumulation and samples of a step; a micro-batch that is not published is one sample."""
    samples = _whole(row, "global_batch")
    micro = _whole(row, "micro_batch") or 1
    if row.get("source", "").endswith("(2020)") and not row.get("micro_batch"):
        micro = max(1, samples // dp)
    if not samples:
        samples = micro * dp
    accumulation = max(1, round(samples / (micro * dp)))
    return micro, accumulation, micro * accumulation * dp


def _stage(text: str, usual: int) -> Literal[0, 1, 2, 3]:
    words = text.lower()
    found = re.search(r"zero-?(\d)", words)
    if found:
        return int(found[1])  # type: ignore[return-value]
    if "fsdp" in words:
        return 3
    if "distributed optimizer" in words:
        return 1
    if words.startswith(("ddp", "none")):
        return 0
    return usual  # type: ignore[return-value]


def _modern(note: str, convention: Convention) -> bool | None:
    """Whether a row's release is one whose mixtures run as graphs; None where its source knows no such change."""
    found = re.match(r"(\d\d\.\d\d)", note)
    return found[1] >= convention.graphs_from if found and convention.graphs_from else None


def _recompute(text: str, note: str, convention: Convention, activations: bool) -> Recompute:
    words = text.lower()
    mode: Any = "norm_activation" if activations else convention.recompute
    if words in ("none", "no", "false"):
        mode = "none"
    elif words.startswith("full"):
        mode = "full"
    elif words.startswith("selective"):
        mode = "norm_activation" if convention.framework == "torchtitan" or "moe_act" in words else "attention"
    offload: Any = "cpu" if "activation CPU offload=True" in note else "none"
    half = 0.5 if convention.framework == "torchtitan" and mode == "norm_activation" else 0.0
    return Recompute(mode=mode, products=half, offload=offload if mode != "none" else "none")


def _precision(text: str, note: str, convention: Convention) -> Precision:
    words = text.lower()
    if "parenthesis" in words:  # two recipes in one cell; the note says which value this row is
        words = "mxfp8" if "parenthesis" in note.lower() else "fp8"
    narrow: Any = "fp16" if "fp16" in words else "bf16"
    fp8: Any = next((mode for word, mode in FP8 if word in words), "off")
    wide: Any = "fp32" if convention.gradient_bytes == 4 and "PURE" not in note.split("(PURE")[0] else narrow
    return Precision(
        cast="weights",
        embedding=narrow,
        block=narrow,
        head=narrow,
        loss="fp32",
        gradient=wide,
        reduction=wide,
        master="fp32",
        optimizer_state="fp32",
        fp8=fp8,
    )


def _attention(text: str, convention: Convention) -> Literal["sdpa", "fused_softmax", "unfused"]:
    words = text.lower()
    if words.startswith("no"):
        return "fused_softmax"
    return "sdpa" if words else convention.attention
