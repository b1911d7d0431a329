"""Terms of the host: launching operators, what is offloaded to it, and preparing data."""

from __future__ import annotations

import math

from fullstride.cluster import rates
from fullstride.cluster.catalogue import PCIE_BYTES
from fullstride.cluster.cluster import DEFAULT_COEFFICIENTS, Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.compute import optimizer, stepped_parameters, term
from fullstride.plan.cost.lanes import busiest, micro_seconds, operators, paced, part_host_seconds, part_seconds
from fullstride.plan.cost.pieces import local_tokens
from fullstride.plan.estimate import Term
from fullstride.plan.facts import BYTES, num_tensors
from fullstride.plan.plan import Plan

STEP_SECONDS = DEFAULT_COEFFICIENTS.step_seconds
"""Python of one step: batch, schedule, events; assumed."""
NVME_BYTES = 3e9
"""Bytes per second of one rank's share of a disk that was not measured; assumed."""
HOST_ADAM_BYTES = 20e9
"""Bytes per second at which one rank's processors step AdamW (DeepSpeed's CPUAdam); assumed where nothing was measured."""
TOKEN_SECONDS = {"bytes": 3e-8}
TOKENIZER_SECONDS = 1e-6
"""Preparing one token of a sample: bytes, or a Hugging Face tokenizer; assumed."""


def launches(plan: Plan, spec: ModelSpec, cluster: Cluster, device_seconds: float) -> Term:
    """Host time to launch a step. On a GPU only what it holds the device up shows (`lanes.paced`), and a step's own.

    `device_seconds` is the work of the busiest rank without waiting and without what stands after the last micro-batch: what
    of it is not in the parts themselves (communication) gives the host time, spread over them.
    """
    launch = rates.launch_seconds(cluster)
    held, step, micro = busiest(plan, spec, cluster), cluster.reached.step_seconds, plan.batch.accumulation
    times = [(part_seconds(plan, spec, cluster, h), part_host_seconds(plan, cluster, h)) for h in held]
    seconds = sum(host for _, host in times) * micro + step
    inside = sum(device for device, _ in times) * micro
    more = max(1.0, device_seconds / inside) if inside else 1.0
    shown = step + micro * sum(paced(device * more, host, cluster) - device * more for device, host in times)
    if plan.optimizer.implementation == "loop":
        tensors, update = 14 * num_tensors(spec) * launch.seconds, optimizer(plan, spec, cluster).seconds
        seconds, shown = seconds + tensors, shown + paced(update, tensors, cluster) - update
    count = sum(operators(plan, h) for h in held) * micro
    return term("host launches", "host", seconds, f"{count:.0f} operators, {launch.source}", launch.confidence, shown)


def offload(plan: Plan, spec: ModelSpec, cluster: Cluster) -> Term:
    """Optimizer states on the host or on disk (ZeRO-Offload, arXiv 2101.06840), kept inputs of blocks on the host.

    Gradients go down and weights come up, the processors step their share, disk states are read and written; activations
    travel beside computation and show where the link is slower.
    """
    away, disk = min(1.0, plan.optimizer.cpu_share + plan.optimizer.nvme_share), plan.optimizer.nvme_share
    keeps = plan.recompute.offload != "none" and plan.recompute.mode != "none"
    if not away and not keeps:
        return term("offload", "host", 0.0, "nothing is offloaded", "modelled")
    figure = cluster.host.host_to_device
    link = figure.value if figure else PCIE_BYTES[4] * 0.8
    narrow, wide = BYTES[plan.precision.block], BYTES[plan.precision.gradient]
    count = stepped_parameters(plan, spec, cluster)
    speed = cluster.host.memory_bandwidth
    rate = speed.value / max(1, cluster.groups[0].num_devices) if speed else HOST_ADAM_BYTES
    seconds = count * away * ((narrow + wide) / link + 28.0 / rate)
    write = cluster.host.disk_write
    seconds += count * disk * 24.0 / (write.value / max(1, cluster.groups[0].num_devices) if write else NVME_BYTES)
    exposed = seconds
    if keeps:
        held = busiest(plan, spec, cluster)
        blocks = sum(h.recomputed for h in held)
        size = local_tokens(plan) * spec.hidden_size * narrow / (plan.layout.tp if plan.layout.sequence_parallel else 1)
        travel = 2 * blocks * size / (link if plan.recompute.offload == "cpu" else NVME_BYTES) * plan.batch.accumulation
        cover = micro_seconds(plan, spec, cluster, held) * plan.batch.accumulation * cluster.reached.hidden_share
        seconds, exposed = seconds + travel, exposed + max(0.0, travel - cover)
    return term("offload", "host", seconds, f"link {link / 1e9:.0f} GB/s, AdamW on the host", "assumed", exposed)


def stragglers(plan: Plan, cluster: Cluster, seconds: float) -> Term:
    """Nodes are not equally quick, and a step ends with the slowest: the more nodes, the slower it is."""
    nodes = -(-plan.layout.world_size // cluster.groups[0].num_devices)
    lost = seconds * cluster.reached.straggle * math.log2(nodes) if nodes > 1 else 0.0
    source = f"{cluster.reached.straggle:.1%} for each doubling of {nodes} nodes, {cluster.reached.source}"
    return term("the slowest node", "bubble", lost, source, "modelled")


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
