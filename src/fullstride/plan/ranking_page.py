"""A ranking for a person: the best few side by side, what this version runs of them, and why each neighbour lost."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fullstride.cluster.cluster import Cluster
from fullstride.plan.estimate import Candidate, Estimate
from fullstride.plan.placement import is_uneven, placement
from fullstride.plan.plan import Plan
from fullstride.plan.rules import not_run
from fullstride.plan.search import Ranking
from fullstride.plan.space import short, summary
from fullstride.report.document import Column, Table, TableRow, Text, Tone
from fullstride.units import format_bytes, format_count, format_percent, format_seconds

DAY_SECONDS = 86400.0
TARGET_SHARE = 0.65
"""Under this share of the device's memory, saving more buys nothing."""


def gpu_days(plan: Plan, estimate: Estimate, tokens: float) -> float:
    """Days of one device that a budget of tokens takes."""
    return tokens / estimate.tokens_per_second * plan.layout.world_size / DAY_SECONDS


def _share(value: float | None) -> str:
    return "unknown" if value is None else format_percent(value)


def best_table(ranking: Ranking, tokens: float | None = None) -> Table:
    """The best few: memory, time, rate, both MFUs, and what a budget of tokens costs."""
    runs = ranking.runs or (True,) * len(ranking.best)
    pairs = [*zip(ranking.best, ranking.estimates, runs, strict=True)]
    if ranking.runnable and ranking.runnable_estimate:
        pairs.append((ranking.runnable, ranking.runnable_estimate, True))
    names = ["plan", "step", "tokens/s", "memory", "MFU"] + (["GPU-days"] if tokens else []) + ["runs"]
    rows = []
    for plan, estimate, runnable in pairs:
        cells = [
            short(plan),
            format_seconds(estimate.step_seconds),
            format_count(estimate.tokens_per_second),
            format_bytes(estimate.peak_device_bytes),
            f"{_share(estimate.mfu_full)}, {_share(estimate.mfu_causal)}",
        ]
        cells += [f"{gpu_days(plan, estimate, tokens):,.0f}"] if tokens else []
        cells += ["yes" if runnable else "not yet"]
        rows.append(TableRow(cells=tuple(cells), tone="good" if plan is ranking.best[0] else "plain"))
    note = "MFU with attention counted whole, and causal. Not yet: priced, and not run by this version."
    note += f" GPU-days for {format_count(tokens)} tokens." if tokens else ""
    columns = tuple(Column(name=name, align="left" if name in ("plan", "runs") else "right") for name in names)
    return Table(title="The best plans", columns=columns, rows=tuple(rows), note=note)


def runs_words(ranking: Ranking, cluster: Cluster) -> tuple[Text, ...]:
    """Whether the best plan can be run today, and which one can."""
    best = ranking.best[0]
    if not ranking.runs or ranking.runs[0]:
        return ()
    why = not_run(best, None, cluster)
    told = f"This version prices the best plan and does not run it: {why[0].message}." if why else ""
    other = ranking.runnable_estimate
    if ranking.runnable is None or other is None:
        return (Text(text=f"{told} No plan that it runs fits.", tone="warn"),)
    slower = other.step_seconds / ranking.estimates[0].step_seconds - 1
    told += f" The best that it runs is {slower:.1%} slower: {summary(ranking.runnable)}."
    return (Text(text=told.strip(), tone="warn"),)


def placement_words(plan: Plan, cluster: Cluster) -> tuple[Text, ...]:
    """Where each axis lies."""
    lines = [place.words for place in placement(plan, cluster)]
    if is_uneven(cluster):
        lines.append("nodes differ: every figure is that of the slowest, which the others wait for")
    return tuple(Text(text=line, tone="quiet") for line in lines)


def target_words(estimate: Estimate) -> tuple[Text, ...]:
    """Where saving more memory would buy nothing."""
    share = estimate.peak_device_bytes / estimate.capacity_bytes
    if share > TARGET_SHARE:
        return ()
    told = f"{share:.0%} of the device's memory is used, under the target of {TARGET_SHARE:.0%}: saving more buys nothing."
    return (Text(text=told, tone="quiet"),)


def neighbours_table(candidates: tuple[Candidate, ...], winner: Estimate) -> Table:
    """Plans one step away, each with the one term that lost it."""
    tones: list[Tone] = ["quiet" if c.lost_by.startswith("does not fit") else "plain" for c in candidates]
    note = "All else held, but for what follows from the change."
    return candidate_table("One step away from the best plan", "change", candidates, winner.step_seconds, tones, note)


def candidates_table(candidates: tuple[Candidate, ...]) -> Table:
    """The winner and the runners-up, each with the one term that lost it."""
    told = tuple(c if c.lost_by else msgspec.structs.replace(c, lost_by="fastest that fits") for c in candidates)
    tones: list[Tone] = ["plain" if c.lost_by else "good" for c in candidates]
    return candidate_table("Plans by predicted step", "plan", told, candidates[0].step_seconds, tones)


def candidate_table(
    title: str, first: str, candidates: Sequence[Candidate], fastest: float, tones: Sequence[Tone], note: str = ""
) -> Table:
    """Plans with step, step over `fastest` (seconds), memory and reason; `first` names the column of summaries."""
    rows = tuple(
        TableRow(
            cells=(
                c.summary,
                format_seconds(c.step_seconds),
                f"{c.step_seconds / fastest:.3f}",
                format_bytes(c.peak_device_bytes),
                c.lost_by,
            ),
            tone=tone,
        )
        for c, tone in zip(candidates, tones, strict=True)
    )
    figures = tuple(Column(name=name, align="right") for name in ("step", "over best", "memory"))
    return Table(title=title, columns=(Column(name=first), *figures, Column(name="lost by")), rows=rows, note=note)
