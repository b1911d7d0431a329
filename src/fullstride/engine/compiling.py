"""torch.compile, a block at a time.

The block's `forward` is compiled, not the module's call: hooks that gather and free weights stay outside, where they may
wait for other ranks, and parameter names stay clean. Equal blocks share one compilation.
"""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch
from torch import nn

from fullstride.engine.anatomy import Anatomy
from fullstride.errors import EnvironmentFault


def compile_available(device: torch.device) -> str:
    """Why nothing can be compiled for this device; empty if it can.

    Inductor writes C++ for the CPU; for a GPU Triton needs a C compiler for its launchers.
    """
    wanted = [os.environ.get("CXX"), "g++", "clang++"] if device.type == "cpu" else [os.environ.get("CC"), "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in wanted):
        return f"no {'C++' if device.type == 'cpu' else 'C'} compiler on this host"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def require_compiler(device: torch.device) -> None:
    """Refuse a Plan that compiles where nothing can.

    Raises:
        EnvironmentFault: with what is missing.
    """
    missing = compile_available(device)
    if missing:
        raise EnvironmentFault(f"compile.mode is block, but there is {missing}", fix="install one or set compile.mode = 'off'")


def compile_blocks(model: nn.Module, anatomy: Anatomy) -> None:
    """Compile each block's forward. Shapes are static: a step that compiles again is a step that is not steady."""
    # Regions of tensor parallelism note what their products share while they run. Inside recomputation torch leaves a whole
    # block uncompiled for that, unless it may assume that backward, which runs the traced code, need not note it again.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for path in anatomy.blocks:
        block = model.get_submodule(path)
        block.forward = torch.compile(block.forward, dynamic=False)


def recompile_count() -> int:
    """Graphs compiled so far in this process; a steady run does not raise it."""
    # Dynamo's counters have no public door; this is the one place that reads them.
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))
