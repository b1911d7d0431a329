"""Planning as a function: what the verb `plan` does, for a program."""

from __future__ import annotations

from pathlib import Path

from fullstride.cli.choose import rank_plans
from fullstride.cli.machine import choose_cluster
from fullstride.cluster.cluster import Cluster
from fullstride.files import read_json
from fullstride.plan.plan import Adapter, ModelRef, Plan, Recipe


def make_plan(
    model: str | ModelRef,
    cluster: Cluster | Path | str | None = None,
    *,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
    data: str | None = None,
    num_ranks: int | None = None,
    recipe: Recipe | None = None,
    adapter: Adapter | None = None,
) -> Plan:
    """The plan with the shortest predicted step; imports no torch, except in a process of its own for `file.py:function`.

    Args:
        model: A preset, a `config.json`, a model directory, or `file.py:function` / `package.module:function`; as a
            `ModelRef`, with the names of its parts.
        cluster: A Cluster, or the path of a cluster file; this machine's GPUs when None, else an assumed cluster.
        sequence_length: Tokens of a sample; the smaller of the model's positions and 8192 when None.
        samples_per_step: Samples of one optimizer step over all ranks; about 8,192 tokens a rank when None.
        data: A file or folder of text, JSONL or Parquet; the Python standard library's sources when None.
        num_ranks: Ranks to plan for; all of the cluster's devices when None.
        recipe: Optimizer, schedule and steps; the defaults of `Recipe` when None.
        adapter: Low-rank adapters, if only these are trained, beside frozen weights.

    Raises:
        BadInput: no such model or cluster file, or sizes that cannot be.
        DoesNotFit: no plan fits; says by how much.
    """
    if isinstance(cluster, Path | str):
        cluster = read_json(cluster, Cluster)
    elif cluster is None:
        cluster = choose_cluster(num_devices=num_ranks)
    ranking, _ = rank_plans(
        model,
        cluster,
        sequence_length=sequence_length,
        samples_per_step=samples_per_step,
        data=data,
        num_ranks=num_ranks,
        recipe=recipe,
        adapter=adapter,
    )
    return ranking.best[0]
