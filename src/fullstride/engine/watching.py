"""Which module runs while a model is traced, what kind it is, and whose its parameters are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves  # has no public path

from fullstride.engine.tracing import Part, Tracer, storage_key
from fullstride.model.assemble import Tapes
from fullstride.model.spec import Cast, Parameter, ParameterRole, SublayerKind


def kind_of(module: nn.Module) -> SublayerKind:
    """What a module is, by its class."""
    word = type(module).__name__.lower()
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Linear) or word == "conv1d":
        return "linear"
    if "norm" in word:
        return "norm"
    if "rotary" in word:
        return "rotary"
    if "attention" in word or "attn" in word:
        return "attention"
    if type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations"):
        return "activation"
    if "router" in word:
        return "router"
    return "experts" if "expert" in word else "other"


def role_of(name: str, parameter: torch.Tensor, kind: SublayerKind, *, head: bool) -> ParameterRole:
    """A parameter's role, by its module's kind and its own shape."""
    if kind in ("embedding", "norm", "router"):
        return kind
    if parameter.dim() > 2:
        return "expert"
    if name.endswith("bias") or parameter.dim() == 1:
        return "bias"
    return "head" if head else "weight"


@contextmanager
def watch(tracer: Tracer, model: nn.Module, blocks: tuple[str, ...]) -> Iterator[None]:
    """While it lasts, the tracer knows which module runs; entering a block begins a part, leaving the last begins the tail."""
    handles: list[Any] = []
    ids = {path: number for number, path in enumerate(blocks)}

    def enter(path: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            number = ids.get(path)
            if number is not None:
                entry = {storage_key(t) for t in args[:1] if isinstance(t, torch.Tensor)} or _named_input(kwargs)
                tracer.parts.append(Part(tracer.cast, entry))
                tracer.blocks[number] = tracer.part
                tracer.stack.append(("", "residual"))
            else:
                inside = next((b for b in blocks if path.startswith(f"{b}.")), None)
                tracer.stack.append((path[len(inside) + 1 :] if inside else path, kind_of(module)))

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tracer.stack.pop()
            if path in ids:
                first = next((t for t in tree_leaves(output) if isinstance(t, torch.Tensor)), None)
                tracer.parts.append(Part(tracer.cast, set() if first is None else {storage_key(first)}))

        return hook

    for path, module in model.named_modules():
        if path:
            handles.append(module.register_forward_pre_hook(enter(path, module), with_kwargs=True))
            handles.append(module.register_forward_hook(leave(path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named_input(kwargs: dict[str, Any]) -> set[int]:
    first = kwargs.get("hidden_states", kwargs.get("x"))
    return {storage_key(first)} if isinstance(first, torch.Tensor) else set()


def add_parameters(
    part: Part, model: nn.Module, prefix: str, *, outside: tuple[str, ...] = (), head: str = "", embedding: str = ""
) -> None:
    """Parameters of the modules below `prefix` (not below `outside`) to the sublayers that own them; shared ones once."""
    for full, parameter in model.named_parameters():
        if not full.startswith(prefix) or any(full.startswith(f"{path}.") for path in outside):
            continue
        owner = full.rpartition(".")[0]
        module = model.get_submodule(owner)
        path = owner[len(prefix) :]
        kind: SublayerKind = "embedding" if embedding and owner == embedding else kind_of(module)
        role = role_of(full, parameter, kind, head=owner == head and bool(head))
        item = Parameter(name=full[len(prefix) :], shape=tuple(parameter.shape), role=role, trainable=parameter.requires_grad)
        for section in part.both(part.section(path, kind)):
            section.parameters.append(item)


def tapes_of(parts: dict[Cast, Part]) -> Tapes:
    """The six tapes of one part."""
    eager: Tapes = {("eager", cast): part.eager for cast, part in parts.items()}
    return {**eager, **{("compiled", cast): part.compiled for cast, part in parts.items()}}
