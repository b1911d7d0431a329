"""From what stands on a command line to a model's spec and a plan."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fullstride.cli.machine import cluster_words
from fullstride.cli.output import Output
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.probe import probe_cluster
from fullstride.errors import BadInput, UsageError
from fullstride.files import convert
from fullstride.launch.inspector import spec_of
from fullstride.model.spec import ModelSpec
from fullstride.plan.calibration import calibrated
from fullstride.plan.defaults import default_workload
from fullstride.plan.plan import Adapter, ModelRef, Plan, Recipe
from fullstride.plan.rules import inert, require
from fullstride.plan.search import Ranking, search


def choose_model(model: str | ModelRef) -> tuple[ModelRef, ModelSpec]:
    """A model's reference with its digest, and its spec.

    Raises:
        BadInput: no such preset, path or function, or a config that cannot be used.
    """
    named = ModelRef(source=model) if isinstance(model, str) else model
    spec = spec_of(named)
    return replace(named, digest=spec.digest), spec


def own_tokenizer(source: str) -> str | None:
    """A model directory with a `tokenizer.json`, whose numbers are the ones its weights know; None for other sources."""
    return source if (Path(source) / "tokenizer.json").is_file() else None


def rank_plans(
    source: str | ModelRef,
    cluster: Cluster,
    *,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
    data: str | None = None,
    num_ranks: int | None = None,
    recipe: Recipe | None = None,
    adapter: Adapter | None = None,
) -> tuple[Ranking, ModelSpec]:
    """Plans for a model on a cluster, the one with the shortest predicted step first; what is None takes its default.

    Raises:
        BadInput: no such model, or sizes that cannot be.
        DoesNotFit: no plan fits; says by how much.
    """
    model, spec = choose_model(source)
    workload = default_workload(
        spec,
        cluster,
        sequence_length=sequence_length,
        samples_per_step=samples_per_step,
        data=data,
        tokenizer=own_tokenizer(model.source),
        num_ranks=num_ranks,
    )
    reached = calibrated(cluster, "fsdp2")
    return search(spec, reached, model, workload, recipe or Recipe(), num_ranks=num_ranks, adapter=adapter), spec


def plan_here(source: str | ModelRef, num_ranks: int | None, out: Output, adapter: Adapter | None = None) -> Plan:
    """The best predicted plan for a model on this machine, for a verb that needs a plan and was given a model."""
    cluster = probe_cluster(num_ranks=num_ranks)
    ranking, _ = rank_plans(source, cluster, num_ranks=num_ranks, adapter=adapter)
    plan = ranking.best[0]
    out.note(f"planned {plan.model.source} for {cluster_words(cluster)}: the best of {ranking.considered} plans")
    return plan


def checked(plan: Plan, spec: ModelSpec, cluster: Cluster | None, out: Output) -> None:
    """Refuse a plan that cannot run; warn of settings that have no effect.

    Raises:
        BadInput: the plan was made for another network.
        RuleBroken: a rule forbids it, for this model or on this cluster, or its schedule file cannot be run.
    """
    if plan.model.digest and spec.digest != plan.model.digest:
        raise BadInput(
            f"{plan.model.source}: is another network than the plan was made for",
            fix="plan again for this model, or empty model.digest in the plan to use it all the same",
        )
    require(plan, spec, cluster)
    if plan.pipeline.schedule_file:
        from fullstride.plan.pipeline import plan_schedule  # seldom asked, and the commands start faster without

        plan_schedule(plan)
    for line in inert(plan):
        out.warn(line)


def is_plan_file(text: str) -> bool:
    """Whether an argument names a plan file, as against a model."""
    return text.endswith(".toml")


def override(plan: Plan, settings: list[str], where: str = "--set") -> Plan:
    """A plan with some entries replaced, each written `table.entry=value`; the value as in TOML, else taken as text.

    Raises:
        BadInput: no such entry, or a value that it cannot hold.
        UsageError: not of the form `table.entry=value`.
    """
    raw: dict[str, Any] = msgspec.to_builtins(plan)
    for setting in settings:
        path, equals, value = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise UsageError(f"{where} {setting!r}: not of the form table.entry=value", fix="write recipe.learning_rate=1e-4")
        table = raw
        for key in keys[:-1]:
            if not isinstance(table.get(key), dict):
                raise BadInput(f"{where} {setting}: a plan has no table {key!r}", fix="see docs/plan-file.md for the entries")
            table = table[key]
        table[keys[-1]] = _literal(value.strip())
    return convert(raw, Plan, f"{where} {' '.join(settings)}") if settings else plan


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
