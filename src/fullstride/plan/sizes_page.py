"""The sizes of micro-batches by stage as part of a page: the plan's own beside what the simulator would choose."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.errors import DoesNotFit, RuleBroken
from fullstride.model.spec import ModelSpec
from fullstride.plan.pipeline import choose_sizes, samples_of, sizes_of
from fullstride.plan.plan import Plan
from fullstride.plan.refine import ACTIONS, MOST_SIZED
from fullstride.plan.schedule.sizes import SizeTrial
from fullstride.plan.simulate import PipelineTimeline
from fullstride.plan.stages import num_stages
from fullstride.report.document import AnyBlock, Column, Heading, Table, TableRow, Text
from fullstride.units import format_bytes, format_percent, format_seconds

_NOTE = (
    "Proportional: sizes in proportion to each stage's compute, by powers of two, from the best single size. It gives the "
    "largest micro-batches to the stages that work longest, which it does not shorten."
)
_LEAST_TRIES = 8


def sizes_blocks(plan: Plan, spec: ModelSpec, cluster: Cluster, timeline: PipelineTimeline) -> tuple[AnyBlock, ...]:
    """A table of sizes; empty where there is no choice, or too much to simulate.

    Args:
        plan: with pp above 1.
        spec: its model.
        cluster: where.
        timeline: the plan's own, simulated.
    """
    passes = num_stages(plan) * plan.batch.accumulation
    if plan.layout.pp == 1 or plan.pipeline.schedule_file or samples_of(plan) == 1 or passes > MOST_SIZED:
        return ()
    tries = max(_LEAST_TRIES, ACTIONS // (4 * num_stages(plan) * samples_of(plan)))
    try:
        choice = choose_sizes(plan, spec, cluster, most_tries=tries)
    except (DoesNotFit, RuleBroken) as error:
        return (Heading(text="Micro-batch sizes by stage"), Text(text=f"{error.message}."))
    peaks = tuple(rank.peak_bytes for rank in timeline.ranks)
    own = _row("this plan", sizes_of(plan), timeline.step_seconds, timeline.bubble_share, peaks)
    named = (("best of one size", choice.uniform), ("chosen by simulation", choice.best), ("proportional", choice.proportional))
    rows = [own, *(_trial(name, trial) for name, trial in named)]
    names = ("", "samples of a micro-batch", "step", "bubble", "peaks by rank")
    columns = tuple(Column(name=name, align="right" if name in ("step", "bubble") else "left") for name in names)
    table = Table(title="Step and peak by simulation", columns=columns, rows=tuple(rows), note=_NOTE)
    return Heading(text="Micro-batch sizes by stage"), table


def _trial(name: str, trial: SizeTrial | None) -> TableRow:
    if trial is None:
        return TableRow(cells=(name, "none that the schedule can work with", "-", "-", "-"))
    row = _row(name, trial.sizes, trial.step_seconds, trial.bubble_share, trial.peak_bytes)
    if not trial.excess_bytes:
        return row
    return TableRow(cells=(*row.cells[:-1], f"{row.cells[-1]}: does not fit"), tone="bad")


def _row(name: str, sizes: tuple[int, ...], step: float, bubble: float, peaks: tuple[float, ...]) -> TableRow:
    told = ", ".join(format_bytes(round(peak)) for peak in peaks)
    return TableRow(cells=(name, " ".join(map(str, sizes)), format_seconds(step), format_percent(bubble), told))
