"""Rows that Megatron-LM ran, with its own layers and conventions: what its recipes set where a row's arguments are silent.

The recipes are public (tests/functional_tests/test_cases/*/model_config.yaml of NVIDIA/Megatron-LM; SimuMax's case files). What
is taken from them: regular deterministic tests ask for unfused attention, resumed ones take what Transformer Engine chooses;
deterministic runs set cuBLAS' workspace; dropout is 0.1 unless context parallelism runs nondeterministically or the network is
a latent-attention mixture.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msgspec.structs import replace

from fullstride.model.families.megatron_gpt import ExpertSizes, LatentSizes, MegatronShape, ffn_of, megatron_spec
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Comm, Kernels, Loss, Plan
from fullstride.plan.validation.networks import Network

FRAMEWORKS = ("megatron-ci", "megatron-simumax")
"""Whose rows are read so."""
DEEPSEEK = LatentSizes(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
"""DeepSeek-V2's and V3's latent attention (arXiv 2405.04434, 2412.19437)."""
PROXY = LatentSizes(q_rank=256, kv_rank=128, nope_dim=128, rope_dim=64, value_dim=128)
"""The recipes' proxy of it at a hidden size of 512."""
SMALL = LatentSizes(q_rank=192, kv_rank=64, nope_dim=16, rope_dim=8, value_dim=16)
"""The recipes' small latent attention, with heads of 16."""
INSTANCES = 2
"""Data-parallel groups of `multi_dist_optimizer_instances`, which the recipes split in two."""

DEFERRED = 2
"""`--wgrad-deferral-limit` of the tests that defer the head's weight gradient."""

_spec = lru_cache(maxsize=512)(megatron_spec)


def refine(
    row: Mapping[str, str], given: Mapping[str, str], framework: str, network: Network, plan: Plan, spec: ModelSpec
) -> tuple[Plan, ModelSpec]:
    """The plan and network of a row as Megatron ran it; both unchanged where another framework did.

    Args:
        row: the columns.
        given: `key=value` arguments of its note.
        framework: as the convention names it.
        network: sizes already read.
        plan: as read from the columns.
        spec: as built from `network`.
    """
    if framework not in FRAMEWORKS:
        return plan, spec
    name = row.get("model", "")
    made = _spec(_shape(row, given, framework, network), name)
    return _plan(row, given, framework, plan), made


def _flag(given: Mapping[str, str], name: str) -> bool:
    return given.get(name) == "True"


def _shape(row: Mapping[str, str], given: Mapping[str, str], framework: str, network: Network) -> MegatronShape:
    simumax, sizes = framework == "megatron-simumax", None
    if network.experts:
        grouped = simumax or _flag(given, "moe-grouped-gemm")
        ffn = int(given.get("moe-ffn-hidden-size", 0)) or (network.expert_ffn if simumax or row.get("ffn_hidden") else 0)
        ffn = ffn or ffn_of(network.hidden, gated=network.gated)
        sizes = ExpertSizes(
            count=network.experts, per_token=network.per_token, ffn=ffn, shared_ffn=network.shared_ffn, grouped=grouped
        )
    kinds: tuple[bool, ...] = ()
    if sizes:
        first = network.dense_layers or int(simumax and network.latent)  # DeepSeek's first layer is dense
        kinds = (False,) * first + (True,) * (network.layers - first)
    return MegatronShape(
        layers=network.layers,
        hidden=network.hidden,
        heads=network.heads,
        kv_heads=network.kv_heads,
        ffn=int(row.get("ffn_hidden") or 0),
        head_dim=network.head_dim,
        vocab=int(row.get("vocab") or 50257),
        positions=int(float(row["seq_len"])),
        rotary=not network.positions,
        gated=network.gated,
        rms_norm=network.rms or (network.latent and bool(sizes)),
        bias=network.bias,
        qk_norm="qk_layernorm" in row.get("model", ""),
        untied=not network.tied,
        dropout=0.0 if simumax else _dropout(row, given, network),
        implementation="local" if given.get("transformer-impl") == "local" else "te",
        experts=sizes,
        expert_layers=kinds,
        latent=_latent(given, network, simumax) if network.latent else None,
        predictions=int(given.get("mtp-num-layers", 0)),
    )


def _latent(given: Mapping[str, str], network: Network, simumax: bool) -> LatentSizes:
    if simumax or (given.get("kv-channels") and network.hidden >= 1024):
        return DEEPSEEK
    return PROXY if given.get("kv-channels") else SMALL


def _dropout(row: Mapping[str, str], given: Mapping[str, str], network: Network) -> float:
    alone = row.get("cp", "1") in ("", "1")
    if not alone and not _flag(given, "deterministic-mode"):
        return 0.0
    if network.latent and network.experts:
        return 0.0
    return 0.0 if "cuda-graph-impl" in given else 0.1


