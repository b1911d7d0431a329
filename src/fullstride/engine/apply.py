"""How a Plan is applied to a model, in order. Start reading here.

    1. look       find embedding, blocks, norm and head; refuse what this model and this Plan cannot do together
    2. adapters   with low-rank adapters: freeze the model, and put two small matrices beside the products that are meant
    3. stages     with a pipeline: leave only this rank's stages
    4. tensor     with tensor parallelism: say how each weight is cut, and let modules exchange what they make
    5. recompute  replace the forward of the chosen blocks by one that makes activations again
    6. compile    compile each block's forward, recomputation inside
    7. loss       let the head return the loss, if it is to be computed in chunks
    8. weights    unit by unit: make them (from a file, or from seed and name), then cut and shard them
    9. precision  keep compute copies beside the masters
    10. optimizer make its states

The model's modules, parameter names and code stay as they were; only some instances' `forward` are replaced.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from fullstride.engine.adapter import Adapters, attach
from fullstride.engine.anatomy import Anatomy, Role, Unit, find, head_is_last, units
from fullstride.engine.build import weights_directory
from fullstride.engine.compiling import compile_blocks, require_compiler
from fullstride.engine.init import initialise, materialise, parameters_by_unit, places_of
from fullstride.engine.load_weights import Wanted, WeightFiles
from fullstride.engine.loss import ChunkedHead, altered_logits, chunked_head
from fullstride.engine.memory.recompute import apply_recompute
from fullstride.engine.mesh import Mesh
from fullstride.engine.optimizer import AdamW
from fullstride.engine.parallel.carrier import Carrier
from fullstride.engine.parallel.shard import carry
from fullstride.engine.parallel.tensor import TensorParallel, tensor_parallel
from fullstride.engine.parallel.tensor_look import look
from fullstride.engine.pieces import Piece, take
from fullstride.engine.pipeline.build import Stages, cut_to_stages, executor_of
from fullstride.engine.pipeline.executor import Executor
from fullstride.engine.pipeline.splitting import split_backward
from fullstride.engine.precision import TORCH_DTYPE, Weights, cast_at_borders, compute_dtype
from fullstride.errors import RuleBroken
from fullstride.plan.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Applied:
    """A model with its Plan applied."""

    anatomy: Anatomy
    mesh: Mesh
    carrier: Carrier
    weights: Weights
    optimizer: AdamW
    head: ChunkedHead | None
    stages: Stages | None
    executor: Executor | None
    """What runs a step; None where it is the Run itself, without a pipeline."""
    tensor: TensorParallel | None
    adapters: Adapters | None


def apply_plan(model: nn.Module, plan: Plan, device: torch.device) -> Applied:
    """Apply a Plan to a model, in place.

    Args:
        model: unmodified; parameters on meta are made here, real ones are kept (rank 0's values, on all ranks).
        plan: allowed by `plan.rules`.
        device: this rank's.

    Raises:
        BadInput: the model has no list of blocks, or weights that do not fit it.
        RuleBroken: this model and this Plan do not go together.
        EnvironmentFault: nothing can be compiled here.
    """
    anatomy, mesh = find(model, plan.model), Mesh(plan.layout, device, plan.comm)
    wanted = Wanted.by(model, anatomy)
    _refuse(model, anatomy, plan, device)
    adapters = attach(model, anatomy, plan)
    seen = look(model, anatomy, plan, device)
    stages = cut_to_stages(model, anatomy, plan, mesh) if plan.layout.pp > 1 else None
    whole, anatomy = anatomy, stages.cut.anatomy if stages else anatomy
    tensor = tensor_parallel(model, whole, anatomy, plan, mesh, seen)
    compiled = plan.compile.mode == "block"
    # Products whose backward is split are left out of compiled code, which recomputation cannot have inside itself then.
    inside = not (stages and stages.splits)
    if compiled and not inside:
        compile_blocks(model, anatomy)
    apply_recompute(model, anatomy, plan.recompute, adapter_rank=plan.adapter.rank)
    if compiled and inside:
        compile_blocks(model, anatomy)
    head = None
    if plan.loss.kind == "chunked" and (anatomy.head or not stages):
        wide = TORCH_DTYPE[plan.precision.loss]
        rows = tensor.vocabulary if tensor else None
        head = chunked_head(model, anatomy, plan.loss.chunk_tokens, wide, compiled=compiled, vocabulary=rows)
    parts = units(model, anatomy, table_apart=bool(stages and stages.tied and plan.shard.carrier == "flat"))
    maker = _Maker(model, parts, plan, mesh, stages, tensor, adapters, wanted)
    carrier = carry(model, parts, plan, mesh, maker.make)
    if stages and stages.splits:
        split_backward(module for unit in parts if unit.name != "root" for module in unit.modules)
    uncounted = {stages.cut.tied} if stages and not stages.cut.counts_tied else set()
    weights = carrier.weights(model, plan, maker.roles, maker.shapes, uncounted, tensor)
    if weights.cast:
        cast_at_borders(parts, plan.precision)
    optimizer = carrier.optimizer(weights, plan)
    if stages:
        stages.require_same_part(weights)
    return Applied(
        anatomy=anatomy,
        mesh=mesh,
        carrier=carrier,
        weights=weights,
        optimizer=optimizer,
        head=head,
        tensor=tensor,
        adapters=adapters,
        stages=stages,
        executor=executor_of(stages, plan, mesh, carrier, parts) if stages else None,
    )


class _Maker:
    """Gives units their weights, each parameter once."""

    def __init__(
        self,
        model: nn.Module,
        parts: tuple[Unit, ...],
        plan: Plan,
        mesh: Mesh,
        stages: Stages | None,
        tensor: TensorParallel | None,
        adapters: Adapters | None,
        wanted: Wanted,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._tensor = tensor
        self._plan = plan
        self._device = mesh.device
        self._stages = stages
        self._copies = mesh.group("dp_replicate", "dp_shard", "tp")
        self._places = places_of(model)
        self._old = dict(zip((unit.name for unit in parts), parameters_by_unit(parts), strict=True))
        folder = weights_directory(plan.model.source)
        self._files = WeightFiles(folder, model, wanted) if folder else None
        if self._files:
            self._files.load_buffers(model)
        self.shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        self.roles: dict[int, Role] = {}

    def make(self, unit: Unit) -> None:
        """Memory, then values: from a file, from seed and name, or the user's own; then this rank's share of them."""
        old = self._old[unit.name]
        absent = {id(p) for p in old if p.is_meta}
        made = materialise(old, self._places, self._device, TORCH_DTYPE[self._plan.precision.master])
        fresh = {id(made[key]) for key in absent}
        if self._files is None:
            initialise(self._model, unit, fresh, self._places, self._plan.recipe.seed)
        for param in made.values():
            names = [name for _, _, name in self._places[id(param)]]
            if self._adapters and names[0] in self._adapters.matrices:
                self._adapters.fill(names[0], self._plan.recipe.seed)
            elif id(param) in fresh and self._files is not None:
                self._files.load(names, param)
            elif id(param) not in fresh:
                self._share(param)
            if self._adapters and not param.requires_grad:  # held once, as it is computed with
                param.data = param.data.to(compute_dtype(self._plan.precision, unit.role))
        self.roles |= {id(self._cut(p)): unit.role for p in made.values()}

    def _share(self, param: nn.Parameter) -> None:
        """The user's own values: all ranks that hold them start from those of the first."""
        if self._copies is not None:
            dist.broadcast(param.data, group=self._copies, group_src=0)
        stages = self._stages
        if stages and stages.tied and stages.cut.tied in [name for _, _, name in self._places[id(param)]]:
            dist.broadcast(param.data, group=stages.tied, group_src=0)

    def _cut(self, whole: nn.Parameter) -> nn.Parameter:
        """The part that is this rank's, in all the places where the parameter stands."""
        where = self._places[id(whole)]
        name = where[0][2]
        cut = self._tensor.cut(name) if self._tensor else None
        if cut is None:
            return whole
        piece = Piece(name=name, shape=tuple(whole.shape), cut=cut)
        part = nn.Parameter(whole.new_empty(piece.cut_shape), requires_grad=whole.requires_grad)
        take(whole.detach(), piece, part.detach())
        self._places[id(part)] = self._places.pop(id(whole))
        for module, attribute, _ in where:
            setattr(module, attribute, part)
        return part


def _refuse(model: nn.Module, anatomy: Anatomy, plan: Plan, device: torch.device) -> None:
    """What can only be known with the model and the device at hand."""
    if plan.compile.mode == "block":
        require_compiler(device)
    if plan.loss.kind == "chunked" and head_is_last(model, anatomy) is False:
        raise altered_logits()
    if plan.workload.documents == "separate" and not hasattr(model, "get_input_embeddings"):
        raise RuleBroken(
            f"workload.documents is separate, but {type(model).__name__} is no transformers model, whose attention can be told",
            fix="set workload.documents = 'across'",
        )
    precision = plan.precision
    if anatomy.tied and precision.cast == "weights" and precision.embedding != precision.head:
        raise RuleBroken(
            f"precision: embedding is {precision.embedding}, head {precision.head}, but this model ties them",
            fix="set both to the same",
        )
