"""The Plan's file: TOML with a comment for each part, read strictly, never written over a user's file unless asked."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from fullstride.errors import BadInput
from fullstride.files import FORMAT, convert, read_bytes, write_bytes
from fullstride.plan.plan import Plan
from fullstride.plan.rules import size_violations

PART_COMMENTS = {
    "model": "Which model: a preset, a config.json, a model directory, or file.py:function",
    "workload": "What one optimizer step learns from",
    "recipe": "The learning itself; tuning never changes this part",
    "made_for": "Where this plan comes from; nothing is decided by it",
    "layout": "Degrees of the mesh axes; their product (ep left out) is the number of ranks",
    "shard": "ZeRO: the stage, and who carries it out",
    "pipeline": "How stages take turns",
    "batch": "micro_batch x accumulation x dp_replicate x dp_shard = workload.samples_per_step",
    "recompute": "What is kept for backward, and what is made again",
    "optimizer": "How AdamW is carried out",
    "precision": "A dtype for each role: fp64, fp32, bf16",
    "kernels": "Which implementation computes",
    "adapter": "Low-rank adapters on frozen weights; rank 0 trains all weights",
    "loss": "How the head and the loss are computed",
    "compile": "torch.compile",
    "overlap": "Communication beside computation",
    "comm": "The communication library",
    "data": "The input pipeline",
    "threads": "CPU threads of one rank",
}
NAMED_PARTS = ("embedding", "blocks", "final_norm", "head")
"""Entries of `[model]` that stand in a file only where they say something."""
FIELD_COMMENTS = {
    ("model", "digest"): "checked before a run; empty to skip",
    ("workload", "data"): "a file or folder of text, JSONL or Parquet; stdlib: this machine's Python library sources",
    ("workload", "documents"): "across | separate: may packed documents attend across their borders",
    ("recipe", "clip_norm"): "0 leaves gradients as they are",
    ("recipe", "schedule"): "constant | linear | cosine",
    ("shard", "carrier"): "none (one rank) | ddp | fsdp2 | flat",
    ("shard", "stage"): "0 replicates; 1 shards optimizer states, 2 also gradients, 3 also weights",
    ("recompute", "mode"): "none | norm_activation | full",
    ("recompute", "every"): "recompute one block in this many",
    ("optimizer", "implementation"): "fused | foreach | loop",
    ("precision", "cast"): "none | autocast (at each operator) | weights (a copy beside fp32 masters)",
    ("precision", "gradient"): "storage and accumulation between micro-batches",
    ("precision", "reduction"): "what gradients are summed in across ranks",
    ("loss", "kind"): "model (whole logits) | chunked (logits never stand whole)",
    ("compile", "mode"): "off | block",
    ("overlap", "prefetch"): "blocks gathered ahead (ZeRO-3)",
    ("overlap", "bucket_bytes"): "DDP's gradient buckets",
    ("data", "workers"): "threads that prepare samples; 0: the training thread does",
    ("data", "prefetch"): "steps prepared ahead, with workers",
    ("threads", "compute"): "0: torchrun's default",
}


def plan_text(plan: Plan) -> str:
    """The plan as TOML, a comment above each part; `read_plan` of it is equal to `plan`."""
    import tomlkit

    raw: dict[str, Any] = msgspec.to_builtins(plan)
    header = {"kind": raw.pop("kind"), "format": raw.pop("format")}
    pieces = [f"# A fullstride plan: what is trained, and how.\n{tomlkit.dumps(header)}"]
    for part, fields in raw.items():
        table = tomlkit.table()
        for name, value in sorted(fields.items(), key=lambda entry: isinstance(entry[1], dict)):  # sub-tables come last
            if value == {} or (part == "model" and name in NAMED_PARTS and value == ""):
                continue
            table.add(name, tomlkit.item(value))
            if (part, name) in FIELD_COMMENTS and not isinstance(value, dict):
                table[name].comment(FIELD_COMMENTS[part, name])
        pieces.append(f"# {PART_COMMENTS[part]}\n{tomlkit.dumps({part: table})}")
    return "\n".join(pieces)


def parse_plan(text: str | bytes, where: str) -> Plan:
    """A Plan from TOML text.

    Raises:
        BadInput: not TOML, not a plan, an unknown key, a wrong type or an impossible size; names `where`, key and rule.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        raw = tomllib.loads(decoded)
    except UnicodeDecodeError as error:
        raise BadInput(f"{where}: is not UTF-8 text ({error.reason} at byte {error.start})", fix="give a plan file") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{where}: is not TOML ({error})", fix="correct that line, or write the plan again") from None
    if "kind" not in raw and "model" in raw:  # a file written by hand may leave the header out
        raw = {"kind": "plan", "format": FORMAT, **raw}
    plan = convert(raw, Plan, where)
    for violation in size_violations(plan):
        raise BadInput(f"{where}: {violation.message}", fix=violation.fix)
    return plan


def read_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises:
        BadInput: no such file, or its content cannot be a plan (see `parse_plan`).
        EnvironmentFault: it may not be read.
    """
    return parse_plan(read_bytes(path), str(path))


def write_plan(plan: Plan, path: Path | str, *, overwrite: bool = False) -> None:
    """Write a plan file, whole.

    Raises:
        BadInput: the file is there already and `overwrite` is False.
        EnvironmentFault: the disk refuses.
    """
    if not overwrite and Path(path).exists():
        raise BadInput(f"{path}: is there already, and a user's file is never written over", fix="choose another name")
    write_bytes(path, plan_text(plan).encode())
