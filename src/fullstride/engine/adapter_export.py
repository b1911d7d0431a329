"""Adapters for others: in the form of PEFT (`PeftModel.from_pretrained`), or merged into the weights that they stand beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullstride.engine.adapter import Adapters
from fullstride.engine.anatomy_region import is_transposed
from fullstride.engine.build import weights_directory
from fullstride.engine.gathering import Gathering
from fullstride.files import write_bytes

ADAPTER_STEM = "adapter_model"
PEFT_PREFIX = "base_model.model."


def adapter_weights(run: Any, adapters: Adapters, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """A's and B's, whole on the host of rank 0, under PEFT's names; every rank runs it to its end.

    Args:
        run: as `export` takes it.
        adapters: its own.
        dtype: of the result.
    """
    state = run.state()
    gathering = Gathering({name: piece for name, piece in run.pieces().items() if name in adapters.matrices}, run.device)
    for name in gathering.names:
        local = state.get(f"weights/{name}")
        whole = gathering.whole(name, local, dtype, on_all=False)
        if whole is not None:
            yield PEFT_PREFIX + name, whole.cpu().contiguous()


def merged(name: str, adapters: Adapters, whole: Callable[[str], Tensor | None]) -> Tensor | None:
    """A parameter with its adapter's product added, in the adapter's dtype; as it is where it has none.

    Args:
        name: of a frozen parameter.
        adapters: of its model.
        whole: gathers a parameter by name, on rank 0; collective.
    """
    path, _, own = name.rpartition(".")
    if own != "weight" or path not in adapters.modules:
        return whole(name)
    weight, a, b = whole(name), whole(f"{path}.lora_A.weight"), whole(f"{path}.lora_B.weight")
    if weight is None or a is None or b is None:
        return None
    scale = adapters.matrices[f"{path}.lora_B.weight"].scale
    product = (b @ a) * scale
    return weight.to(product.dtype) + (product.t() if is_transposed(adapters.modules[path]) else product)


def write_adapter_config(run: Any, adapters: Adapters, folder: Path) -> None:
    """PEFT's description of the adapters."""
    module, adapter = run.module, run.plan.adapter
    transposed = {is_transposed(product) for product in adapters.modules.values()}
    alpha = adapter.alpha or adapter.rank
    source = weights_directory(run.plan.model.source)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if hasattr(module, "get_input_embeddings") else None,
        "base_model_name_or_path": str(source) if source else None,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed == {True},
        "target_modules": _target_modules(module, adapters),
        "inference_mode": True,
    }
    write_bytes(folder / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")


def _target_modules(module: nn.Module, adapters: Adapters) -> list[str]:
    """The shortest ends of paths that name the adapted products and no other module."""
    inside = {f"{path}.{child}" for path in adapters.modules for child in ("lora_A", "lora_B")}
    others = [path for path, _ in module.named_modules() if path and path not in adapters.modules and path not in inside]
    for length in (1, 2):
        ends = sorted({".".join(path.split(".")[-length:]) for path in adapters.modules})
        if not any(f".{path}".endswith(f".{end}") for path in others for end in ends):
            return ends
    return sorted(adapters.modules)
