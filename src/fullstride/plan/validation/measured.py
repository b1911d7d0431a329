"""Our own measurements as cases: plan, model and cluster stand beside them in the run directory."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.plan import Plan
from fullstride.plan.validation.rows import Case


def case_of(
    name: str, plan: Plan, spec: ModelSpec, cluster: Cluster, seconds: float, static_bytes: int = 0, peak_bytes: int = 0
) -> Case:
    """A run of our own.

    Args:
        name: what to call it.
        plan: what was run.
        spec: the model.
        cluster: the machine, as it was probed and measured.
        seconds: mean time of a step.
        static_bytes: what stayed allocated between steps; 0 where it was not read.
        peak_bytes: most that torch's allocator held; 0 where it was not read.
    """
    return Case(
        file=name,
        line=0,
        source="fullstride",
        model=spec.name,
        framework="fullstride",
        kind=cluster.device.kind,
        plan=plan,
        spec=spec,
        cluster=cluster,
        seconds=seconds,
        static_bytes=static_bytes or None,
        peak_bytes=peak_bytes or None,
    )
