"""Rows for host memory and disk: optimizer states that are not on the device (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity,
arXiv 2104.07857), and the pinned buffers that they pass through.
"""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import Row
from fullstride.plan.facts import BYTES, master_bytes
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import ALL, row
from fullstride.plan.ledger.states import mastered_share

RINGS = 2
"""Buffers between disk and device: one fills while one drains."""


def optimizer_tiers(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Masters, moments and gradients of the parts that are stepped on the host."""
    optimizer = local.plan.optimizer
    away = optimizer.cpu_share + optimizer.nvme_share
    if not away:
        return ()
    each = master_bytes(local.plan) + 2 * BYTES[local.plan.precision.optimizer_state]
    states = mastered_share(local) * each
    gradient = BYTES[local.plan.precision.gradient]
    passing = local.over_shards(local.trainable * gradient, local.experts * gradient) * away
    found = [row("gradients on their way to the host", "host", passing, f"share x P x {gradient} B, pinned", ALL)]
    if optimizer.cpu_share:
        source = f"{optimizer.cpu_share:g} x P x {each} B / {local.shards}, pinned"
        found.append(row("masters and moments (host)", "host", states * optimizer.cpu_share, source, ALL, exact=True))
    if optimizer.nvme_share:
        source = f"{optimizer.nvme_share:g} x P x {each} B / {local.shards}"
        found.append(row("masters and moments (disk)", "disk", states * optimizer.nvme_share, source, ALL, exact=True))
        largest = max((part.trainable for part in local.parts), default=0) * each / local.shards
        found.append(row("ring buffers", "host", RINGS * largest, f"{RINGS} x the largest part, pinned", ALL))
    return tuple(found)
