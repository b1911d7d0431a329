"""Any configuration file as a plan: what kind it is, told from its content; and a plan as any kind of file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from fullstride.errors import BadInput
from fullstride.files import read_bytes
from fullstride.model.source import is_module_source, load_spec
from fullstride.model.spec import ModelSpec
from fullstride.plan.formats import accelerate, deepspeed, deepspeed_write, megatron, torchtitan
from fullstride.plan.formats.complete import Given
from fullstride.plan.formats.imported import NAMES, Imported, Kind, NotCarried, Written
from fullstride.plan.formats.megatron_options import OPTIONS
from fullstride.plan.formats.table import shown
from fullstride.plan.formats.yaml_text import load_yaml
from fullstride.plan.plan import Plan
from fullstride.plan.toml import parse_plan, plan_text

Reader = Callable[[str, str, Given], Imported]


class Writer(Protocol):
    """How a plan becomes a kind of file."""

    def __call__(self, plan: Plan, spec: ModelSpec | None) -> str:
        """The file's text."""


READERS: dict[str, Reader] = {
    "deepspeed": deepspeed.read,
    "megatron": megatron.read,
    "torchtitan": torchtitan.read,
    "accelerate": accelerate.read,
}
WRITERS: dict[str, tuple[Writer, dict[str, str]]] = {
    "deepspeed": (deepspeed_write.write, deepspeed.WHY_LEFT),
    "megatron": (megatron.write, megatron.WHY_LEFT),
    "torchtitan": (torchtitan.write, torchtitan.WHY_LEFT),
    "accelerate": (accelerate.write, accelerate.WHY_LEFT),
}
"""How each kind is written, and why entries of a plan cannot be in it, by entry or part."""

SILENT: dict[str, frozenset[str]] = {
    "deepspeed": frozenset(("workload.sequence_length", "recipe.seed", "recipe.steps")),
    "accelerate": frozenset(
        ("recipe", "batch", "workload.samples_per_step", "workload.sequence_length", "optimizer.implementation")
    ),
}
"""Parts and entries that a kind of file leaves to the training script."""

_FIX = f"give a {', '.join(list(NAMES.values())[:-1])} or {list(NAMES.values())[-1]}"


def kind_of_text(text: str, where: str) -> Kind:
    """The kind of a file, from its content alone.

    Raises:
        BadInput: it is none of those known; says what it looks like.
    """
    start = text.lstrip()
    if not start:
        raise BadInput(f"{where}: is empty", fix=_FIX)
    if start[0] == "{" or (start.startswith(("//", "/*")) and "{" in start):
        return _kind_of_json(text, where)
    if not start.startswith("#!"):
        try:
            return _kind_of_toml(tomllib.loads(text), where)
        except tomllib.TOMLDecodeError:
            if re.search(r"^\s*\[[\w.]+\]\s*(#.*)?$", text, re.MULTILINE) and not _has_options(text):
                return "torchtitan" if _some_section(text, torchtitan.SECTIONS) else "fullstride"
        if megatron.is_yaml(text):
            return _kind_of_yaml(text, where)
    if _has_options(text):
        return "megatron"
    raise BadInput(f"{where}: is no kind of configuration that fullstride knows", fix=_FIX)


def _some_section(text: str, sections: frozenset[str]) -> bool:
    found = {name.partition(".")[0] for name in re.findall(r"^\s*\[([\w.]+)\]", text, re.MULTILINE)}
    return len(found & sections) > len(found & set(Plan.__struct_fields__))


def _has_options(text: str) -> bool:
    return len({name for name in re.findall(r"--([A-Za-z][\w-]*)", text) if name in OPTIONS}) >= 3


def _kind_of_json(text: str, where: str) -> Kind:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return "deepspeed"  # whose reader says what is wrong, or forgives comments
    if isinstance(raw, dict) and raw.keys() & deepspeed.SECTIONS:
        return "deepspeed"
    if isinstance(raw, dict) and "distributed_type" in raw:
        return "accelerate"
    if isinstance(raw, dict) and "model_type" in raw:
        raise BadInput(f"{where}: is a model's config.json, not a plan", fix=f"`fullstride plan {where}` plans for it")
    raise BadInput(f"{where}: is JSON without any of DeepSpeed's settings", fix=_FIX)


def _kind_of_toml(raw: dict[str, Any], where: str) -> Kind:
    model = raw.get("model")
    if raw.get("kind") == "plan" or (isinstance(model, dict) and "source" in model):
        return "fullstride"
    parts = raw.keys() & set(Plan.__struct_fields__)
    sections = raw.keys() & torchtitan.SECTIONS
    if len(sections) > len(parts) or (isinstance(model, dict) and "flavor" in model):
        return "torchtitan"
    if parts or "kind" in raw:
        return "fullstride"
    raise BadInput(f"{where}: is TOML with none of the sections of a plan or of torchtitan", fix=_FIX)


