"""`plan --why`: an answer about the choice that a user has in mind, with the arithmetic, also where it cannot be."""

from __future__ import annotations

import math
import re
import tomllib
from typing import Any

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.errors import BadInput, DoesNotFit, UsageError
from fullstride.files import FileValue, convert
from fullstride.model.spec import ModelSpec
from fullstride.plan.axes import Wishes, layers_for
from fullstride.plan.estimate import Estimate
from fullstride.plan.limits import num_stages, over
from fullstride.plan.neighbours import vary
from fullstride.plan.placement import placement
from fullstride.plan.plan import ModelRef, Plan, Recipe, Workload
from fullstride.plan.rules import Violation, check, not_run
from fullstride.plan.search import Ranking, search
from fullstride.plan.space import summary
from fullstride.plan.verdict import lost_by
from fullstride.report.document import Column, Document, Heading, Table, TableRow, Text, Tone
from fullstride.units import format_bytes, format_seconds

SHORT: dict[str, str] = {
    **{axis: f"layout.{axis}" for axis in ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "sequence_parallel")},
    "zero": "shard.stage",
    "carrier": "shard.carrier",
    "schedule": "pipeline.schedule",
    "chunks": "pipeline.chunks",
    "layers_per_stage": "pipeline.layers_per_stage",
    "micro_batch": "batch.micro_batch",
    "accumulation": "batch.accumulation",
    "recompute": "recompute.mode",
    "every": "recompute.every",
    "precision": "precision.cast",
    "fp8": "precision.fp8",
    "loss": "loss.kind",
    "compile": "compile.mode",
    "attention": "kernels.attention",
    "cpu_share": "optimizer.cpu_share",
    "nvme_share": "optimizer.nvme_share",
    "prefetch": "overlap.prefetch",
}
"""Short names of entries of the plan file."""
NUM_TERMS = 6
_WORK = ("workload", "model", "recipe", "made_for")


class Answer(FileValue, frozen=True, kw_only=True, tag="answer"):
    """What comes of a user's choice."""

    asked: str
    possible: bool
    """Whether any framework could do it."""
    broken: tuple[Violation, ...] = ()
    """Rules that it breaks as it stands."""
    fits: bool = False
    plan: Plan | None = None
    """The best plan with this choice, or with what comes closest to it."""
    estimate: Estimate | None = None
    words: tuple[str, ...] = ()
    """The answer, a sentence at a time."""


def parse_wishes(text: str) -> Wishes:
    """Entries of a plan from `tp=8,pp=4,zero=3,recompute=full`, with their values as the plan file has them.

    Raises:
        UsageError: not of the form `entry=value,entry=value`, or the work itself.
        BadInput: no such entry, or a value that it cannot hold.
    """
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"--why {item!r}: not of the form entry=value", fix="write tp=8,pp=4,zero=3")
        key = SHORT.get(name, name)
        if key.partition(".")[0] in _WORK:
            raise UsageError(f"--why {item}: this is the work, not the plan", fix="change it with --seq and --global-batch")
        given[key] = _literal(value)
    if not given:
        raise UsageError(f"--why {text!r}: says nothing", fix="write tp=8,pp=4,zero=3")
    return _typed(given, text)


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _typed(given: dict[str, Any], text: str) -> Wishes:
    """The values as a Plan holds them."""
    raw: dict[str, Any] = msgspec.to_builtins(Plan(model=ModelRef(source=""), workload=_any_work()))
    for key, value in given.items():
        part, _, entry = key.partition(".")
        if not entry or not isinstance(raw.get(part), dict) or entry not in raw[part]:
            fix = f"use {', '.join(sorted(SHORT))}, or part.entry as in the plan file"
            raise BadInput(f"--why {key}: a plan has no such entry", fix=fix)
        raw[part][entry] = value
    plan = convert(raw, Plan, f"--why {text}")
    return {key: getattr(getattr(plan, key.partition(".")[0]), key.partition(".")[2]) for key in given}


def _any_work() -> Workload:
    return Workload(sequence_length=2, samples_per_step=1)


