"""One plan against another: the one term that lost it, and a refusal that says what would fit."""

from __future__ import annotations

from msgspec.structs import replace

from fullstride.cluster.catalogue import DEVICES
from fullstride.cluster.cluster import Cluster
from fullstride.errors import DoesNotFit
from fullstride.model.spec import ModelSpec
from fullstride.plan.defaults import layout_for, weights_cast
from fullstride.plan.estimate import Candidate, Estimate
from fullstride.plan.explore import first_that_fits
from fullstride.plan.plan import Batch, Optimizer, Pipeline, Plan, Recompute
from fullstride.plan.price import price
from fullstride.plan.rules import check
from fullstride.plan.space import short, summary
from fullstride.units import format_bytes, format_seconds

LARGEST_WORLD = 4096

Priced = tuple[Plan, Estimate]


def candidate(plan: Plan, estimate: Estimate, winner: Estimate, *, change: str = "") -> Candidate:
    """A plan in short, and the one term that lost it against the winner; `change` says what sets it apart, if that is known."""
    return Candidate(
        summary=change or summary(plan),
        plan_hash=estimate.plan_hash,
        step_seconds=estimate.step_seconds,
        peak_device_bytes=estimate.peak_device_bytes,
        lost_by="" if estimate.plan_hash == winner.plan_hash else lost_by(estimate, winner),
        runs=not check(plan),
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
        same = abs(estimate.step_seconds - winner.step_seconds) <= 1e-9
        if not same:
            return f"nothing: {format_seconds(winner.step_seconds - estimate.step_seconds)} faster"
        return f"same time, {format_bytes(abs(more))} {'more' if more >= 0 else 'less'} memory"
    return f"{name}: {format_seconds(mine.get(name, 0.0))} against {format_seconds(its.get(name, 0.0))}"


def does_not_fit(
    priced: list[Priced], spec: ModelSpec, cluster: Cluster, base: Plan, ranks: int, *, considered: int = 0
) -> DoesNotFit:
    """The refusal: by how much the smallest plan is too large, and the changes that would make it fit, the cheapest first.

    `considered` says how many plans there were, where `priced` is not all of them.
    """
    plan, estimate = min(priced, key=lambda item: item[1].peak_device_bytes)
    over = estimate.peak_device_bytes - estimate.capacity_bytes
    message = (
        f"{spec.name} on {ranks} x {cluster.device.kind}: the smallest of {considered or len(priced)} plans ({summary(plan)}) "
        f"needs {format_bytes(estimate.peak_device_bytes)} a device of {format_bytes(estimate.capacity_bytes)}, "
        f"{format_bytes(over)} too much"
    )
    found = (
        _offloaded(plan, spec, cluster),
        _shorter(plan, spec, cluster),
        _more_anyhow(plan, spec, cluster, ranks) if considered else _more_devices(plan, spec, cluster, ranks),
        _larger_device(estimate, cluster),
    )
    ways = [way for way in found if way]
    return DoesNotFit(
        message, fix="would fit: " + ", or ".join(ways) if ways else "use a smaller model, or devices with more memory"
    )


def _offloaded(plan: Plan, spec: ModelSpec, cluster: Cluster) -> str:
    """The smallest share of optimizer states on the host, in quarters, at which this plan fits."""
    if cluster.device.kind == "cpu":
        return ""
    for share in (0.25, 0.5, 0.75, 1.0):
        offloaded = replace(plan, optimizer=Optimizer(cpu_share=share))
        if plan.optimizer.cpu_share < share and price(offloaded, spec, cluster).fits:
            return f"{share:.0%} of the optimizer's states in host memory (priced; this version does not run it yet)"
    return ""


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
            pipeline=Pipeline(),
            optimizer=Optimizer(),
            recompute=Recompute(mode="full"),
        )
        if price(larger, spec, cluster).fits:
            return f"{world} devices of this kind (zero 3, full recompute)"
        world *= 2
    return ""


def _more_anyhow(plan: Plan, spec: ModelSpec, cluster: Cluster, ranks: int) -> str:
    """The smallest doubling of ranks at which any layout fits, one sample a rank."""
    world = ranks * 2
    while world <= LARGEST_WORLD:
        work = replace(plan.workload, samples_per_step=world)
        if found := first_that_fits(replace(plan, workload=work), world, spec, cluster):
            return f"{world} devices of this kind ({short(found)}, recompute {found.recompute.mode.replace('_', '+')})"
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


def _larger_device(estimate: Estimate, cluster: Cluster) -> str:
    """The listed device with the least memory that would hold it."""
    if cluster.device.kind not in DEVICES:
        return ""
    enough = [d for d in DEVICES.values() if d.memory_bytes.value >= estimate.peak_device_bytes]
    if not enough:
        return ""
    device = min(enough, key=lambda d: d.memory_bytes.value)
    return f"devices of {format_bytes(device.memory_bytes.value)} ({device.kind})"
