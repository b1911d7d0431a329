"""From what a file says to a whole Plan: ranks, degrees and batch completed by arithmetic, and refused where it fails."""

from __future__ import annotations

from typing import Any, Literal

from fullstride.files import FORMAT, Value, convert
from fullstride.model.source import is_module_source, load_spec
from fullstride.model.spec import ModelSpec
from fullstride.plan.defaults import DEFAULT_SEQUENCE
from fullstride.plan.formats.imported import Imported, Kind
from fullstride.plan.formats.table import Draft, nested
from fullstride.plan.plan import Plan


class Given(Value, frozen=True, kw_only=True):
    """What the caller knows beside the file."""

    model: str | None = None
    num_ranks: int | None = None
    sequence_length: int | None = None
    samples_per_step: int | None = None
    spec: ModelSpec | None = None
    """The model behind `model`, where the caller has it already."""


class Degrees(Value, frozen=True, kw_only=True):
    """Degrees of the axes, solved."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    replicate: int = 1
    shard: int = 1

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.data * self.tp * self.pp * self.cp


def spec_given(given: Given, draft: Draft) -> ModelSpec | None:
    """The model: what the caller names, else what the file describes; None for a module's function or where none is.

    Raises:
        BadInput: no such model.
    """
    if given.spec is not None:
        return given.spec
    if given.model:
        return None if is_module_source(given.model) else load_spec(given.model)
    if draft.config or draft.shape:
        return Imported(
            kind="fullstride", where=draft.where, config=draft.config, shape=draft.shape, model_name=draft.model_name
        ).spec()
    return load_spec(draft.model_name) if draft.model_name else None


def degrees(draft: Draft, given: Given) -> Degrees | None:
    """Solve facts `ranks tp pp cp ep replicate shard` (those of the data axes None or absent where the rest decides).

    Returns:
        None where the number of ranks is not known.

    Raises:
        BadInput: degrees that do not multiply to the ranks.
    """
    tp, pp, cp, ep = (_degree(draft, name) for name in ("tp", "pp", "cp", "ep"))
    inner = tp * pp * cp
    replicate, shard = draft.facts.get("replicate"), draft.facts.get("shard")
    ranks = given.num_ranks or draft.facts.get("ranks")
    if not ranks and replicate and shard:
        ranks = replicate * shard * inner
    if not ranks and draft.facts.keys() >= {"samples", "micro", "accumulation"}:
        ranks = inner * (draft.facts["samples"] // (draft.facts["micro"] * draft.facts["accumulation"]) or 1)
    if not ranks:
        return None
    if ranks % inner and not given.num_ranks:
        draft.leave(
            "number of ranks", ranks, f"no multiple of tp {tp} x pp {pp} x cp {cp} = {inner}: it is set where the job starts"
        )
        return None
    if ranks % inner:
        raise draft.bad(
            f"{ranks} ranks cannot be cut by tp {tp} x pp {pp} x cp {cp} = {inner}: ranks are a multiple of that",
            f"give a multiple of {inner} GPUs, or lower a degree",
        )
    data = int(ranks) // inner
    sharded = draft.entries.get("shard.stage", 0) > 0
    if replicate is None and shard is None:
        replicate, shard = (1, data) if sharded else (data, 1)
    replicate = replicate if replicate is not None else data // (shard or 1)
    shard = shard if shard is not None else data // (replicate or 1)
    if replicate * shard != data:
        raise draft.bad(
            f"data-parallel degrees {replicate} x {shard} with tp {tp} x pp {pp} x cp {cp} are "
            f"{replicate * shard * inner} ranks, and there are {ranks}: they multiply to the number of ranks",
            f"give {replicate * shard * inner} GPUs, or change a degree",
        )
    return Degrees(tp=tp, pp=pp, cp=cp, ep=ep, replicate=replicate, shard=shard)


def _degree(draft: Draft, name: str) -> int:
    value: int = draft.facts.get(name) or 1
    if value < 1:
        raise draft.bad(f"{name} degree is {value}: a degree is at least 1", "use 1 for an axis that is not used")
    return value


class Cut(Value, frozen=True, kw_only=True):
    """How a step is cut."""

    micro: int
    accumulation: int
    samples: int


def cut(draft: Draft, given: Given, data: int, lone: Literal["micro", "accumulation"]) -> Cut:
    """Solve micro-batch x accumulation x data-parallel degree = samples of a step.

    Args:
        draft: Facts `micro`, `accumulation`, `samples`, each or none.
        given: May name the samples of a step.
        data: The data-parallel degree.
        lone: What the framework lets take up the samples where only they are given.

    Raises:
        BadInput: the numbers contradict each other or do not divide.
    """
    found = {name: draft.facts.get(name) for name in ("micro", "accumulation", "samples")}
    if given.samples_per_step:
        found["samples"] = given.samples_per_step
        if found["micro"]:
            found["accumulation"] = None
    for name, value in found.items():
        if value is not None and value < 1:
            raise draft.bad(f"{name} is {value}: each is at least 1", "correct that number")
    micro, accumulation, samples = found["micro"], found["accumulation"], found["samples"]
    if samples is None:
        micro, accumulation = micro or _one(draft, "micro-batch"), accumulation or 1
        return Cut(micro=micro, accumulation=accumulation, samples=micro * accumulation * data)
    if micro is None and accumulation is None:
        micro, accumulation = (None, 1) if lone == "micro" else (_one(draft, "micro-batch"), None)
    known = (micro or 1) * (accumulation or 1) * data
    rest, over = divmod(samples, known)
    whole = micro is not None and accumulation is not None
    if over or not rest or (whole and rest != 1):
        words = " x ".join(
            [f"micro-batch {micro}"] * bool(micro)
            + [f"accumulation {accumulation}"] * bool(accumulation)
            + [f"{data} data ranks"]
        )
        raise draft.bad(
            f"{samples} samples a step with {words} = {known}: "
            "micro-batch x accumulation x data ranks equals the samples of a step",
            f"give {known if whole or samples < known else samples - over} samples a step, "
            "or change the number of GPUs, the micro-batch or the accumulation",
        )
    return Cut(micro=micro or rest, accumulation=accumulation or rest, samples=samples)


def _one(draft: Draft, what: str) -> int:
    draft.assumed.append(f"{what} 1, the file does not say")
    return 1


def sequence(draft: Draft, given: Given, spec: ModelSpec | None) -> int:
    """Tokens of a sample: the caller's, the file's, else the smaller of the model's positions and 8192, said aloud."""
    said = given.sequence_length or draft.facts.get("sequence")
    if said:
        return int(said)
    longest = spec.max_sequence if spec and spec.max_sequence else DEFAULT_SEQUENCE
    length = min(longest, DEFAULT_SEQUENCE)
    draft.assumed.append(f"sequence length {length}, the file does not say (--seq gives another)")
    return length


