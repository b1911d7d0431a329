"""The pipeline planned beside the pipeline measured, as blocks of a page and as a file for Perfetto."""

from __future__ import annotations

from msgspec.structs import replace

from fullstride.cluster.cluster import Cluster
from fullstride.errors import FullstrideError
from fullstride.files import write_bytes
from fullstride.measure.pipeline import measured_timeline
from fullstride.model.spec import ModelSpec
from fullstride.plan.pipeline import plan_timeline
from fullstride.plan.plan import Plan
from fullstride.plan.simulate import PipelineTimeline
from fullstride.plan.timeline_page import timeline_block, timeline_blocks
from fullstride.report.document import AnyBlock, Column, Document, Heading, Table, TableRow, Text, Timeline
from fullstride.report.perfetto import trace_json
from fullstride.rundir import RunDir
from fullstride.units import format_percent, format_seconds

PERFETTO = "pipeline.json"
"""In a run directory: both timelines, for Perfetto."""


def pipeline_blocks(run_dir: RunDir, plan: Plan, spec: ModelSpec, cluster: Cluster) -> tuple[AnyBlock, ...]:
    """Both timelines, with what each rank waited for; empty without a pipeline.

    Args:
        run_dir: whose last profiled step is shown.
        plan: that ran.
        spec: its model.
        cluster: where, for the simulator.
    """
    if plan.layout.pp == 1:
        return ()
    planned, measured = _both(run_dir, plan, spec, cluster)
    if measured is None:
        return (Heading(text="The pipeline's timeline"), Text(text="No step was profiled on all ranks.", tone="quiet"))
    blocks: list[AnyBlock] = [Heading(text="The pipeline, planned and measured")]
    if planned is not None:
        blocks += [_beside(planned, measured), timeline_block(planned, title="Planned")]
    blocks += timeline_blocks(measured, title="Measured")
    return tuple(blocks)


def with_pipeline(document: Document, blocks: tuple[AnyBlock, ...]) -> Document:
    """A page with the pipeline at its end."""
    return replace(document, blocks=(*document.blocks, *blocks))


def write_perfetto(run_dir: RunDir, plan: Plan, spec: ModelSpec, cluster: Cluster) -> bool:
    """Write both timelines for Perfetto; whether there was one to write."""
    if plan.layout.pp == 1:
        return False
    planned, measured = _both(run_dir, plan, spec, cluster)
    if measured is None:
        return False
    bars = [replace(bar, lane=f"{bar.lane} measured") for bar in timeline_block(measured).bars]
    if planned is not None:
        bars += [replace(bar, lane=f"{bar.lane} planned") for bar in timeline_block(planned).bars]
    write_bytes(run_dir.path / PERFETTO, trace_json(Timeline(title="Pipeline", bars=tuple(bars))))
    return True


def _both(
    run_dir: RunDir, plan: Plan, spec: ModelSpec, cluster: Cluster
) -> tuple[PipelineTimeline | None, PipelineTimeline | None]:
    try:
        planned = plan_timeline(plan, spec, cluster)
    except FullstrideError:
        planned = None  # a model or machine that cannot be priced can be measured all the same
    return planned, measured_timeline(run_dir, plan)


def _beside(planned: PipelineTimeline, measured: PipelineTimeline) -> Table:
    rows = [
        TableRow(cells=("first forward to last backward", *map(format_seconds, (planned.span_seconds, measured.span_seconds)))),
        TableRow(cells=("bubble, mean over ranks", *map(format_percent, (planned.bubble_share, measured.bubble_share)))),
    ]
    for one, two in zip(planned.ranks, measured.ranks, strict=True):
        rows.append(TableRow(cells=(f"bubble of rank {one.rank}", *map(format_percent, (one.idle_share, two.idle_share)))))
    columns = (Column(name=""), Column(name="planned", align="right"), Column(name="measured", align="right"))
    note = "Measured: the share of the span in which a rank computes nothing of a forward or backward, under the profiler."
    return Table(title="Bubble", columns=columns, rows=tuple(rows), note=note)
