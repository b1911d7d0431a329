"""Which products of a model's blocks get low-rank adapters (LoRA, Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

from fullstride.model.flops import train_flops_per_token
from fullstride.model.spec import FlopConvention, Matmul, ModelSpec, Sublayer
from fullstride.plan.plan import Adapter, Plan

_UNGATED = {"up": "gate_up"}
"""An MLP without a gate has `up` where others have `gate_up`; who names the one means both."""


def last(path: str) -> str:
    """The end of a path with dots."""
    return path.rsplit(".", 1)[-1]


def is_target(targets: tuple[str, ...], sublayer: str, product: str) -> bool:
    """Whether a product is meant, by the end of its sublayer's name (`qkv`) or of its own (`q_proj`)."""
    end = last(sublayer)
    return not {end, _UNGATED.get(end, end), last(product)}.isdisjoint(targets)


def adapted(plan: Plan, sublayer: Sublayer) -> tuple[Matmul, ...]:
    """The products of a sublayer that have an adapter; experts and routers have none."""
    if plan.adapter.rank == 0 or sublayer.kind != "linear":
        return ()
    return tuple(m for m in sublayer.matmuls if is_target(plan.adapter.targets, sublayer.name, m.name))


def step_flops_per_token(plan: Plan, spec: ModelSpec, convention: FlopConvention) -> float:
    """FLOP of one trained token: three times the forward; with adapters no product for the gradient of a frozen weight, and the
    adapter's own two.
    """
    length = plan.workload.sequence_length
    total = train_flops_per_token(spec, length, convention)
    if plan.adapter.rank == 0:
        return total
    parts = [(1, spec.embedding), *((stack.count, stack.sublayers) for stack in spec.stacks), (1, spec.tail)]
    for count, sublayers in parts:
        for sublayer in sublayers:
            total -= count * sum(2.0 * m.n * m.k * m.rows_per_token for m in sublayer.matmuls)
            total += count * sum(3 * 2.0 * plan.adapter.rank * (m.n + m.k) for m in adapted(plan, sublayer))
    return total


def unmet(targets: tuple[str, ...], products: tuple[tuple[str, str], ...]) -> str:
    """The first target that names nothing, or `""`. The default means what a model has of it, which must be something.

    Args:
        targets: as in a plan.
        products: (sublayer, product) for each linear product of the blocks.
    """
    missing = [t for t in targets if not any(is_target((t,), sublayer, product) for sublayer, product in products)]
    if len(missing) == len(targets):
        return ", ".join(map(repr, targets)) or "nothing"
    return repr(missing[0]) if missing and targets != Adapter().targets else ""


def listed(products: tuple[tuple[str, str], ...]) -> str:
    """What may be named, in words: sublayers with their products."""
    found: dict[str, dict[str, None]] = {}
    for sublayer, product in products:
        found.setdefault(last(sublayer), {})[last(product)] = None
    words = [end if list(names) == [end] else f"{end} ({', '.join(names)})" for end, names in found.items()]
    return ", ".join(words) or "no linear products"


def targets_met(plan: Plan, spec: ModelSpec | None, cluster: object) -> str:
    """A target that no block of the model has, with what there is."""
    if plan.adapter.rank == 0 or spec is None:
        return ""
    inside = [sublayer for stack in spec.stacks for sublayer in stack.sublayers]
    products = tuple((s.name, m.name) for s in inside if s.kind == "linear" for m in s.matmuls)
    missing = unmet(plan.adapter.targets, products)
    if not missing:
        return ""
    fused = any(is_target(plan.adapter.targets, s.name, m.name) for s in inside if s.kind == "experts" for m in s.matmuls)
    why = " (experts joined into one tensor have no product to adapt)" if fused else ""
    return f"adapter.targets names {missing}, and {spec.name} has {listed(products)}{why}"


def layout_met(plan: Plan) -> str:
    """Adapters on products that tensor parallelism or a pipeline cuts."""
    cut = next((axis for axis in ("tp", "pp") if getattr(plan.layout, axis) > 1), "")
    return (
        f"adapter.rank = {plan.adapter.rank} with layout.{cut} = {getattr(plan.layout, cut)}"
        if plan.adapter.rank and cut
        else ""
    )
