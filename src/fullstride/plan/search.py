"""The search: price every plan of the space, rank those that fit, say why the others lost."""

from __future__ import annotations

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput, DoesNotFit
from fullstride.files import FileValue
from fullstride.model.spec import ModelSpec
from fullstride.plan.defaults import layout_for, plain_plan, weights_cast
from fullstride.plan.estimate import Candidate, Estimate
from fullstride.plan.plan import Batch, ModelRef, Plan, Recipe, Recompute, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import require
from fullstride.plan.space import space, summary, work_plan
from fullstride.units import format_bytes, format_seconds

NUM_BEST = 5
NUM_CANDIDATES = 12
LARGEST_WORLD = 4096

Priced = tuple[Plan, Estimate]


class Ranking(FileValue, frozen=True, kw_only=True, tag="ranking"):
    """What a search found."""

    best: tuple[Plan, ...]
    """The fastest that fit, fastest first; never empty."""
    estimates: tuple[Estimate, ...]
    """Theirs, in the same order."""
    candidates: tuple[Candidate, ...]
    """The winner and the runners-up, and what each lost by; one for each layout at least."""
    considered: int
    """Plans that were priced: all that the rules allow in the space."""
    num_fitting: int
    space: str = ""
    """What was varied, in words."""


def search(
    spec: ModelSpec, cluster: Cluster, model: ModelRef, workload: Workload, recipe: Recipe, *, num_ranks: int | None = None
) -> Ranking:
    """The fastest plans for this work on this cluster, by prediction; exhaustive over `space`.

    Raises:
        BadInput: the samples of a step cannot be shared out, or the model's own rules are broken.
        DoesNotFit: no plan fits; says by how much, and what would.
    """
    base, ranks = work_plan(spec, cluster, model, workload, recipe, num_ranks)
    priced = _priced(base, ranks, spec, cluster)
    fitting = sorted(
        (item for item in priced if item[1].fits), key=lambda item: (item[1].step_seconds, item[1].peak_device_bytes)
    )
    if not fitting:
        raise does_not_fit(priced, spec, cluster, base, ranks)
    best = fitting[:NUM_BEST]
    return Ranking(
        best=tuple(plan for plan, _ in best),
        estimates=tuple(estimate for _, estimate in best),
        candidates=_candidates(fitting, priced),
        considered=len(priced),
        num_fitting=len(fitting),
        space="carrier and ZeRO stage, reshard rule, micro-batch (powers of two), recompute, compilation, precision, loss",
    )


def _priced(base: Plan, ranks: int, spec: ModelSpec, cluster: Cluster) -> list[Priced]:
    if base.workload.samples_per_step % ranks:
        raise BadInput(
            f"samples_per_step = {base.workload.samples_per_step} over {ranks} ranks: each takes the same number",
            fix=f"give a multiple of {ranks}",
        )
    found = [(plan, price(plan, spec, cluster)) for plan in space(base, ranks, spec, cluster)]
    if not found:  # the work itself breaks a rule: say which, on the plainest layout
        require(plain_plan(base, ranks, cluster), spec, cluster)
        raise AssertionError("the rules allow the plain plan, and the space does not hold it")
    return found


def _candidates(fitting: list[Priced], priced: list[Priced]) -> tuple[Candidate, ...]:
    """The fastest plans, then the best of every layout that is not among them, fitting or not."""
    winner = fitting[0]
    chosen = fitting[: NUM_CANDIDATES // 2]
    seen = {_layout_name(plan) for plan, _ in chosen}
    order = fitting[len(chosen) :] + sorted((p for p in priced if not p[1].fits), key=lambda item: item[1].peak_device_bytes)
    for item in order:
        if (name := _layout_name(item[0])) not in seen:
            seen.add(name)
            chosen.append(item)
    return tuple(candidate(plan, estimate, winner[1]) for plan, estimate in chosen[:NUM_CANDIDATES])


def _layout_name(plan: Plan) -> tuple[object, ...]:
    return plan.shard.carrier, plan.shard.stage, plan.layout.dp_replicate, tuple(plan.shard.reshard)


def candidate(plan: Plan, estimate: Estimate, winner: Estimate) -> Candidate:
    """A plan in short, and the one term that lost it against the winner."""
    return Candidate(
        summary=summary(plan),
        plan_hash=estimate.plan_hash,
        step_seconds=estimate.step_seconds,
        peak_device_bytes=estimate.peak_device_bytes,
        lost_by="" if estimate.plan_hash == winner.plan_hash else lost_by(estimate, winner),
    )


def lost_by(estimate: Estimate, winner: Estimate) -> str:
    """Why a plan is not the winner: it does not fit, or the term whose time grew most, or, at equal time, memory."""
    if not estimate.fits:
        over = estimate.peak_device_bytes - estimate.capacity_bytes
        return f"does not fit: {format_bytes(estimate.peak_device_bytes)} needed, {format_bytes(over)} too much"
    mine = {item.name: item.exposed_seconds for item in estimate.terms}
    its = {item.name: item.exposed_seconds for item in winner.terms}
    name = max({**its, **mine}, key=lambda key: mine.get(key, 0.0) - its.get(key, 0.0))
    if estimate.step_seconds - winner.step_seconds <= 1e-9:
        more = estimate.peak_device_bytes - winner.peak_device_bytes
        return f"same time, {format_bytes(more)} more memory"
    return f"{name}: {format_seconds(mine.get(name, 0.0))} against {format_seconds(its.get(name, 0.0))}"


def does_not_fit(priced: list[Priced], spec: ModelSpec, cluster: Cluster, base: Plan, ranks: int) -> DoesNotFit:
    """The refusal: by how much the smallest plan is too large, and the cheapest change that would fit."""
    plan, estimate = min(priced, key=lambda item: item[1].peak_device_bytes)
    over = estimate.peak_device_bytes - estimate.capacity_bytes
    message = (
        f"{spec.name} on {ranks} x {cluster.device.kind}: the smallest of {len(priced)} plans ({summary(plan)}) needs "
        f"{format_bytes(estimate.peak_device_bytes)} a device of {format_bytes(estimate.capacity_bytes)}, "
        f"{format_bytes(over)} too much"
    )
    ways = [way for way in (_more_devices(plan, spec, cluster, ranks), _shorter(plan, spec, cluster)) if way]
    return DoesNotFit(
        message, fix="would fit: " + ", or ".join(ways) if ways else "use a smaller model, or devices with more memory"
    )


def _more_devices(plan: Plan, spec: ModelSpec, cluster: Cluster, ranks: int) -> str:
    """The smallest doubling of ranks at which ZeRO-3 with full recompute fits, one sample a rank."""
    world = ranks * 2
    precision = weights_cast(1, "fsdp2") if plan.precision.cast != "none" else plan.precision
    while world <= LARGEST_WORLD:
        layout, shard = layout_for(3, world)
        work = replace(plan.workload, samples_per_step=world)
        larger = replace(
            plan,
            layout=layout,
            shard=shard,
            workload=work,
            precision=precision,
            batch=Batch(),
            recompute=Recompute(mode="full"),
        )
        if price(larger, spec, cluster).fits:
            return f"{world} devices of this kind (zero 3, full recompute)"
        world *= 2
    return ""


def _shorter(plan: Plan, spec: ModelSpec, cluster: Cluster) -> str:
    """The longest halving of the sequence at which this plan fits."""
    length = plan.workload.sequence_length // 2
    while length >= 128:
        if price(replace(plan, workload=replace(plan.workload, sequence_length=length)), spec, cluster).fits:
            return f"samples of {length} tokens"
        length //= 2
    return ""