def model_source(draft: Draft, given: Given) -> str:
    """What stands as `model.source`: the caller's model, a preset, else the file that describes the model."""
    described = draft.config or draft.shape
    return given.model or (draft.where if described else draft.model_name)


ESSENTIAL = frozenset(("tp", "pp", "cp", "ep", "micro", "samples", "accumulation", "sequence", "layers", "hidden", "heads"))
"""Facts without which there is no plan; where the file gives one as a variable that it does not set, it is missing."""
_NEED_MODEL = "which model: the model with --model (a preset, a config.json or a model directory)"
_NEED_RANKS = "how many GPUs: their number with --gpus"


def finish(
    kind: Kind,
    draft: Draft,
    given: Given,
    parts: dict[str, Any] | None,
    spec: ModelSpec | None,
) -> Imported:
    """The Imported value: with a Plan where model and sizes are known.

    Args:
        kind: Of the file.
        draft: What was read; its entries go into the plan.
        given: What the caller knows.
        parts: Entries that depend on the number of ranks; None where that is not known.
        spec: The model, where it is known.

    Raises:
        BadInput: an entry has a value that no plan can hold.
    """
    source = model_source(draft, given)
    unset = sorted({word for name, word in draft.unset.items() if name in ESSENTIAL})
    missing = tuple(
        [_NEED_MODEL] * (not source)
        + [_NEED_RANKS] * (parts is None)
        + [f"what {word} is: a line {word.strip('${}')}=... at the top of the file" for word in unset]
    )
    plan = None
    if parts is not None:
        draft.leave_unasked()
    if not missing and parts is not None:
        digest = spec.digest if spec else ""
        flat = {"model.source": source, "model.digest": digest, **draft.entries, **parts}
        plan = convert({"kind": "plan", "format": FORMAT, **nested(flat)}, Plan, draft.where)
    return Imported(
        kind=kind,
        where=draft.where,
        plan=plan,
        entries=dict(draft.entries),
        config={} if given.model else dict(draft.config),
        shape={} if given.model else dict(draft.shape),
        config_notes=() if given.model else tuple(draft.config_notes),
        model_name=draft.model_name,
        not_carried=tuple(draft.left),
        assumed=tuple(draft.assumed) if plan else (),
        missing=missing,
    )


def layout_parts(found: Degrees) -> dict[str, Any]:
    """The layout's entries of solved degrees."""
    return {
        "layout.tp": found.tp,
        "layout.pp": found.pp,
        "layout.cp": found.cp,
        "layout.ep": found.ep,
        "layout.dp_replicate": found.replicate,
        "layout.dp_shard": found.shard,
    }


def batch_parts(found: Cut, length: int) -> dict[str, Any]:
    """The entries of batch and workload of a solved step."""
    return {
        "batch.micro_batch": found.micro,
        "batch.accumulation": found.accumulation,
        "workload.samples_per_step": found.samples,
        "workload.sequence_length": length,
    }
