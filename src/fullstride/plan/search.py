"""The search: price every plan of the space, rank those that fit, say why the others lost."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput, RuleBroken
from fullstride.files import FileValue
from fullstride.model.spec import ModelSpec
from fullstride.plan.axes import CHOICES, LARGEST_MICRO_BATCH, MOST_EXPERT_RANKS, SHORTEST_SLICE, Wishes
from fullstride.plan.defaults import plain_plan
from fullstride.plan.estimate import Candidate, Estimate
from fullstride.plan.explore import OPENED, POLISHED, Exploration, Found, explore
from fullstride.plan.limits import over
from fullstride.plan.neighbours import neighbours
from fullstride.plan.placement import devices_per_node
from fullstride.plan.plan import Adapter, ModelRef, Plan, Recipe, Workload
from fullstride.plan.price import price
from fullstride.plan.rules import check, require
from fullstride.plan.space import space, work_plan
from fullstride.plan.verdict import Priced, candidate, does_not_fit

NUM_BEST = 5
NUM_CANDIDATES = 12
NUM_OTHERS = 8
"""Of a wide ranking, whose neighbours are listed beside."""


class Ranking(FileValue, frozen=True, kw_only=True, tag="ranking"):
    """What a search found."""

    best: tuple[Plan, ...]
    """The fastest that fit, fastest first; never empty."""
    estimates: tuple[Estimate, ...]
    """Theirs, in the same order."""
    candidates: tuple[Candidate, ...]
    """The winner and the runners-up, and what each lost by; one for each layout at least."""
    considered: int
    """Plans that were priced: all that the rules allow in the space, unless the search was bounded."""
    num_fitting: int
    """Of those whose memory was priced: a bounded search does not ask for it where a plan is too slow to matter."""
    space: str = ""
    """What was varied, in words, and the bound where there is one."""
    exhaustive: bool = True
    """Whether the whole space was priced."""
    runs: tuple[bool, ...] = ()
    """Which of `best` this version runs; empty where all do."""
    runnable: Plan | None = None
    """The fastest plan that this version runs; None where none fits, or where `best[0]` runs."""
    runnable_estimate: Estimate | None = None
    neighbours: tuple[Candidate, ...] = ()
    """Plans one step away from the best one, and the one term that lost each."""

    @property
    def best_runnable(self) -> Plan | None:
        """The fastest plan that this version runs, wherever it stands; None where none fits."""
        return self.best[0] if not self.runs or self.runs[0] else self.runnable


def search(
    spec: ModelSpec,
    cluster: Cluster,
    model: ModelRef,
    workload: Workload,
    recipe: Recipe,
    *,
    num_ranks: int | None = None,
    to_run: bool = True,
    wishes: Wishes | None = None,
    exhaustive: bool | None = None,
    adapter: Adapter | None = None,
) -> Ranking:
    """The fastest plans for this work on this cluster, by prediction.

    Args:
        spec: the network.
        cluster: where it runs; on uneven nodes the slowest counts.
        model: what to call it in plans.
        workload: samples of a step and their length.
        recipe: how it learns.
        num_ranks: how many devices to use; None for all.
        to_run: only what this version runs, exhaustively; else everything that any framework could do.
        wishes: entries that stay fixed, such as `{"layout.tp": 8}`; only without `to_run`.
        exhaustive: price the whole wide space, or not; None decides by its size.
        adapter: low-rank adapters, if only these are trained.

    Raises:
        BadInput: the samples of a step cannot be shared out, or the model's own rules are broken.
        DoesNotFit: no plan fits; says by how much, and what would.
    """
    base, ranks = work_plan(spec, cluster, model, workload, recipe, num_ranks, adapter)
    if not to_run:
        return _wide(base, ranks, spec, cluster, wishes or {}, exhaustive)
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


def _wide(base: Plan, ranks: int, spec: ModelSpec, cluster: Cluster, wishes: Wishes, exhaustive: bool | None) -> Ranking:
    """Everything that any framework could do."""
    _require_work(base, ranks, spec, cluster)
    explored = explore(base, ranks, spec, cluster, wishes, exhaustive=exhaustive)
    found, size, priced = explored.found, explored.size, explored.num_priced
    if not found:
        raise _nothing(base, ranks)
    offloaded = not any(item.score.fits for item in found)
    if offloaded and cluster.device.kind != "cpu":
        more = explore(base, ranks, spec, cluster, wishes, exhaustive=exhaustive, offload=True)
        found, size, priced = found + more.found, size + more.size, priced + more.num_priced
    fitting = sorted((item for item in found if item.score.fits), key=lambda item: (item.key, item.score.peak_bytes))
    if not fitting:
        smallest = min(found, key=lambda item: item.score.peak_bytes).plan
        told = [(smallest, price(smallest, spec, cluster))]
        raise does_not_fit(told, spec, cluster, base, ranks, considered=priced)
    words = _words(explored, priced, size, offloaded, cluster)
    return _wide_ranking(priced, fitting, words, explored, spec, cluster, wishes)


def _require_work(base: Plan, ranks: int, spec: ModelSpec, cluster: Cluster) -> None:
    """The rules that no layout changes: sizes, the work, the number of devices.

    Raises:
        RuleBroken: the work breaks one.
    """
    broken = check(plain_plan(base, ranks, cluster), spec, cluster, to_run=False)
    if mine := [v for v in broken if v.code.startswith(("size.", "workload.", "model.")) or v.code == "layout.devices"]:
        raise RuleBroken("; ".join(v.message for v in mine), fix="; ".join(dict.fromkeys(v.fix for v in mine)))


def _nothing(base: Plan, ranks: int) -> BadInput:
    """Why the space is empty: samples that no layout can share out."""
    samples = base.workload.samples_per_step
    return BadInput(
        f"samples_per_step = {samples} on {ranks} ranks ({over(samples, ranks)}): no layout gives each the same number",
        fix=f"give a multiple of {ranks}, or of {ranks} over the degrees of tensor and pipeline parallelism",
    )


def _wide_ranking(
    priced: int,
    fitting: list[Found],
    words: str,
    explored: Exploration,
    spec: ModelSpec,
    cluster: Cluster,
    wishes: Wishes,
) -> Ranking:
    kinds: dict[tuple[object, ...], Found] = {}
    for item in fitting:
        kinds.setdefault(_wide_name(item), item)
    distinct = list(kinds.values())
    best = _refined([(item.plan, price(item.plan, spec, cluster)) for item in distinct[:NUM_BEST]], spec, cluster, wishes)
    runs = tuple(not check(plan, spec, cluster) for plan, _ in best)
    runnable = next((item.plan for item in fitting if not check(item.plan, spec, cluster)), None)
    shown = None if runs[0] else runnable
    near = neighbours(best[0][0], best[0][1], spec, cluster, to_run=False)
    others = [(item.plan, price(item.plan, spec, cluster)) for item in distinct[NUM_BEST:NUM_OTHERS]]
    return Ranking(
        best=tuple(plan for plan, _ in best),
        estimates=tuple(estimate for _, estimate in best),
        candidates=tuple(candidate(plan, estimate, best[0][1]) for plan, estimate in best + others),
        considered=priced,
        num_fitting=len(fitting),
        space=words,
        exhaustive=explored.exhaustive,
        runs=runs,
        runnable=shown,
        runnable_estimate=price(shown, spec, cluster) if shown else None,
        neighbours=near,
    )


def _refined(best: list[Priced], spec: ModelSpec, cluster: Cluster, wishes: Wishes) -> list[Priced]:
    """The best few, their pipelines' stages chosen by the simulator, in order again."""
    if all(plan.layout.pp == 1 for plan, _ in best):
        return best
    from fullstride.plan.refine import refined  # no pipeline, no simulator to load

    return refined(best, spec, cluster, wishes)


def _wide_name(item: Found) -> tuple[object, ...]:
    plan = item.plan
    return item.degrees, plan.shard.carrier, plan.shard.stage, plan.layout.dp_replicate, plan.pipeline.schedule


def _words(explored: Exploration, priced: int, size: int, offloaded: bool, cluster: Cluster) -> str:
    """What was varied, and what bounded it."""
    varied = f"tensor, pipeline, context, expert and data-parallel degrees ({explored.num_layouts} layouts); {CHOICES}"
    if offloaded:
        varied += "; optimizer states and block inputs in host memory, since nothing fits without"
    limit = (
        f"tensor parallel up to {2 * devices_per_node(cluster)}, micro-batch up to {LARGEST_MICRO_BATCH}, expert parallel "
        f"up to {MOST_EXPERT_RANKS}, at least {SHORTEST_SLICE} tokens a context-parallel rank"
    )
    if explored.exhaustive:
        return f"{varied}. Exhaustive, within: {limit}"
    return (
        f"{varied}. Bounded: {priced} of about {size} plans priced: every layout at its start, in the {OPENED} that start "
        f"best one choice at a time until none improves, in the best {POLISHED} two at a time; within: {limit}"
    )