def _plan(row: Mapping[str, str], given: Mapping[str, str], framework: str, plan: Plan) -> Plan:
    if framework == "megatron-simumax":
        stage: Any = 1
        changed = replace(plan, shard=replace(plan.shard, stage=stage), kernels=Kernels(gradient_fusion=True))
        return replace(changed, layout=_sharded(plan), loss=Loss(fused="native"))
    precision = plan.precision
    if precision.block == "fp16":  # sums gradients in fp16 too
        precision = replace(precision, gradient="fp16", reduction="fp16")
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if _sets_workspace(row, given) or _wide_by_default(row) else {}
    fusion = not _flag(given, "no-gradient-accumulation-fusion")
    deferred = DEFERRED if _flag(given, "defer-embedding-wgrad-compute") else 0
    plan = replace(
        plan,
        precision=precision,
        overlap=replace(plan.overlap, deferred_head=deferred),
        compile=replace(plan.compile, graphs="cuda-graph-impl" in given),
        comm=Comm(env=env),
        kernels=Kernels(attention=_attention(row, given), gradient_fusion=fusion),  # type: ignore[arg-type]
        loss=Loss(fused="script" if _flag(given, "cross-entropy-loss-fusion") else "no"),
    )
    return _uneven(given, _layout(row, given, plan), int(float(row["layers"])))


def _sets_workspace(row: Mapping[str, str], given: Mapping[str, str]) -> bool:
    """Deterministic recipes set cuBLAS' workspace; so do those of mixtures under context parallelism or with offloading."""
    alone = row.get("cp", "1") in ("", "1")
    mixture = "num-experts" in given and (not alone or "offloading" in row.get("model", ""))
    return _flag(given, "deterministic-mode") or mixture


def _wide_by_default(row: Mapping[str, str]) -> bool:
    """Whether torch itself took cuBLAS workspaces of that size: on Blackwell for part of 2026 (pytorch's pull requests 175344
    and 182669). The tests of context parallelism over several nodes were recorded anew then; those on one node, and the others,
    before.
    """
    several = int(float(row.get("gpus") or 0)) > int(float(row.get("gpus_per_node") or 8))
    return row.get("gpu", "").startswith("GB200") and several and row.get("cp", "1") not in ("", "1")


def _sharded(plan: Plan) -> Any:
    """Everything data-parallel shares the optimizer's states."""
    layout = plan.layout
    return replace(layout, dp_shard=layout.dp_shard * layout.dp_replicate, dp_replicate=1)


def _layout(row: Mapping[str, str], given: Mapping[str, str], plan: Plan) -> Plan:
    layout, words = plan.layout, row.get("zero_stage_or_fsdp", "").lower()
    stage: Any = 3 if "fsdp" in words else 1 if "distributed optimizer" in words else 0
    if stage:
        layout = _sharded(plan)
    if "multi_dist_optimizer_instances" in row.get("model", "") and layout.dp_shard % INSTANCES == 0:
        layout = replace(layout, dp_shard=layout.dp_shard // INSTANCES, dp_replicate=INSTANCES)
    if "num-experts" in given:
        layout = replace(layout, expert_tp=int(given.get("expert-tensor-parallel-size", layout.tp)))
    return replace(plan, layout=layout, shard=replace(plan.shard, carrier="megatron", stage=stage))


def stages_of_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage from `--pipeline-model-parallel-layout`: `Et*3|(tt|)*6mL` is (3, 2, 2, 2, 2, 2, 2, 0).

    `t` is a layer; `E`, `m` and `L` are embedding, further predictions and loss; `*n` repeats what stands before it.
    """
    plain = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    plain = re.sub(r"([A-Za-z])\*(\d+)", lambda found: found[1] * int(found[2]), plain)
    return tuple(stage.count("t") for stage in plain.strip("|").split("|"))


def _uneven(given: Mapping[str, str], plan: Plan, layers: int) -> Plan:
    """Fewer layers on the first and the last stage."""
    stated = stages_of_layout(given.get("pipeline-model-parallel-layout", ""))
    if sum(stated) == layers and len(stated) % plan.layout.pp == 0 and plan.layout.pp > 1:
        chunks = len(stated) // plan.layout.pp
        schedule: Any = "interleaved" if chunks > 1 else "1f1b"
        return replace(plan, pipeline=replace(plan.pipeline, schedule=schedule, chunks=chunks, layers_per_stage=stated))
    first, last = (int(given.get(f"decoder-{end}-pipeline-num-layers", 0)) for end in ("first", "last"))
    pp, total = plan.layout.pp, layers
    if not first or not last or pp < 3 or plan.pipeline.chunks > 1:
        return plan
    each = (total - first - last) // (pp - 2)
    return replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=(first, *(each,) * (pp - 2), last)))


def _attention(row: Mapping[str, str], given: Mapping[str, str]) -> str:
    """Whether scores stand whole: local layers, unfused tests, and what one cluster recorded before its images were renewed."""
    name, where = row.get("model", ""), given.get("env", "")
    if given.get("transformer-impl") == "local":
        return "unfused" if "uninstall_te" in name else "fused_softmax"
    if row.get("cp", "1") not in ("", "1"):
        return "sdpa"
    regular = "resume" not in name and "memory_speed" not in name and "release" not in name and "weekly" not in name
    latent = given.get("multi-latent-attention") == "True"
    old = where.startswith("lts_dgxa100") and "reshard" not in name
    return "fused_softmax" if old or latent or (regular and _flag(given, "deterministic-mode")) else "sdpa"
