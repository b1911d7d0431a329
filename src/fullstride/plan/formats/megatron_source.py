"""Where Megatron's arguments stand: in a launch script, or in one of several shapes of YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from fullstride.errors import BadInput
from fullstride.plan.formats.megatron_options import INVERSE, OPTIONS, PREFIXES, YAML_NAMES
from fullstride.plan.formats.shell import Script, read_script
from fullstride.plan.formats.table import Row
from fullstride.plan.formats.yaml_text import load_yaml
from fullstride.plan.met import ENV_PREFIXES

LEAST_OPTIONS = 3
"""Known options below which text is not taken for Megatron's arguments."""


class Arguments:
    """What a file says, by option; and the number of ranks and environment that stand around it."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.options: dict[str, Any] = {}
        """By name without dashes, as the file spells it in `spelled`."""
        self.spelled: dict[str, str] = {}
        self.launch: dict[str, Any] = {}
        self.env: dict[str, str] = {}
        self.around: dict[str, Any] = {}
        """What stands beside the arguments: the environment of other libraries, and the like."""

    def put(self, name: str, value: Any, spelled: str) -> None:
        """Keep one option; a later one replaces an earlier, as argparse does."""
        self.options[name], self.spelled[name] = value, spelled


def row_of(name: str) -> Row | None:
    """The row of an option, by its name or by how it begins."""
    row = OPTIONS.get(name)
    if row is not None:
        return row
    return next((PREFIXES[prefix] for prefix in PREFIXES if name.startswith(prefix)), None)


def options_of(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Pairs of option and value: True for a flag, text for a value, joined by blanks where there are several."""
    name, values = "", list[str]()
    for word in _split(words):
        if word.startswith("--") and len(word) > 2:
            if name:
                yield name, " ".join(values) if values else True
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
        elif name:
            values.append(word)
    if name:
        yield name, " ".join(values) if values else True


def _split(words: list[str]) -> Iterator[str]:
    """Words of which some hold several options, as those of `"--split '99,1,0'"` or of a whole command in quotes do."""
    for word in words:
        if " " in word and (word.startswith("--") or " --" in word):
            try:
                yield from shlex.split(word.replace("\\\n", " "))
            except ValueError:
                yield from word.split()
        else:
            yield word


def known(words: list[str]) -> int:
    """How many different options of Megatron stand in a command."""
    return len({name for name, _ in options_of(words) if name in OPTIONS})


def from_script(text: str, where: str) -> Arguments:
    """The arguments of the command in a launch script that has most of them.

    Raises:
        BadInput: no command and no variable in it has any.
    """
    script = read_script(text)
    gathered = [value if isinstance(value, list) else [value] for value in script.variables.values()]
    best = max([*script.commands, *gathered], key=known, default=[])
    if known(best) < LEAST_OPTIONS:
        raise BadInput(
            f"{where}: no command in it has Megatron's arguments (--num-layers, --tensor-model-parallel-size and so on)",
            fix="give the script that calls the training program",
        )
    found = Arguments()
    words = list(_split(best))
    program = next((at for at, word in enumerate(words) if word.endswith(".py")), -1)
    for name, value in options_of(words[:program] if program >= 0 else []):
        found.launch[name.replace("_", "-")] = value
    for name, value in options_of(words[program + 1 :]):
        found.put(name, value, f"--{name}")
    _ranks(found, script, text)
    for name, value in script.exported.items():
        (found.env if _of_communication(name) else found.around)[name] = value
    return found


def _of_communication(name: str) -> bool:
    """Whether a variable belongs into `comm.env`; Megatron itself demands CUDA_DEVICE_MAX_CONNECTIONS."""
    return name.startswith(ENV_PREFIXES) and name != "CUDA_DEVICE_MAX_CONNECTIONS"


