"""Rows of ZeRO on flat buffers (`fullstride.engine.parallel.flat`), whose sizes are those that the engine makes
(`fullstride.plan.flat`).

A unit (the embedding, a block, the head with the final norm, the rest) has one buffer of weights in the compute dtype and one
shard of masters, moments and gradients on each rank. Stages 1 and 2 keep the buffers; where the compute dtype is the master's,
the master is a place in them. Stage 3 gathers into them and frees them. Two units' gradients may be on their way at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import Parameter, Sublayer
from fullstride.plan.adapted import adapted
from fullstride.plan.estimate import MomentName, Row
from fullstride.plan.facts import BYTES, Part, master_bytes, num_resharded, once, steps_in_one_pass, weight_bytes
from fullstride.plan.flat import flat_size
from fullstride.plan.ledger.cuts import local_elements
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import ALL, LAST, STANDING, row
from fullstride.plan.ledger.states import on_device

ROOT = "root"


@dataclass(frozen=True)
class Unit:
    """Equal units of a part."""

    group: str
    """`embedding`, `blocks`, `head` or `root`."""
    count: int
    kept: int
    """How many of them stage 3 does not free."""
    elements: int
    """Of one buffer, holes and padding included; with adapters of theirs, 0 if there are none."""
    width: int
    """Bytes of an element as it is computed with."""
    frozen: int = 0
    """Elements of a second buffer, beside adapters."""

    @property
    def bytes(self) -> int:
        """Of its buffers."""
        return (self.elements + self.frozen) * self.width


def units(local: Local) -> tuple[Unit, ...]:
    """The units of this rank, in the order of execution, the root last."""
    plan, pipe, p = local.plan, local.plan.pipeline, local.plan.precision
    place = (plan.layout, pipe.schedule, pipe.chunks, pipe.layers_per_stage, local.rank)
    numbers = (p.cast, p.embedding, p.block, p.head, p.master)
    key = ("flat units", place, numbers, plan.adapter, plan.shard.stage, tuple(sorted(plan.shard.reshard.items())))
    return once(local.spec, key, lambda: _units(local))


def _units(local: Local) -> tuple[Unit, ...]:
    plan, found, rest = local.plan, [], list[int]()
    for part in local.parts:
        sizes, ends = _sizes(local, part), part.group != "blocks"
        apart = ends and local.spec.tied_embeddings
        own = [] if apart else [size for size, mine in sizes if mine]
        rest += [size for size, mine in sizes if apart or not mine]
        if (
            copied := part.parameters - part.adapters - sum(size for size, _ in sizes)
        ) > 0:  # a tied table beside a pipeline's last stage
            rest.append(copied)
        if own:
            kept = part.count - num_resharded(plan, part)
            found.append(Unit(part.group, part.count, kept, *_elements_of(local, own, part)))
    if rest:
        found.append(Unit(ROOT, 1, 0, *_elements_of(local, rest, replace(local.head, sublayers=()))))
    return tuple(found)


def _elements_of(local: Local, sizes: list[int], part: Part) -> tuple[int, int, int]:
    """Elements of a unit's buffer, bytes of each, and elements of the buffer that is frozen beside it."""
    plan, width = local.plan, weight_bytes(local.plan, part)
    low, whole = plan.adapter.rank, flat_size(sizes, local.shards)
    if not low:
        return whole, width, 0
    pairs = [size * low for s in part.sublayers for m in adapted(plan, s) for size in (m.k, m.n)]
    return flat_size(pairs, local.shards) if pairs else 0, width, whole


def _sizes(local: Local, part: Part) -> list[tuple[int, bool]]:
    """Elements of each parameter of one of a part's units, and whether it is the unit's own: positions are the root's."""
    spec, plan = local.spec, local.plan

    def own(parameter: Parameter, sublayer: Sublayer) -> bool:
        return part.group != "embedding" or (sublayer.kind == "embedding" and parameter.shape[0] == spec.vocab_size)

    pairs = [(parameter, sublayer) for sublayer in part.sublayers for parameter in sublayer.parameters]
    return [(local_elements(p, s, plan, spec.vocab_size), own(p, s)) for p, s in pairs]


def _elements(local: Local) -> int:
    return sum(unit.count * unit.elements for unit in units(local))


