"""Where the stages of a pipeline stand, and how samples are cut into micro-batches."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from fullstride.errors import RuleBroken
from fullstride.files import Value

Style = Literal["loop", "v"]


class Placement(Value, frozen=True, kw_only=True):
    """Which rank and chunk holds which stage; stages count from the embedding to the head."""

    pp: int
    """Ranks of the pipeline."""
    chunks: int = 1
    """Stages on each rank."""
    style: Style = "loop"
    """`loop`: stages go round the ranks again and again; `v`: every second round runs backwards (ZB-V)."""

    @property
    def num_stages(self) -> int:
        """Stages in all."""
        return self.pp * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The stage that a rank holds as its chunk."""
        turned = self.style == "v" and chunk % 2 == 1
        return chunk * self.pp + (self.pp - 1 - rank if turned else rank)

    def home(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        chunk, place = divmod(stage, self.pp)
        return (self.pp - 1 - place if self.style == "v" and chunk % 2 == 1 else place), chunk


class ScheduleRule(Value, frozen=True, kw_only=True):
    """What a schedule asks of the layout."""

    least_chunks: int = 1
    most_chunks: int = 1
    """0 for any number."""
    style: Style = "loop"
    splits_backward: bool = False
    """Whether it does the gradients of inputs and of weights at different times."""
    full_rounds: bool = False
    """Whether it needs a micro-batch for each rank at least, to have one round."""


SCHEDULES: dict[str, ScheduleRule] = {
    "none": ScheduleRule(),
    "gpipe": ScheduleRule(),
    "1f1b": ScheduleRule(),
    "interleaved": ScheduleRule(least_chunks=2, most_chunks=0, full_rounds=True),
    "bfs": ScheduleRule(most_chunks=0),
    "zb-h1": ScheduleRule(splits_backward=True),
    "zb-v": ScheduleRule(least_chunks=2, most_chunks=2, style="v", splits_backward=True),
}
"""`none` is one rank that accumulates gradients."""


def placement_of(schedule: str, pp: int, chunks: int) -> Placement:
    """The placement that a schedule works on.

    Raises:
        RuleBroken: the schedule does not exist, or not with so many ranks or chunks.
    """
    rule = SCHEDULES.get(schedule)
    if rule is None:
        raise RuleBroken(f"pipeline.schedule = {schedule!r} is no schedule", fix=f"use one of {', '.join(SCHEDULES)}")
    if pp < 1 or (schedule == "none" and pp != 1):
        raise RuleBroken(f"layout.pp = {pp} with schedule {schedule}", fix="schedule none is for pp 1, the others for pp >= 1")
    if chunks < rule.least_chunks or (rule.most_chunks and chunks > rule.most_chunks):
        wanted = f"{rule.least_chunks}" + ("" if rule.most_chunks == rule.least_chunks else " or more")
        raise RuleBroken(f"pipeline.chunks = {chunks}, schedule {schedule} needs {wanted}", fix=f"set chunks to {wanted}")
    return Placement(pp=pp, chunks=chunks, style=rule.style)


def least_micro_batches(schedule: str, pp: int) -> int:
    """Micro-batches below which the schedule is refused: interleaving goes round all ranks at least once."""
    return pp if SCHEDULES[schedule].full_rounds else 1


def cuts(lo: int, hi: int, size: int) -> list[tuple[int, int]]:
    """[lo, hi) in ranges of `size`, the last one shorter where it must be."""
    return [(at, min(at + size, hi)) for at in range(lo, hi, size)]


def stage_sizes(placement: Placement, samples: int, micro_batch: int | tuple[int, ...]) -> tuple[int, ...]:
    """Samples of a micro-batch for each stage; one number is meant for all.

    Raises:
        RuleBroken: a size below 1, not one for each stage, or neighbours that do not differ by an integer factor: then a
            micro-batch of one stage would need parts of two of the other.
    """
    sizes = (micro_batch,) * placement.num_stages if isinstance(micro_batch, int) else tuple(micro_batch)
    if len(sizes) != placement.num_stages:
        raise RuleBroken(
            f"{len(sizes)} micro-batch sizes for {placement.num_stages} stages",
            fix="give one for each stage, or one for all",
        )
    if samples < 1 or min(sizes) < 1:
        raise RuleBroken(f"{samples} samples in micro-batches of {sizes}: all must be at least 1", fix="give larger numbers")
    for stage, (one, two) in enumerate(pairwise(sizes)):
        if max(one, two) % min(one, two):
            raise RuleBroken(
                f"micro-batches of {one} and {two} samples on stages {stage} and {stage + 1}: no integer factor",
                fix="make one a multiple of the other",
            )
    return sizes
