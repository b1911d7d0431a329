"""Seconds of each stage of a pipeline for one micro-batch: what a schedule is simulated with."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.files import Value
from fullstride.model.spec import ModelSpec
from fullstride.plan.cost.lanes import Held, again, recomputed
from fullstride.plan.cost.logits import loss_passes
from fullstride.plan.cost.pieces import Piece, local_tokens, pieces
from fullstride.plan.facts import Part, compute_bytes
from fullstride.plan.plan import Plan
from fullstride.plan.stages import Stage, stages_of


class StageSeconds(Value, frozen=True, kw_only=True):
    """One stage, one micro-batch of `batch.micro_batch` samples."""

    index: int
    """Place in the model, first to last."""
    rank: int
    chunk: int
    forward: float
    input_grad: float
    """Backward of everything but the weights' gradients: what the stage before waits for."""
    weight_grad: float
    recompute: float
    """Forward work that is done again before backward."""
    bytes_sent: float
    """To the next stage forward, and to the one before backward; 0 from the last."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward + self.input_grad + self.weight_grad + self.recompute


def stage_seconds(plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[StageSeconds, ...]:
    """Every stage, in the order of the model. Weights' gradients are half of the products' backward."""
    found = pieces(plan, spec, cluster)
    place = {stack.first: index + 1 for index, stack in enumerate(spec.stacks)}
    cut = plan.layout.tp if plan.layout.sequence_parallel else 1
    size = local_tokens(plan) * spec.hidden_size * compute_bytes(plan) / cut
    logits = loss_passes(plan, spec, cluster).seconds
    stages = stages_of(plan, spec)
    last = len(stages) - 1
    return tuple(_seconds(stage, plan, found, place, logits, 0.0 if stage.index == last else size) for stage in stages)


def _seconds(
    stage: Stage, plan: Plan, found: tuple[tuple[Part, Piece], ...], place: dict[int, int], logits: float, size: float
) -> StageSeconds:
    counts = [(place[stack.first], count) for stack, count in stage.stacks]
    counts += [(0, 1)] * stage.has_embedding + [(len(found) - 1, 1)] * stage.has_head
    held = []
    for index, many in counts:
        part, piece = found[index]
        held.append(Held(many, part, piece, recomputed(plan, part, many, stage.num_blocks)))
    weights = sum(h.many * h.piece.products_backward / 2 for h in held)
    backward = sum(h.many * h.piece.backward for h in held) - weights
    ends = logits if stage.has_head else 0.0
    return StageSeconds(
        index=stage.index,
        rank=stage.rank,
        chunk=stage.chunk,
        forward=sum(h.many * h.piece.forward for h in held) + ends / 3,
        input_grad=backward + 2 * ends / 3,
        weight_grad=weights,
        recompute=sum(h.recomputed * again(plan, h.piece) for h in held),
        bytes_sent=size,
    )
