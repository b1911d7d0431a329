"""Terms of the host: launching operators, and preparing data."""

from __future__ import annotations

from fullstride.cluster import rates
from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.compute import term
from fullstride.plan.cost.pieces import pieces
from fullstride.plan.estimate import Term
from fullstride.plan.facts import num_recomputed, num_tensors
from fullstride.plan.plan import Plan

BACKWARD_LAUNCHES = 2.0
"""Operators of backward over those of forward."""
SELECTIVE_LAUNCHES = 3.0
"""Selective recompute passes every operator through a Python dispatch mode, twice; assumed."""
WRAPPER_SECONDS = 3e-4
"""Host time of FSDP2's hooks for one part and micro-batch, forward and backward; assumed."""
STEP_SECONDS = 1e-3
"""Python of one step: batch, schedule, events; assumed."""
TOKEN_SECONDS = {"bytes": 3e-8}
TOKENIZER_SECONDS = 1e-6
"""Preparing one token of a sample: bytes, or a Hugging Face tokenizer; assumed."""


def launches(plan: Plan, spec: ModelSpec, cluster: Cluster, device_seconds: float) -> Term:
    """Host time to launch a step. On a GPU only what exceeds the device's work shows: a step is never faster than its host."""
    launch = rates.launch_seconds(cluster)
    found = pieces(plan, spec, cluster)
    operators = sum(part.count * piece.operators * (1 + BACKWARD_LAUNCHES) for part, piece in found)
    extra = {"none": 0.0, "full": 1.0, "norm_activation": 1.0 if plan.compile.mode == "block" else SELECTIVE_LAUNCHES}
    operators += sum(num_recomputed(plan, part) * piece.operators for part, piece in found) * extra[plan.recompute.mode]
    if plan.optimizer.implementation == "loop":
        operators += 14 * num_tensors(spec) / plan.batch.accumulation
    seconds = operators * plan.batch.accumulation * launch.seconds + STEP_SECONDS
    if plan.shard.carrier == "fsdp2":
        seconds += sum(part.count for part, _ in found) * WRAPPER_SECONDS * plan.batch.accumulation
    exposed = seconds if cluster.device.kind == "cpu" else max(STEP_SECONDS, seconds - device_seconds)
    return term(
        "host launches",
        "host",
        seconds,
        f"{operators * plan.batch.accumulation:.0f} operators, {launch.source}",
        launch.confidence,
        exposed,
    )


def data(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Preparing a step's samples and copying them: in the training thread unless workers do it beside."""
    tokens = plan.workload.samples_per_step / plan.layout.data_parallel * plan.workload.sequence_length
    prepare = tokens * TOKEN_SECONDS.get(plan.workload.tokenizer, TOKENIZER_SECONDS)
    copy = 0.0
    if cluster.device.kind != "cpu":
        link = cluster.host.host_to_device
        copy = tokens * 16 / (link.value if link else 10e9) * (1.0 if plan.data.pin else 2.0)
    spare = cluster.device.kind != "cpu" or cluster.host.num_cores > plan.layout.world_size
    exposed = (0.0 if plan.data.workers and spare else prepare) + (0.0 if plan.data.pin else copy)
    return term("data", "data", prepare + copy, "time a token, assumed", "assumed", exposed)
