"""How blocks, embedding and head lie on pipeline stages, and stages on ranks.

A rank holds `chunks` stages. With interleaving, chunk c of rank r is stage c p + r (Narayanan et al., arXiv 2104.04473); in a
V (ZB-V, Qi et al., arXiv 2405.15362) the second chunk runs back: stage 2p - 1 - r.
"""

from __future__ import annotations

from fullstride.files import Value
from fullstride.model.spec import ModelSpec, Stack
from fullstride.plan.plan import Layout, Plan


class Stage(Value, frozen=True, kw_only=True):
    """A part of the model that one rank runs in one go."""

    index: int
    """Place in the model, first to last."""
    rank: int
    """The pipeline rank that holds it."""
    chunk: int
    """Which of that rank's stages."""
    stacks: tuple[tuple[Stack, int], ...]
    """Runs of equal blocks, and how many of them are here."""
    has_embedding: bool
    has_head: bool

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return sum(count for _, count in self.stacks)


def num_stages(plan: Plan) -> int:
    """Stages of the whole pipeline."""
    return plan.layout.pp * chunks_of(plan)


def chunks_of(plan: Plan) -> int:
    """Stages on each rank; a V has two whatever the plan says."""
    if plan.layout.pp == 1:
        return 1
    return 2 if plan.pipeline.schedule == "zb-v" else max(1, plan.pipeline.chunks)


def blocks_per_stage(plan: Plan, spec: ModelSpec) -> tuple[int, ...]:
    """Blocks of each stage: as the plan says, else as even as possible, the first ones taking what is left over."""
    stages = num_stages(plan)
    if len(plan.pipeline.layers_per_stage) == stages:
        return plan.pipeline.layers_per_stage
    each, over = divmod(spec.num_blocks, stages)
    return tuple(each + (index < over) for index in range(stages))


def pipeline_place(layout: Layout, rank: int) -> int:
    """The pipeline rank of a rank of the world."""
    for axis in reversed([axis for axis in layout.order if axis != "ep"]):
        rank, place = divmod(rank, getattr(layout, axis))
        if axis == "pp":
            return int(place)
    return 0


def place_of(plan: Plan, index: int) -> tuple[int, int]:
    """Rank and chunk of a stage."""
    chunk, rank = divmod(index, plan.layout.pp)
    if plan.pipeline.schedule == "zb-v" and chunk % 2:
        rank = plan.layout.pp - 1 - rank
    return rank, chunk


def stages_of(plan: Plan, spec: ModelSpec) -> tuple[Stage, ...]:
    """All stages, first to last; blocks beyond what `layers_per_stage` names are not placed."""
    found, first = [], 0
    counts = blocks_per_stage(plan, spec)
    for index, count in enumerate(counts):
        rank, chunk = place_of(plan, index)
        found.append(
            Stage(
                index=index,
                rank=rank,
                chunk=chunk,
                stacks=_cut(spec, first, first + count),
                has_embedding=index == 0,
                has_head=index == len(counts) - 1,
            )
        )
        first += count
    return tuple(found)


def _cut(spec: ModelSpec, low: int, high: int) -> tuple[tuple[Stack, int], ...]:
    """The runs of equal blocks between two places in the model."""
    found, start = [], 0
    for stack in spec.stacks:
        count = min(high, start + stack.count) - max(low, start)
        if count > 0:
            found.append((stack, count))
        start += stack.count
    return tuple(found)
