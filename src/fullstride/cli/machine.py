"""From what stands on a command line to a Cluster: a file, this machine, or an assumed one that says so."""

from __future__ import annotations

from fullstride.cluster.catalogue import DEVICES, assumed_cluster
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.probe import probe_cluster, probe_gpus
from fullstride.errors import BadInput, UsageError
from fullstride.files import read_json
from fullstride.plan.plan import Plan

DEFAULT_DEVICE = "h100-sxm"
PER_NODE = 8


def choose_cluster(
    file: str | None = None, kind: str | None = None, num_devices: int | None = None, per_node: int | None = None
) -> Cluster:
    """The cluster to plan for: a file's; else this machine's GPUs; else an assumed one, marked as assumed.

    Args:
        file: A cluster file, as `fullstride probe -o` writes.
        kind: A kind of the catalogue, or `cpu` for this host's processors as ranks.
        num_devices: Ranks to plan for; all that there are when None (8 where the cluster is assumed).
        per_node: Devices in a node of an assumed cluster.

    Raises:
        UsageError: a file and a description at once.
        BadInput: an unknown kind, a damaged file, or nodes that do not come out even.
    """
    if file is not None:
        if kind is not None or per_node is not None:
            raise UsageError("--cluster and --gpu or --gpus-per-node both say what the machine is", fix="give one of them")
        return read_json(file, Cluster)
    if kind == "cpu":
        return probe_cluster(num_ranks=num_devices)
    if kind is None and per_node is None:
        here = probe_gpus()
        if here is not None:
            if num_devices is None or num_devices <= here.num_devices:
                return here
            kind = here.device.kind if here.device.kind in DEVICES else None
    return _assume(kind or DEFAULT_DEVICE, num_devices or PER_NODE, per_node)


def _assume(kind: str, num_devices: int, per_node: int | None) -> Cluster:
    if kind not in DEVICES:
        raise BadInput(f"--gpu {kind}: not in the catalogue", fix=f"use one of {', '.join(sorted(DEVICES))}, or cpu")
    per_node = per_node or min(PER_NODE, num_devices)
    if num_devices % per_node and num_devices > per_node:
        raise BadInput(f"{num_devices} GPUs cannot stand in nodes of {per_node}", fix=f"make --gpus a multiple of {per_node}")
    return assumed_cluster(kind, num_devices=num_devices, per_node=min(per_node, num_devices))


def cluster_for(plan: Plan, file: str | None = None) -> Cluster:
    """The cluster to price a plan on: a file's; this machine where it is of the kind the plan was made for; else assumed."""
    ranks, made_for = plan.layout.world_size, plan.made_for.device
    if file is not None:
        return read_json(file, Cluster)
    here = probe_cluster(num_ranks=ranks)
    if made_for in ("", here.device.kind) and here.num_devices >= ranks and (made_for or here.device.kind != "cpu"):
        return here
    return choose_cluster(None, made_for if made_for in DEVICES else DEFAULT_DEVICE, ranks)


def cluster_words(cluster: Cluster) -> str:
    """One line: what the plan is made for, and whether anybody looked at it."""
    device = cluster.device
    line = f"{cluster.num_devices} x {device.name} ({device.kind})"
    return f"assumed cluster, nobody probed it: {line}" if cluster.assumed else line
