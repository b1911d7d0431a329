"""The trained model as a Hugging Face directory, gathered one parameter at a time, from whatever layout.

With low-rank adapters it is these alone, in PEFT's form (`engine/adapter_export.py`), or the model with them merged into it.

Files hold the names and the arrangement in which transformers itself would save the model (`engine/saved_form.py`).
A model that is not transformers' own gets its weights as plain safetensors and a note that says how to load them.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fullstride.engine.adapter import Adapters
from fullstride.engine.adapter_export import ADAPTER_STEM, adapter_weights, merged, write_adapter_config
from fullstride.engine.build import weights_directory
from fullstride.engine.data.tokenise import BYTES, TOKENIZER_FILES, write_byte_tokenizer
from fullstride.engine.gathering import Gathering
from fullstride.engine.load_weights import stored_dtypes
from fullstride.engine.pieces import Piece
from fullstride.engine.saved_form import SavedForm
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.files import write_bytes
from fullstride.plan.plan import DType, Plan

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, as transformers writes them; also the host memory that exporting takes on rank 0."""
TORCH_DTYPE: dict[DType, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_GENERATION = "generation_config.json"
_PREFIXES = ("module.", "_orig_mod.")
_NOTE = """# Weights of a torch.nn.Module

    from safetensors.torch import load_file
    weights = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        weights.update(load_file(path))
    model.load_state_dict(weights, strict=False)  # tied parameters and buffers are not repeated
"""


class Exportable(Protocol):
    """The part of a Run that exporting needs."""

    plan: Plan

    @property
    def module(self) -> nn.Module:
        """The user's model, without a wrapper."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        ...

    @property
    def adapters(self) -> Adapters | None:
        """The low-rank adapters, if there are some."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Live tensors under `weights/NAME` and other kinds."""
        ...

    def frozen(self) -> dict[str, Tensor]:
        """The weights beside adapters, by NAME, which `state` does not have."""
        ...

    def pieces(self) -> dict[str, Piece]:
        """Where their local elements lie in the unmodified model, by NAME."""
        ...


def refuse_existing(folder: Path) -> None:
    """Nothing is overwritten.

    Raises:
        BadInput: there is something at `folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"export folder {str(folder)!r} is not empty", fix="choose another folder, or remove it")


def export(
    run: Exportable, folder: Path, *, dtype: DType | None = None, shard_bytes: int = SHARD_BYTES, merge: bool = False
) -> None:
    """Write the model's weights for others to use; called by all ranks, written by rank 0, whole or not at all.

    Args:
        run: in any layout.
        folder: made; must not exist or be empty.
        dtype: of the floating-point weights in the files. None: for each tensor that of the model directory which training
            began with, so that a model which took no step comes out bit for bit; from scratch the masters' own.
        shard_bytes: largest file.
        merge: add adapters to the weights that they stand beside, and write the whole model; else they are written alone.

    Raises:
        BadInput: `folder` is not empty.
        EnvironmentFault: the disk is full or may not be written; nothing is left.
    """
    refuse_existing(folder)
    first = not dist.is_initialized() or dist.get_rank() == 0
    building = folder.parent / f".{folder.name}.partial"
    problem = ""
    try:
        if first:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
        alone = run.adapters if not merge else None
        dtypes = _dtypes(run, dtype) if alone is None else _Dtypes(TORCH_DTYPE[dtype or run.plan.precision.master], {})
        found = _weights(run, dtypes) if alone is None else adapter_weights(run, alone, dtypes.usual)
        # PEFT reads one file.
        stem, limit = ("model", shard_bytes) if alone is None else (ADAPTER_STEM, sys.maxsize)
        problem = _write_weights(found, building, limit, stem, write=first)
        if first and not problem and alone is None:
            _write_rest(run, building, dtypes.usual)
        elif first and not problem and alone is not None:
            write_adapter_config(run, alone, building)
        if first and not problem:
            if folder.exists():
                folder.rmdir()
            building.rename(folder)
    except OSError as error:
        problem = error.strerror or str(error)
    finally:
        if first:
            shutil.rmtree(building, ignore_errors=True)
    problem = _from_first(problem)
    if problem:
        raise EnvironmentFault(f"{folder}: not exported ({problem})", fix="free disk space or choose another place")


def _from_first(problem: str) -> str:
    """What rank 0 met, on every rank."""
    told = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]


@dataclass(frozen=True)
class _Dtypes:
    """In which dtype a floating-point tensor is written."""

    usual: torch.dtype
    named: dict[str, torch.dtype]

    def of(self, name: str, value: Tensor) -> torch.dtype:
        return self.named.get(name, self.usual) if value.is_floating_point() else value.dtype


def _dtypes(run: Exportable, asked: DType | None) -> _Dtypes:
    if asked:
        return _Dtypes(TORCH_DTYPE[asked], {})
    source = weights_directory(run.plan.model.source)
    named = stored_dtypes(source) if source else {}
    floating = [dtype for dtype in named.values() if dtype.is_floating_point]
    usual = max(set(floating), key=floating.count) if floating else TORCH_DTYPE[run.plan.precision.master]
    return _Dtypes(usual, named)


def _weights(run: Exportable, dtypes: _Dtypes) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors on the host of rank 0, as the files have them, one parameter of the model after the other.

    Every rank must run it to its end, because gathering is collective; the others get nothing.
    """
    held = {key.removeprefix("weights/"): value for key, value in run.state().items() if key.startswith("weights/")}
    held, pieces, adapters = held | run.frozen(), run.pieces(), run.adapters
    for name, value in _persistent_buffers(run.module):
        if name not in held:
            held[name], pieces[name] = value, Piece(name=name, shape=tuple(value.shape))
    gathering = Gathering(pieces, run.device)
    kinds = gathering.dtypes({name: value.dtype for name, value in held.items()})
    form = SavedForm(run.module)

    def whole(name: str) -> Tensor | None:
        return gathering.whole(name, held.get(name), kinds[name], on_all=False)

    own = [name for name in gathering.names if adapters is None or name not in adapters.matrices]
    for names in form.groups({name: gathering.shape(name) for name in own}):
        wholes = {name: whole(name) if adapters is None else merged(name, adapters, whole) for name in names}
        there = {name: value.cpu() for name, value in wholes.items() if value is not None}
        for saved, value in form.in_files(there).items() if there else ():
            yield saved, value.to(dtypes.of(saved, value), copy=True).contiguous()


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that the model itself would save, under its own names."""
    saved = module.state_dict(keep_vars=True)
    for name, value in module.named_buffers():
        if name in saved:
            yield _clean(name), value


def _clean(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path, shard_bytes: int, stem: str, *, write: bool) -> str:
    """Fill files up to `shard_bytes`; returns what the disk refused, and goes on gathering so that no rank waits."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    problem = ""
    for name, value in weights:
        if not write or problem:
            continue
        if held and size + value.nbytes > shard_bytes:
            problem = _put(held, folder, files)
            held, size = {}, 0
        held[name] = value
        size, total = size + value.nbytes, total + value.nbytes
    if write and not problem and held:
        problem = _put(held, folder, files)
    if write and not problem:
        _name_files(folder, files, total, stem)
    return problem


def _put(held: dict[str, Tensor], folder: Path, files: list[list[str]]) -> str:
    try:
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
    except Exception as error:  # safetensors raises its own, and OSError
        return str(error).splitlines()[0]
    files.append(list(held))
    return ""


def _name_files(folder: Path, files: list[list[str]], total: int, stem: str) -> None:
    """The names that transformers looks for: one file, or numbered ones with an index."""
    if len(files) == 1:
        (folder / "part-0").rename(folder / f"{stem}.safetensors")
        return
    index = {}
    for number, names in enumerate(files):
        name = f"{stem}-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / name)
        index.update(dict.fromkeys(names, name))
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    write_bytes(folder / f"{stem}.safetensors.index.json", json.dumps(content, indent=2).encode() + b"\n")


def _write_rest(run: Exportable, folder: Path, dtype: torch.dtype) -> None:
    """Configuration and tokenizer, or the note."""
    module: Any = run.module
    if not hasattr(module, "config") or not hasattr(module.config, "to_dict"):
        write_bytes(folder / "README.md", _NOTE.encode())
        return
    config = {**module.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}
    config["architectures"] = [_class_name(module)]
    config["use_cache"] = True
    write_bytes(folder / "config.json", json.dumps(config, indent=2, sort_keys=True, default=str).encode() + b"\n")
    _write_generation_settings(run, folder)
    source = run.plan.workload.tokenizer
    if source == BYTES:
        write_byte_tokenizer(folder)
    else:
        home = Path(source) if Path(source).is_dir() else Path(source).parent
        names = TOKENIZER_FILES if Path(source).is_dir() else ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        for name in names:
            origin = home / name
            if not Path(source).is_dir() and name == "tokenizer.json":
                origin = Path(source)
            if origin.is_file():
                shutil.copyfile(origin, folder / name)


def _write_generation_settings(run: Exportable, folder: Path) -> None:
    """Those of the directory which training began with, as they stand there; else what the configuration says."""
    source, module = weights_directory(run.plan.model.source), cast(Any, run.module)
    own = source / _GENERATION if source else None
    if own is not None and own.is_file():
        shutil.copyfile(own, folder / _GENERATION)
    elif getattr(module, "generation_config", None) is not None:
        module.generation_config.save_pretrained(folder)


def _class_name(module: nn.Module) -> str:
    # fully_shard changes a module's class to a subclass of its own whose name begins with FSDP.
    name = type(module).__name__
    return name.removeprefix("FSDP")
