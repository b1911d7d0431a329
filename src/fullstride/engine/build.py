"""From the name of a model to the model itself, with parameters that hold no memory yet.

Parameters are on the meta device; buffers (rotary tables and the like) are real, because models compute them when they are
built and no initialiser makes them again.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullstride.errors import BadInput
from fullstride.model.source import config_of, is_module_source

_DROPPED = ("torch_dtype", "dtype", "transformers_version", "architectures", "_name_or_path", "quantization_config")
_OTHER_FORMS = (
    *("model.safetensors.index.json", "pytorch_model*.bin*", "consolidated*.pth", "*.gguf", "*.ckpt"),
    *("tf_model*.h5", "flax_model*.msgpack"),
)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, every parameter that a module registers is moved to the meta device; buffers stay real.

    One parameter at a time is real while it is made, so building needs no more memory than the largest tensor.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is on meta already may be shared with another module: it must stay the same object.
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    patched: Any = nn.Module
    patched.register_parameter = register
    try:
        yield
    finally:
        patched.register_parameter = original


def build_model(source: str) -> nn.Module:
    """The unmodified model: parameters on meta in fp32, buffers real.

    Args:
        source: a preset, a `config.json`, a model directory, or `file.py:function` / `module:function` that returns an
            `nn.Module`. Nothing is downloaded.

    Raises:
        BadInput: the source is unknown, or transformers does not know the architecture.
    """
    if is_module_source(source):
        from fullstride.engine.build_source import load_factory

        factory = load_factory(source)
        with parameters_on_meta():
            model = factory()
        if not isinstance(model, nn.Module):
            raise BadInput(f"{source}: returned a {type(model).__name__}", fix="return a torch.nn.Module")
        return model
    config = config_of(source)
    if config is None:
        raise BadInput(
            f"{source}: is no preset, config.json, model directory or file.py:function",
            fix="check the spelling; `fullstride plan --help` lists the presets",
        )
    return from_config(config, source)


def from_config(config: dict[str, Any], where: str) -> nn.Module:
    """A causal language model of transformers from the content of its `config.json`.

    Attention goes through torch's scaled dot-product attention; no cache of keys is kept.

    Raises:
        BadInput: transformers does not know the architecture, or the numbers do not fit together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = {key: value for key, value in config.items() if key not in _DROPPED}
    kind = kept.pop("model_type", None)
    if not kind:
        raise BadInput(f"{where}: has no model_type", fix="give a Hugging Face config.json")
    try:
        settings = AutoConfig.for_model(kind, **kept)
        settings.use_cache = False
        with parameters_on_meta():
            model = _with_attention(AutoModelForCausalLM.from_config, settings, where)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInput(
            f"{where}: transformers cannot build model_type {kind!r} ({line})", fix="check model_type and the sizes"
        ) from None
    return model


def _with_attention(make: Any, settings: Any, where: str) -> nn.Module:
    """Build with torch's attention; models that cap attention scores have the slower one of their own, said aloud."""
    try:
        model: nn.Module = make(settings, attn_implementation="sdpa", dtype=torch.float32)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        message = (
            f"{where}: this architecture cannot use scaled_dot_product_attention; eager attention keeps whole score matrices"
        )
        warnings.warn(message, stacklevel=3)
        model = make(settings, attn_implementation="eager", dtype=torch.float32)
    return model


def weights_directory(source: str) -> Path | None:
    """The folder whose safetensors the source brings along, or None when training starts from scratch.

    Raises:
        BadInput: it brings weights in another form, or an index of files that are not there: nobody means to start anew then.
    """
    path = Path(source)
    if not path.is_dir():
        return None
    if any(path.glob("*.safetensors")):
        return path
    other = next((file.name for form in _OTHER_FORMS for file in sorted(path.glob(form))), "")
    if other:
        raise BadInput(
            f"{source}: has {other} but no *.safetensors, and weights are read from these alone",
            fix="save the model with transformers' save_pretrained, or give its config.json to start from scratch",
        )
    return None
