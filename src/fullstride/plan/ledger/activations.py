"""Rows for what forward leaves for backward, sublayer by sublayer.

Counted tensor by tensor from the ModelSpec, not from a formula of the hidden size (Korthikanti et al., arXiv 2205.05198,
gives the method; its 34sbh is for a GELU model with dropout).
"""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.plan.adapted import adapted
from fullstride.plan.estimate import MomentName, Row, RowKind
from fullstride.plan.facts import OTHER_CARRIERS, Part, compute_bytes, once, residual_bytes
from fullstride.plan.ledger.local import Local
from fullstride.plan.ledger.row import STANDING, row


def num_again(local: Local, part: Part) -> int:
    """How many of a part's blocks are made again in backward, on this rank."""
    again = local.plan.recompute
    if again.mode == "none" or part.group != "blocks":
        return 0
    count = part.count // again.every
    if not again.blocks:
        return count
    before = 0
    for other in local.blocks:
        if other is part:
            return max(0, min(count, again.blocks - before))
        before += other.count
    return 0


def activations(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """One row a sublayer, over all blocks that keep it; blocks made again keep their input, or their products too."""
    return once(local.spec, ("activations", local.rank, _shape(local)), lambda: _activations(local))


def _shape(local: Local) -> tuple[object, ...]:
    """All of a plan that activations depend on."""
    plan = local.plan
    p, again, pipe = plan.precision, plan.recompute, plan.pipeline
    size = (plan.batch.micro_batch, plan.workload.sequence_length, plan.layout, plan.shard.carrier, plan.kernels.attention)
    many = (pipe, plan.batch.accumulation if plan.layout.pp > 1 else 1, plan.adapter, p.fp8, plan.loss.kind)
    return (*size, p.cast, p.block, p.master, plan.compile.mode, again.mode, again.every, again.blocks, again.products, *many)


def _activations(local: Local) -> tuple[Row, ...]:
    plan, sizes, moments = local.plan, dict[str, float](), dict[str, tuple[MomentName, ...]]()
    for part in local.parts:
        again = num_again(local, part)
        products = local.kept_products(part) if again and plan.recompute.mode == "norm_activation" else []
        for index, sublayer in enumerate(part.sublayers):
            if sublayer.kind == "loss":  # see `logits`
                continue
            whole = local.kept(sublayer)
            size = (part.count - again) * whole
            if plan.adapter.rank and _before_adapters(local, part, index) and (not again or plan.recompute.every > 1):
                size -= whole  # in the first block, which is not made again
            if products:
                size += again * products[index]
            if again and plan.recompute.mode == "attention":
                size += again * (whole - local.core(sublayer))
            name = sublayer.name if part.group == "blocks" else f"{part.group}: {sublayer.name}"
            sizes[name] = sizes.get(name, 0.0) + size * part.alive
            if sublayer.kind == "head" and plan.loss.kind == "chunked":  # its gradient takes its place: see `logits`
                moments[name] = ("forward_end",)
    source = "tensors saved for backward, " + {"off": "eager", "block": "compiled"}[plan.compile.mode]
    made = ((name, size, moments.get(name, STANDING)) for name, size in sizes.items() if size)
    return tuple(row(name, "activations", size, source, there) for name, size, there in made)


def _before_adapters(local: Local, part: Part, index: int) -> bool:
    """Whether all up to this sublayer of a part's first block is frozen, so that its backward is never asked for."""
    first = local.plan.layout.pp == 1 and part is local.blocks[0] if part.group == "blocks" else False
    return first and not any(adapted(local.plan, sublayer) for sublayer in part.sublayers[: index + 1])


def block_inputs(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Inputs of blocks that are made again, and where they wait."""
    plan = local.plan
    if plan.recompute.mode == "attention":  # q, k and v stay: see `activations`
        return ()
    again = sum(num_again(local, part) * part.alive for part in local.parts)
    if not again:
        return ()
    width = residual_bytes(plan)
    each = local.stream_tokens * local.spec.hidden_size * width
    source = f"{again:g} blocks x tokens x hidden x {width} B"
    if plan.recompute.offload == "none":
        return (row("block inputs", "activations", again * each, source, STANDING),)
    there: RowKind = "host" if plan.recompute.offload == "cpu" else "disk"
    return (
        row("block inputs on their way", "activations", min(2, again) * each, "one leaves while one is made", STANDING),
        row("block inputs (offloaded)", there, again * each, source, STANDING),
    )


def recomputed(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """The one block whose activations stand again while its backward runs."""
    sizes = [_made_again(local, part) for part in local.parts if num_again(local, part)]
    if not sizes:
        return ()
    source = "all that it saves, less what was kept"
    return (row("one block made again", "recompute", max(sizes), source, ("backward", "backward_end")),)


def _made_again(local: Local, part: Part) -> float:
    mode = local.plan.recompute.mode
    if mode == "attention":
        return sum(local.core(s) for s in part.sublayers)
    whole = sum(local.kept(s) for s in part.sublayers)
    kept = sum(local.kept_products(part)) if mode == "norm_activation" else 0.0
    return max(0.0, whole - kept)


def block_gradients(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Gradients of activations in the block whose backward runs: its widest product's (what they replace is
    let go as they are made), and the stream's.
    """
    plan = local.plan
    products = [m.n * m.rows_per_token for part in local.blocks for s in part.sublayers for m in s.matmuls]
    widest = max((_width(local, elements) for elements in products), default=0)
    size = local.micro_tokens * widest * compute_bytes(plan)
    size += local.stream_tokens * 2 * local.spec.hidden_size * residual_bytes(plan)
    source = "widest product + 2 x residual stream"
    return (row("gradients of one block's activations", "temporary", size, source, ("backward", "backward_end")),)


def border_parts(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """Parts of a product, or of a gathered gradient, that stand beside what is put together from them (`overlap.tensor`)."""
    plan = local.plan
    if not plan.overlap.tensor or plan.layout.tp == 1 or plan.shard.carrier in OTHER_CARRIERS:
        return ()
    products = [
        m.n * m.rows_per_token for part in local.blocks for s in part.sublayers if s.kind == "linear" for m in s.matmuls
    ]
    widest = max([local.spec.hidden_size, *(elements / plan.layout.tp for elements in products)])
    size = local.micro_tokens * widest * compute_bytes(plan)
    return (row("parts of one product", "temporary", size, "widest product / tp, or hidden", ("backward", "backward_end")),)


def _width(local: Local, elements: float) -> float:
    """Elements of a product's output on this rank: the widest ones are column-parallel."""
    return elements / local.plan.layout.tp if elements > local.spec.hidden_size else elements


def pipeline_buffers(local: Local, cluster: Cluster) -> tuple[Row, ...]:
    """What a stage receives ahead: a micro-batch's stream from before it, and its gradient from behind."""
    if local.plan.layout.pp == 1:
        return ()
    size = 2 * local.stream_tokens * local.spec.hidden_size * compute_bytes(local.plan)
    moments: tuple[MomentName, ...] = (*STANDING, "backward_end")
    return (row("received from other stages", "communication", size, "2 x tokens x hidden", moments),)
