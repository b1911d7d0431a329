"""What is taken where the user says nothing: the workload of the `plan` verb, and the precisions and layouts with names."""

from __future__ import annotations

import math

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Batch, Layout, Plan, Precision, Shard, Workload

DEFAULT_SEQUENCE = 8192
TOKENS_PER_DEVICE = 8192

FP32 = Precision()
"""Everything in fp32."""
AUTOCAST = Precision(cast="autocast", block="bf16", head="bf16")
"""fp32 weights, cast to bf16 at each matrix product."""


def weights_cast(accumulation: int, carrier: str) -> Precision:
    """bf16 weights beside fp32 masters; gradients stay in bf16 where one rank has a single micro-batch."""
    narrow = accumulation == 1 and carrier == "none"
    return Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", gradient="bf16" if narrow else "fp32")


def layout_for(stage: int, num_ranks: int) -> tuple[Layout, Shard]:
    """The data-parallel layout and carrier of a ZeRO stage on `num_ranks` ranks; one rank needs neither."""
    if num_ranks == 1:
        return Layout(), Shard()
    if stage == 0:
        return Layout(dp_replicate=num_ranks), Shard(carrier="ddp")
    return Layout(dp_shard=num_ranks), Shard(carrier="fsdp2", stage=stage)  # type: ignore[arg-type]


def plain_plan(base: Plan, num_ranks: int, cluster: Cluster) -> Plan:
    """One sample at a time, eager, the model's own loss; DDP, or nothing on one rank; bf16 autocast, or fp32 on CPU."""
    layout, shard = layout_for(0, num_ranks)
    batch = Batch(micro_batch=1, accumulation=max(1, base.workload.samples_per_step // num_ranks))
    return replace(base, layout=layout, shard=shard, batch=batch, precision=FP32 if cluster.device.kind == "cpu" else AUTOCAST)


def default_workload(
    spec: ModelSpec,
    cluster: Cluster,
    *,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
    data: str | None = None,
    tokenizer: str | None = None,
    num_ranks: int | None = None,
    to_run: bool = True,
) -> Workload:
    """The work of one step, filled up with defaults.

    Sequence: the smaller of the model's positions and 8192. Samples: the smallest multiple of the data-parallel degree
    that gives 8,192 tokens a device. Without `to_run` ranks may share a sample (tensor, pipeline or context parallel), so
    that samples need not be a multiple of their number.

    Raises:
        BadInput: a size that cannot be, or more tokens in a sample than the model has positions.
    """
    longest = spec.max_sequence or DEFAULT_SEQUENCE
    sequence = min(longest, DEFAULT_SEQUENCE) if sequence_length is None else sequence_length
    ranks = cluster.num_devices if num_ranks is None else num_ranks
    if ranks < 1:
        raise BadInput(f"{ranks} ranks: a run has at least one", fix="give 1 or more")
    if sequence < 2:
        raise BadInput(f"sequence length {sequence}: a sample has at least 2 tokens", fix="give 2 or more")
    if spec.max_sequence and sequence > spec.max_sequence:
        raise BadInput(
            f"sequence length {sequence}: {spec.name} has {spec.max_sequence} positions",
            fix=f"give at most {spec.max_sequence}",
        )
    samples = ranks * math.ceil(TOKENS_PER_DEVICE / sequence) if samples_per_step is None else samples_per_step
    if samples < 1 or (to_run and samples % ranks):
        raise BadInput(
            f"{samples} samples a step over {ranks} ranks: each rank takes the same number, at least one",
            fix=f"give a multiple of {ranks}",
        )
    workload = Workload(sequence_length=sequence, samples_per_step=samples)
    return Workload(
        sequence_length=sequence,
        samples_per_step=samples,
        data=workload.data if data is None else data,
        tokenizer=workload.tokenizer if tokenizer is None else tokenizer,
    )