def why(asked: str, ranking: Ranking, spec: ModelSpec, cluster: Cluster) -> Answer:
    """Whether a choice can be, what it costs, and which one term loses it against the best plan of a search.

    Raises:
        UsageError, BadInput: `asked` cannot be read.
    """
    wishes, best = parse_wishes(asked), ranking.best[0]
    plan = vary(best, wishes, spec, lay_out=False)
    broken = (*_uneven_world(best, wishes), *check(plan, spec, cluster, to_run=False))
    if not broken:
        return _priced(asked, wishes, ranking, spec, cluster, ())
    words = tuple(f"{v.message}. What to do: {v.fix}." for v in broken)
    mended = _mended(plan, broken, spec, cluster)
    if mended is None:
        return Answer(asked=asked, possible=False, broken=broken, words=words)
    changes, told = mended
    answer = _priced(asked, {**wishes, **changes}, ranking, spec, cluster, (*words, told))
    return msgspec.structs.replace(answer, possible=False, broken=broken)


def _uneven_world(best: Plan, wishes: Wishes) -> tuple[Violation, ...]:
    """Ranks that do not come out even over the degrees."""
    world, axes = best.layout.world_size, ("tp", "pp", "cp", "dp_shard", "dp_replicate")
    sizes = {axis: wishes[f"layout.{axis}"] for axis in axes if f"layout.{axis}" in wishes}
    product = math.prod(sizes.values())
    if product < 1 or world % product == 0:
        return ()
    told = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return (
        Violation(
            code="layout.world",
            message=f"{told} on {world} ranks, {over(world, product)}: the degrees multiply to the number of ranks",
            fix=f"use degrees whose product divides {world}",
        ),
    )


def _mended(plan: Plan, broken: tuple[Violation, ...], spec: ModelSpec, cluster: Cluster) -> tuple[dict[str, Any], str] | None:
    """What would make the choice possible, where that is plain: stages of uneven length, the right accumulation."""
    codes, share = {v.code for v in broken}, plan.workload.samples_per_step // plan.layout.data_parallel
    whole = plan.workload.samples_per_step % plan.layout.data_parallel == 0 and share % plan.batch.micro_batch == 0
    if codes == {"pipeline.even"}:
        layers = layers_for(spec.num_blocks, num_stages(plan))
        mean = spec.num_blocks / len(layers)
        told = (
            f"With stages of {_runs(layers)} blocks it can be done: the longest holds {max(layers)} where {mean:.4g} would be "
            f"even, {max(layers) / mean - 1:.1%} more"
        )
        return {}, told + ":"  # the search splits as evenly as it goes, and the simulator moves blocks where that is better
    if codes == {"batch.samples"} and whole:
        right = share // plan.batch.micro_batch
        return {"batch.accumulation": right}, f"With accumulation {right} it can be done:"
    return None


def _runs(layers: tuple[int, ...]) -> str:
    """A list of blocks by stage, whole where it is short: `8, 8, 7, 7`, else `7, 14 x 8, 7`."""
    runs: list[list[int]] = []
    for size in layers:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    short = len(layers) <= 8
    return ", ".join(str(n) for n in layers) if short else ", ".join(f"{c} x {n}" if c > 1 else str(n) for n, c in runs)