def _kind_of_yaml(text: str, where: str) -> Kind:
    raw = load_yaml(text, where)
    if isinstance(raw, dict):
        if "distributed_type" in raw or raw.keys() & {"fsdp_config", "deepspeed_config", "parallelism_config"}:
            return "accelerate"
        leaves = re.findall(r"^\s*(?:[\w.]+\.)?(?:--)?([\w-]+):", text, re.MULTILINE)
        if sum(name.replace("_", "-") in OPTIONS for name in leaves) >= 3:
            return "megatron"
    raise BadInput(f"{where}: is YAML with none of the settings of Accelerate or Megatron", fix=_FIX)


def read_text(
    text: str,
    where: str,
    model: str | None = None,
    *,
    num_ranks: int | None = None,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
) -> Imported:
    """As `read_any`, from text that `where` names."""
    kind = kind_of_text(text, where)
    if kind == "fullstride":
        return Imported(kind=kind, where=where, plan=parse_plan(text, where))
    given = Given(model=model, num_ranks=num_ranks, sequence_length=sequence_length, samples_per_step=samples_per_step)
    return READERS[kind](text, where, given)


def read_any(
    path: str,
    model: str | None = None,
    *,
    num_ranks: int | None = None,
    sequence_length: int | None = None,
    samples_per_step: int | None = None,
) -> Imported:
    """Read a fullstride plan, DeepSpeed JSON, Megatron arguments (script or YAML), torchtitan TOML or Accelerate YAML.

    Args:
        path: The file; its kind is told from its content.
        model: A preset, a `config.json` or a model directory; counts before what the file says of the model.
        num_ranks: GPUs in all; counts before what the file says.
        sequence_length: Tokens of a sample; counts before what the file says.
        samples_per_step: Samples of the world in one step; the accumulation follows it.

    Returns:
        The plan, or what is missing for one; with all that was not carried, and all that was assumed.

    Raises:
        BadInput: no such file, of no known kind, damaged, or with settings that contradict each other.
        EnvironmentFault: it may not be read.
    """
    return read_text(
        _text(path),
        path,
        model,
        num_ranks=num_ranks,
        sequence_length=sequence_length,
        samples_per_step=samples_per_step,
    )


def kind_of_file(path: str) -> Kind:
    """The kind of a file, from its content; errors as `read_any`."""
    return kind_of_text(_text(path), path)


def _text(path: str) -> str:
    raw = read_bytes(path)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})", fix=_FIX) from None


def flat(plan: Plan) -> dict[str, Any]:
    """A plan's entries by dotted name, without header, digest and origin; `comm.env` and `shard.reshard` are one each."""
    raw: dict[str, Any] = msgspec.to_builtins(plan)
    entries = {
        f"{part}.{name}": list(value) if isinstance(value, tuple) else value
        for part, fields in raw.items()
        if isinstance(fields, dict) and part != "made_for"
        for name, value in fields.items()
    }
    entries.pop("model.digest")
    return entries


def write_as(plan: Plan, kind: Kind, spec: ModelSpec | None = None) -> Written:
    """A plan as another framework's file; every entry that reading it back would not give is listed.

    Args:
        plan: What to write.
        kind: Of file.
        spec: The model, where `plan.model.source` does not lead to it.

    Raises:
        BadInput: no such model.
    """
    if kind == "fullstride":
        return Written(kind=kind, text=plan_text(plan))
    source = plan.model.source
    if spec is None and not is_module_source(source):
        spec = load_spec(source)
    writer, why_left = WRITERS[kind]
    text = writer(plan, spec)
    back = READERS[kind](
        text,
        f"plan.{kind}",
        Given(model=source, num_ranks=ranks_said(plan, kind), sequence_length=plan.workload.sequence_length, spec=spec),
    )
    said, understood = flat(plan), flat(back.require_plan())
    left = [
        NotCarried(key=key, value=shown(value), why=_why(key, why_left))
        for key, value in said.items()
        if not _close(value, understood[key]) or (_silent(key, kind) and key not in back.entries)
    ]
    if "model" in why_left and not _names_model(kind, text):
        left.insert(0, NotCarried(key="model.source", value=source, why=why_left["model"]))
    return Written(kind=kind, text=text, not_carried=tuple(left))


def ranks_said(plan: Plan, kind: Kind) -> int:
    """The ranks that a kind of file speaks of: a pipeline that stands in the model's code multiplies them."""
    return plan.layout.world_size // (plan.layout.pp if kind in ("deepspeed", "accelerate") else 1)


def _silent(key: str, kind: Kind) -> bool:
    """Whether this kind of file leaves an entry to the training script, so that a default that agrees proves nothing."""
    return bool(SILENT.get(kind, frozenset()) & {key, key.partition(".")[0]})


def _close(left: Any, right: Any) -> bool:
    """Equal, but for the last bits of a product such as lr x min_lr_ratio."""
    floats = isinstance(left, float) and isinstance(right, float)
    return bool(left == right or (floats and abs(left - right) <= 1e-9 * abs(left)))


def _names_model(kind: Kind, text: str) -> bool:
    """Whether the file itself says which model it is for."""
    alone = READERS[kind](text, f"plan.{kind}", Given(num_ranks=None))
    return bool(alone.config or alone.model_name)


def _why(key: str, reasons: dict[str, str]) -> str:
    return reasons.get(key) or reasons.get(key.partition(".")[0], "it has no such setting")