def _ranks(found: Arguments, script: Script, text: str) -> None:
    """Number of ranks: torchrun's, a variable WORLD_SIZE, or Slurm's."""
    per_node, nodes = found.launch.get("nproc-per-node"), found.launch.get("nnodes", "1")
    slurm = dict(re.findall(r"^#SBATCH\s+--(nodes|ntasks-per-node|gpus-per-node|ntasks)[= ](\d+)", text, re.MULTILINE))
    size = script.variables.get("WORLD_SIZE")
    if _whole(per_node) and _whole(nodes):
        found.launch["ranks"] = int(str(per_node)) * int(str(nodes))
    elif _whole(size):
        found.launch["ranks"] = int(str(size))
    elif "ntasks" in slurm:
        found.launch["ranks"] = int(slurm["ntasks"])
    elif per := slurm.get("ntasks-per-node") or slurm.get("gpus-per-node"):
        found.launch["ranks"] = int(slurm.get("nodes", 1)) * int(per)


def _whole(value: Any) -> bool:
    return isinstance(value, int | str) and str(value).isdigit()


def from_yaml(text: str, where: str) -> Arguments:
    """The arguments in YAML: `MODEL_ARGS: {--flag: value}`, NeMo's and Megatron-Bridge's tables, or Megatron's own.

    Raises:
        BadInput: not YAML, not a table, or none of Megatron's settings in it.
    """
    raw = load_yaml(text, where)
    if not isinstance(raw, Mapping):
        raise BadInput(f"{where}: holds a {type(raw).__name__}, not a table of settings", fix="give Megatron's YAML")
    found = Arguments()
    for path, value in _leaves(raw):
        _put_leaf(found, path, value)
    _yaml_ranks(found)
    if len(found.options.keys() & OPTIONS.keys()) < LEAST_OPTIONS:
        raise BadInput(f"{where}: has none of Megatron's settings", fix="give a file with tensor_model_parallel_size and so on")
    return found


def _leaves(raw: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


_DEVICES = {"trainer.num_nodes": "nnodes", "trainer.devices": "nproc-per-node", "num_nodes": "nnodes"}
_DEVICES |= {"gpus_per_node": "nproc-per-node", "num_gpus_per_node": "nproc-per-node", "devices": "nproc-per-node"}
_PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "bf16_mixed": "bf16", "16": "fp16", "16-mixed": "fp16", "fp16": "fp16"}
_ASIDE_TABLES = ("METRICS", "TEST_TYPE", "LAUNCHER", "BEFORE_SCRIPT", "AFTER_SCRIPT", "MODE", "SKIP_PYTEST")


def _put_leaf(found: Arguments, path: str, value: Any) -> None:
    parts = path.split(".")
    last = parts[-1]
    if parts[0] == "ENV_VARS":
        known_here = _of_communication(last) and isinstance(value, str | int)
        (found.env if known_here else found.around)[last if known_here else path] = str(value)
        return
    if parts[0] in _ASIDE_TABLES:
        found.around[path] = value
        return
    if path in _DEVICES or last in _DEVICES:
        found.launch[_DEVICES.get(path) or _DEVICES[last]] = value
        return
    if last in ("precision", "mixed_precision") and str(value) in _PRECISIONS:
        found.put(_PRECISIONS[str(value)], True, path)
        return
    name = last.removeprefix("--") if last.startswith("--") else last.replace("_", "-")
    name = YAML_NAMES.get(name, name)
    if name in INVERSE and isinstance(value, bool):
        name, value = INVERSE[name], not value
    row = row_of(name)
    if value is None or (value is False and row is not None and row.kind is not bool):
        found.around[last if last.startswith("--") else path] = value  # switched off, as without the option
        return
    found.put(name, value, last if last.startswith("--") else path)


def _yaml_ranks(found: Arguments) -> None:
    per_node, nodes = found.launch.get("nproc-per-node"), found.launch.get("nnodes", 1)
    if _whole(per_node) and _whole(nodes):
        found.launch["ranks"] = int(str(per_node)) * int(str(nodes))