def _priced(asked: str, wishes: Wishes, ranking: Ranking, spec: ModelSpec, cluster: Cluster, words: tuple[str, ...]) -> Answer:
    """The best plan with the choice, against the best without."""
    best, its = ranking.best[0], ranking.estimates[0]
    try:
        found = _best_with(wishes, best, spec, cluster)
    except DoesNotFit as error:
        return Answer(asked=asked, possible=True, words=(*words, f"{error.message}. {error.fix}."))
    except BadInput as error:
        return Answer(asked=asked, possible=False, words=(*words, f"{error.message}. What to do: {error.fix}."))
    plan, estimate = found.best[0], found.estimates[0]
    told = list(words)
    ratio = estimate.step_seconds / its.step_seconds
    if plan.plan_hash == best.plan_hash:
        told.append("This is what the best plan does.")
    elif ratio < 1 - 1e-9:
        told.append(
            f"Predicted {1 - ratio:.1%} faster than the plan that the search ranks first: "
            f"{format_seconds(estimate.step_seconds)} against {format_seconds(its.step_seconds)}. The search left this choice "
            "out, or its bound did."
        )
    else:
        slower = f"{ratio - 1:.1%} slower" if ratio > 1 + 1e-9 else "As fast"
        told.append(
            f"The best plan with it takes {format_seconds(estimate.step_seconds)} a step against "
            f"{format_seconds(its.step_seconds)}: {slower}. What loses it: {lost_by(estimate, its)}."
        )
    told.append(
        f"It needs {format_bytes(estimate.peak_device_bytes)} a device, the best plan {format_bytes(its.peak_device_bytes)}, "
        f"of {format_bytes(estimate.capacity_bytes)}."
    )
    layers = plan.pipeline.layers_per_stage
    if layers and "pipeline.layers_per_stage" not in wishes and layers != layers_for(spec.num_blocks, num_stages(plan)):
        told.append(f"Its stages hold {_runs(layers)} blocks, since embedding, head and loss take time and memory too.")
    told += [f"This version prices it and does not run it: {v.message}." for v in not_run(plan, spec, cluster)[:1]]
    return Answer(asked=asked, possible=True, fits=True, plan=plan, estimate=estimate, words=tuple(told))


def _best_with(wishes: Wishes, best: Plan, spec: ModelSpec, cluster: Cluster) -> Ranking:
    """The search again, with these entries fixed."""
    model: ModelRef = best.model
    recipe: Recipe = best.recipe
    ranks = best.layout.world_size
    return search(
        spec, cluster, model, best.workload, recipe, num_ranks=ranks, to_run=False, wishes=wishes, adapter=best.adapter
    )


def why_document(answer: Answer, ranking: Ranking, spec: ModelSpec, cluster: Cluster) -> Document:
    """The answer for a person: the sentences, where the plan's axes lie, and the terms side by side."""
    tone: Tone = "good" if answer.fits and answer.possible else "warn" if answer.fits else "bad"
    blocks: list[Any] = [Text(text=words, tone=tone if index == 0 else "plain") for index, words in enumerate(answer.words)]
    if answer.plan and answer.estimate:
        blocks.append(Text(text=f"With it: {summary(answer.plan)}."))
        blocks.append(Text(text=f"The best: {summary(ranking.best[0])}."))
        blocks += [Text(text=place.words, tone="quiet") for place in placement(answer.plan, cluster)]
        if answer.estimate.plan_hash != ranking.estimates[0].plan_hash:
            blocks += [Heading(text="Term by term"), _terms(answer.estimate, ranking.estimates[0])]
    world = ranking.best[0].layout.world_size
    return Document(
        title=f"{spec.name} on {world} x {cluster.device.kind}: {answer.asked}",
        subtitle="predicted, not measured" if answer.plan else "",
        blocks=tuple(blocks),
    )


def _terms(mine: Estimate, best: Estimate) -> Table:
    """Terms that differ most."""
    one = {item.name: item.exposed_seconds for item in mine.terms}
    other = {item.name: item.exposed_seconds for item in best.terms}
    names = sorted({**other, **one}, key=lambda name: -abs(one.get(name, 0.0) - other.get(name, 0.0)))[:NUM_TERMS]
    rows = [(name, one.get(name, 0.0), other.get(name, 0.0)) for name in names]
    rows.append(("step", mine.step_seconds, best.step_seconds))
    return Table(
        title="What each adds to the step",
        columns=(
            Column(name="term"),
            Column(name="with it", align="right"),
            Column(name="best plan", align="right"),
            Column(name="difference", align="right"),
        ),
        rows=tuple(
            TableRow(cells=(name, format_seconds(a), format_seconds(b), f"{'+' if a >= b else ''}{format_seconds(a - b)}"))
            for name, a, b in rows
        ),
    )
