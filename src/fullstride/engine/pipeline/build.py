"""From a Plan to a pipeline: the schedule checked, the model cut, the ranks connected."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import nn

from fullstride.engine.anatomy import Anatomy, Unit
from fullstride.engine.mesh import Mesh
from fullstride.engine.parallel.carrier import Carrier
from fullstride.engine.pipeline.cut import Cut
from fullstride.engine.pipeline.exchange import Exchange
from fullstride.engine.pipeline.executor import Executor, forward_only
from fullstride.engine.pipeline.reducing import Reducing
from fullstride.engine.pipeline.tied import tied_group
from fullstride.engine.precision import TORCH_DTYPE, Weights
from fullstride.errors import RuleBroken
from fullstride.plan.pipeline import plan_schedule
from fullstride.plan.plan import DType, Plan
from fullstride.plan.schedule.checker import require_runnable
from fullstride.plan.schedule.text import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """A model cut to this rank's stages, before its weights are made."""

    schedule: Schedule
    cut: Cut
    tied: dist.ProcessGroup | None
    """The two ranks that share a tied weight; None unless this rank is one of them."""

    @property
    def splits(self) -> bool:
        """Whether gradients of inputs and of weights are made at different times."""
        return any(action.kind == "input_grad" for action in self.schedule.actions)

    def require_same_part(self, weights: Weights) -> None:
        """Let a tied weight pass of which both ranks hold the same part; collective among them.

        Raises:
            RuleBroken: they hold different parts, whose gradients cannot be summed.
        """
        if self.tied is None:
            return
        piece = weights.pieces[weights.names.index(self.cut.tied)]
        found: list[object] = [None, None]
        dist.all_gather_object(found, (piece.cut, piece.lo, piece.end), group=self.tied)
        if found[0] != found[1]:
            raise RuleBroken(
                f"{self.cut.tied} is tied over two pipeline stages, and they shard it differently",
                fix="use schedule zb-v, which puts both stages on one rank, or another carrier",
            )


def cut_to_stages(model: nn.Module, anatomy: Anatomy, plan: Plan, mesh: Mesh) -> Stages:
    """Cut a model, in place; collective.

    Args:
        model: unmodified.
        anatomy: its.
        plan: with pp above 1.
        mesh: of all ranks.

    Raises:
        RuleBroken: the schedule cannot be run (names the actions at fault), or the stages do not go with the model.
        BadInput: the model's blocks are no plain chain, or the schedule's file is none.
    """
    schedule = plan_schedule(plan)
    require_runnable(schedule.actions, schedule.placement, schedule.samples)
    rank = mesh.coordinate("pp")
    cut = Cut(model, anatomy, schedule.placement, rank, plan.pipeline.layers_per_stage, TORCH_DTYPE[_before_blocks(plan)])
    tied = tied_group(mesh, schedule.placement, plan.comm.timeout_seconds) if anatomy.tied else None
    return Stages(schedule=schedule, cut=cut, tied=tied if cut.tied else None)


def executor_of(stages: Stages, plan: Plan, mesh: Mesh, carrier: Carrier, units: tuple[Unit, ...]) -> Executor:
    """Connect the ranks; collective. `units`: of this rank's model, with their weights made."""
    schedule = stages.schedule
    exchange = Exchange(
        mesh,
        schedule.placement,
        (*schedule.actions, *forward_only(schedule, 1, 1)),
        (plan.workload.sequence_length // (plan.layout.tp if plan.layout.sequence_parallel else 1), stages.cut.width),
        TORCH_DTYPE[hidden_dtype(plan)],
        plan.comm.timeout_seconds,
    )
    reducing = Reducing(carrier, stages.cut.chunks, units)
    return Executor(schedule, mesh.coordinate("pp"), stages.cut, reducing, exchange, plan.workload.sequence_length)


def hidden_dtype(plan: Plan) -> DType:
    """What goes from stage to stage: the blocks' dtype where weights are cast, else the masters', in which residuals are
    added under autocast too.
    """
    return plan.precision.block if plan.precision.cast == "weights" else plan.precision.master


def _before_blocks(plan: Plan) -> DType:
    return plan.precision.embedding if plan.precision.cast == "weights" else plan.precision.master