def weights(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Whole buffers below stage 3, and masters in shards where they are not a place in them."""
    plan, wide, rows = local.plan, master_bytes(local.plan), list[Row]()
    if plan.shard.stage < 3:
        whole = sum(unit.count * unit.bytes for unit in units(local))
        rows.append(row("weights (flat buffers)", "weights", whole, "units, padded, as computed with", ALL, exact=True))
    apart = [unit for unit in units(local) if plan.shard.stage == 3 or unit.width != wide]
    size = sum(unit.count * unit.elements for unit in apart) // local.shards * wide * on_device(local)
    if size:
        rows.append(row("weights (masters)", "master", size, f"units, padded, x {wide} B / {local.shards}", ALL, exact=True))
    frozen = sum(unit.count * unit.frozen * unit.width for unit in units(local)) // local.shards
    if frozen and plan.shard.stage == 3:
        source = f"units, padded, as computed with / {local.shards}"
        rows.append(row("frozen weights (shards)", "weights", frozen, source, ALL, exact=True))
    return tuple(rows)


def optimizer_states(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """AdamW's two moments, like the masters."""
    each = master_bytes(local.plan)
    size = _elements(local) // local.shards * 2 * each * on_device(local)
    return (row("AdamW moments", "optimizer", size, f"units, padded, x 2 x {each} B / {local.shards}", ALL, exact=True),)


def gradients(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Shards in the gradient dtype; stage 1 adds several micro-batches up whole."""
    plan, many = local.plan, local.plan.batch.accumulation > 1
    each = BYTES[plan.precision.gradient]
    throughout: tuple[MomentName, ...] = (*STANDING, *LAST)
    moments = throughout if many and plan.shard.stage > 1 else LAST
    size = _elements(local) // local.shards * each
    found = [row("gradients (shards)", "gradients", size, f"units, padded, x {each} B / {local.shards}", moments, exact=True)]
    if many and plan.shard.stage == 1:
        source = f"units, padded, x {each} B"
        found.append(row("gradients (whole)", "gradients", _elements(local) * each, source, STANDING, exact=True))
    return tuple(found)


def gathered(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Whole buffers that stand under stage 3: the root's through a pass, kept ones, the one in use and those begun ahead."""
    plan = local.plan
    if plan.shard.stage < 3:
        return ()
    made = units(local)
    root = sum(unit.bytes for unit in made if unit.group == ROOT)
    kept = sum(unit.kept * unit.bytes for unit in made)
    head = sum(unit.bytes for unit in made if unit.group == "head" and not unit.kept)
    block = max((unit.bytes for unit in made if unit.group == "blocks" and unit.kept < unit.count), default=0)
    freed = sum(unit.count - unit.kept for unit in made if unit.group == "blocks")
    flight = min(freed, 1 + plan.overlap.prefetch) * block
    first = kept + root + max(head, head and head + min(freed, plan.overlap.prefetch) * block, flight)
    return (
        row("gathered weights", "gathered", kept + root + head, "kept units, the root and the head", ("forward_end", "loss")),
        row("gathered weights in backward", "gathered", first, f"kept, root, {1 + plan.overlap.prefetch} units", ("backward",)),
        row("gathered weights of the first parts", "gathered", kept + root + block, "kept, root, one block", ("backward_end",)),
    )


def reductions(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Gradients of a unit as they come, and the buffers of two units on their way."""
    made = [unit for unit in units(local) for _ in range(min(2, unit.count))]
    wide = BYTES[local.plan.precision.reduction]
    pair = max((left.elements + right.elements for left, right in pairwise(made)), default=sum(u.elements for u in made))
    largest = max((unit.elements * unit.width for unit in made), default=0)
    moments: tuple[MomentName, ...] = ("backward", "backward_end")
    return (
        row("gradients of one unit", "communication", largest, "the largest, as computed", moments),
        row("gradients being reduced", "communication", pair * wide, f"two units x {wide} B", moments),
    )


def temporaries(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """The step goes unit by unit: gradients in the masters' dtype, and copies of a moment where the kernel is not fused."""
    plan, wide = local.plan, master_bytes(local.plan)
    largest = max((unit.elements for unit in units(local)), default=0) // local.shards * wide
    copies = {"fused": 0, "foreach": 1, "loop": 2}[plan.optimizer.implementation]
    copies += BYTES[plan.precision.gradient] != wide and not steps_in_one_pass(plan, cluster)
    return (row("one unit's step", "temporary", copies * largest, f"{copies} x its shard x {wide} B", ("optimizer",)),)
