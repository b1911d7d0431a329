"""A prediction as a Document: the ledger, the terms, the moments, and why the runners-up lost."""

from __future__ import annotations

from fullstride.cluster.cluster import Cluster
from fullstride.model.spec import ModelSpec
from fullstride.plan.calibration import words_of
from fullstride.plan.cost.comm import volumes
from fullstride.plan.estimate import Candidate, Estimate, Moment, MomentName, Row, RowKind
from fullstride.plan.facts import num_parameters
from fullstride.plan.folklore import gain_words, notes
from fullstride.plan.ledger.table import moments_of
from fullstride.plan.plan import Plan
from fullstride.plan.ranking_page import (
    best_table,
    candidates_table,
    neighbours_table,
    placement_words,
    runs_words,
    target_words,
)
from fullstride.plan.search import Ranking
from fullstride.plan.space import summary
from fullstride.report.document import AnyBlock, Column, Document, Heading, Stat, Stats, Table, TableRow, Text
from fullstride.units import format_bytes, format_count, format_percent, format_seconds

MOMENT_WORDS: dict[MomentName, str] = {
    "load": "between steps",
    "first_step": "in the first step",
    "forward_end": "at the end of forward, logits and all activations standing",
    "loss": "in the loss's backward, all activations standing",
    "backward": "in the last block's backward, all activations standing",
    "backward_end": "at the end of backward, all gradients standing",
    "optimizer": "in the optimizer's step",
    "checkpoint": "while saving",
}
CHEAPER: dict[RowKind, str] = {
    "activations": "recompute norms and activations, or a smaller micro-batch",
    "logits": "a chunked loss",
    "optimizer": "more ranks to share the states, or a higher ZeRO stage",
    "master": "more ranks to share the states",
    "weights": "a higher ZeRO stage, or weights cast to bf16",
    "gradients": "a higher ZeRO stage",
    "gathered": "ZeRO-3, which frees weights after forward",
    "temporary": "a smaller micro-batch",
    "recompute": "a smaller micro-batch",
}
"""What makes the largest rows of a kind smaller; kinds without an entry have no lever."""


def explain_plan(
    plan: Plan, estimate: Estimate, spec: ModelSpec, cluster: Cluster, candidates: tuple[Candidate, ...] = ()
) -> Document:
    """Everything behind one plan's prediction; runners-up too where a search is at hand."""
    blocks: list[AnyBlock] = [
        *machine(cluster),
        Text(text=f"{summary(plan)}. {_work(plan, spec)}"),
        _figures(plan, estimate),
        *_fit(estimate),
        *(target_words(estimate) if estimate.fits else ()),
        *placement_words(plan, cluster),
        *(Text(text=f"Warning: {words}", tone="warn") for words in estimate.warnings),
        Heading(text="Where the time goes"),
        terms_table(estimate),
        *_volumes(plan, spec),
        Heading(text="Where the memory goes"),
        rows_table(estimate),
        moments_table(estimate),
        *stages_tables(estimate),
    ]
    if told := notes(plan, spec):
        blocks += [Heading(text="Good to know"), *(Text(text=words) for words in told)]
    if candidates:
        blocks += [Heading(text="Why the others lost"), candidates_table(candidates)]
    return Document(
        title=f"{spec.name} on {plan.layout.world_size} x {cluster.device.kind}",
        subtitle="predicted, not measured",
        blocks=tuple(blocks),
    )


def explain_ranking(ranking: Ranking, spec: ModelSpec, cluster: Cluster, tokens: float | None = None) -> Document:
    """The best few, the winner explained, why its neighbours lost, and what was considered.

    `tokens` is a budget, whose cost in GPU-days is shown.
    """
    document = explain_plan(ranking.best[0], ranking.estimates[0], spec, cluster, ranking.candidates)
    told = Text(
        text=f"{ranking.considered} plans considered, {ranking.num_fitting} fit. Varied: {ranking.space}.",
        tone="quiet",
    )
    first = len(machine(cluster))
    near: list[AnyBlock] = []
    if ranking.neighbours:
        near = [Heading(text="Why not a little different"), neighbours_table(ranking.neighbours, ranking.estimates[0])]
    blocks = (
        *document.blocks[:first],
        best_table(ranking, tokens),
        *runs_words(ranking, cluster),
        Heading(text="The best plan"),
        *document.blocks[first:],
        *near,
        told,
    )
    return Document(title=document.title, subtitle=document.subtitle, blocks=blocks)


def machine(cluster: Cluster) -> tuple[Text, ...]:
    """The line about the machine that comes first: a warning where nobody probed it."""
    group, device = cluster.groups[0], cluster.device
    network = group.network
    told = (
        f"{cluster.num_devices} x {device.name or device.kind} ({format_bytes(device.memory_bytes.value)} each), "
        f"{group.num_devices} a node, {group.link.name} inside"
    )
    if network:
        told += f", {network.name} between nodes at {network.bandwidth.value * 8 / 1e9:.0f} Gbit/s a device"
    if cluster.assumed:
        return (Text(text=f"Assumed cluster, nobody probed it: {told}; {words_of(cluster)}.", tone="warn"),)
    measured = "measured" if cluster.matmuls else f"not measured: figures of data sheets; {words_of(cluster)}"
    return (Text(text=f"{told}; {measured}.", tone="quiet"),)


def _work(plan: Plan, spec: ModelSpec) -> str:
    work = plan.workload
    samples = f"{work.samples_per_step} samples of {work.sequence_length} tokens"
    return f"{format_count(num_parameters(spec))} parameters, {samples} a step."


def _mfu(share: float | None) -> str:
    return "unknown" if share is None else format_percent(share)


def _figures(plan: Plan, estimate: Estimate) -> Stats:
    per_rank = estimate.tokens_per_second / plan.layout.world_size
    capacity, allocated = format_bytes(estimate.capacity_bytes), format_bytes(estimate.peak_allocated_bytes)
    unknown = "the device's peak is unknown" if estimate.mfu_full is None else ""
    return Stats(
        items=(
            Stat(label="step", value=format_seconds(estimate.step_seconds)),
            Stat(label="tokens/s", value=format_count(estimate.tokens_per_second), note=f"{format_count(per_rank)} a rank"),
            Stat(label="MFU, attention whole", value=_mfu(estimate.mfu_full), note=unknown),
            Stat(label="MFU, attention causal", value=_mfu(estimate.mfu_causal), note=unknown),
            Stat(
                label="memory",
                value=format_bytes(estimate.peak_device_bytes),
                note=f"of {capacity} a device; {allocated} allocated",
                tone="good" if estimate.fits else "bad",
            ),
        )
    )


def _fit(estimate: Estimate) -> tuple[Text, ...]:
    """How a plan that does not fit fails, and what would shrink the largest kind at the peak."""
    if estimate.fits:
        return ()
    peak = _peak(moments_of(estimate.rows))
    sizes: dict[RowKind, int] = {}
    for row in _fullest(estimate):
        if peak.name in row.moments:
            sizes[row.kind] = sizes.get(row.kind, 0) + row.bytes
    kind = max((kind for kind in sizes if kind in CHEAPER), key=lambda kind: sizes[kind])
    over = estimate.peak_device_bytes - estimate.capacity_bytes
    text = (
        f"Does not fit: {format_bytes(over)} too much {MOMENT_WORDS[peak.name]}. The largest kind is {kind} "
        f"({format_bytes(sizes[kind])}); what shrinks it: {CHEAPER[kind]}."
    )
    return (Text(text=text, tone="bad"),)


def terms_table(estimate: Estimate) -> Table:
    """Terms, largest addition to the step first; the last row is the step."""
    rows = [
        TableRow(
            cells=(
                term.name,
                format_seconds(term.seconds),
                format_seconds(term.exposed_seconds),
                format_percent(term.exposed_seconds / estimate.step_seconds),
                term.confidence,
                term.source,
            )
        )
        for term in sorted(estimate.terms, key=lambda term: -term.exposed_seconds)
    ]
    work = sum(term.seconds for term in estimate.terms)
    rows.append(
        TableRow(cells=("step", format_seconds(work), format_seconds(estimate.step_seconds), "100 %", "", ""), tone="good")
    )
    return Table(
        title="Time of one step",
        columns=(
            Column(name="term"),
            Column(name="work", align="right"),
            Column(name="adds to the step", align="right"),
            Column(name="share", align="right"),
            Column(name="confidence"),
            Column(name="from"),
        ),
        rows=tuple(rows),
        note="Work that runs beside other work adds less than it takes.",
    )


def _peak(moments: tuple[Moment, ...]) -> Moment:
    """The fullest moment; of equal ones that which says where in a step it is."""
    return max(moments, key=lambda moment: (moment.bytes, moment.name not in ("load", "first_step", "checkpoint")))


def peaks_by_stage(rows: tuple[Row, ...]) -> dict[int, Moment]:
    """The fullest moment of each pipeline rank."""
    ranks = sorted({row.stage for row in rows})
    return {rank: _peak(moments_of(tuple(row for row in rows if row.stage == rank))) for rank in ranks}


def _fullest(estimate: Estimate) -> tuple[Row, ...]:
    """Rows of the pipeline rank with the highest peak."""
    peaks = peaks_by_stage(estimate.rows)
    rank = max(peaks, key=lambda rank: peaks[rank].bytes)
    return tuple(row for row in estimate.rows if row.stage == rank)


def stages_tables(estimate: Estimate) -> tuple[Table, ...]:
    """Where there is a pipeline: each of its ranks with its peak and its largest kinds."""
    peaks = peaks_by_stage(estimate.rows)
    if len(peaks) < 2:
        return ()
    rows = []
    for rank, peak in peaks.items():
        sizes: dict[RowKind, int] = {}
        for row in estimate.rows:
            if row.stage == rank and peak.name in row.moments:
                sizes[row.kind] = sizes.get(row.kind, 0) + row.bytes
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        told = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in largest)
        rows.append(TableRow(cells=(str(rank), format_bytes(peak.bytes), MOMENT_WORDS[peak.name], told)))
    columns = (Column(name="rank"), Column(name="peak", align="right"), Column(name="when"), Column(name="largest kinds"))
    return (Table(title="Memory by pipeline rank", columns=columns, rows=tuple(rows)),)


def rows_table(estimate: Estimate) -> Table:
    """Rows of the fullest rank that are there at the peak first, largest first; then the others."""
    peak = _peak(estimate.moments)

    def order(row: Row) -> tuple[bool, int]:
        return peak.name not in row.moments, -row.bytes

    rows = [
        TableRow(
            cells=(
                row.name,
                row.kind,
                format_bytes(row.bytes),
                "yes" if peak.name in row.moments else "no",
                row.confidence,
                row.source,
            ),
            tone="plain" if peak.name in row.moments else "quiet",
        )
        for row in sorted(_fullest(estimate), key=order)
    ]
    rows.append(TableRow(cells=("peak", "", format_bytes(peak.bytes), "", "", f"{MOMENT_WORDS[peak.name]}"), tone="good"))
    return Table(
        title="Memory of the fullest rank",
        columns=(
            Column(name="row"),
            Column(name="kind"),
            Column(name="bytes", align="right"),
            Column(name="at the peak"),
            Column(name="confidence"),
            Column(name="from"),
        ),
        rows=tuple(rows),
    )


def moments_table(estimate: Estimate) -> Table:
    """Sums at each moment; the peak stands out, with the largest row that makes it so."""
    peak, fullest = _peak(estimate.moments), _fullest(estimate)
    rows = []
    for moment in estimate.moments:
        here = [row for row in fullest if moment.name in row.moments]
        if not here:
            continue
        largest = max(here, key=lambda row: row.bytes)
        rows.append(
            TableRow(
                cells=(
                    MOMENT_WORDS[moment.name],
                    format_bytes(moment.bytes),
                    f"{largest.name} ({format_bytes(largest.bytes)})",
                ),
                tone="warn" if moment.name == peak.name else "plain",
            )
        )
    return Table(
        title="Memory through a step",
        columns=(Column(name="moment"), Column(name="bytes", align="right"), Column(name="largest row")),
        rows=tuple(rows),
    )


def _volumes(plan: Plan, spec: ModelSpec) -> tuple[Text, ...]:
    if plan.layout.world_size == 1:
        return ()
    moved, count = volumes(plan, spec), num_parameters(spec)
    if not moved.total:
        return ()
    words = [
        f"{name} {share / count:.3g}P"
        for name, share in (("gathers", moved.gathered), ("reduce-scatters", moved.reduced), ("all-reduces", moved.all_reduced))
        if share
    ]
    told = f"Each step moves {moved.total / count:.3g}P elements a rank for data parallelism ({', '.join(words)})."
    return (Text(text=told, tone="quiet"),)


def against_blocks(plan: Plan, estimate: Estimate, other: Plan, its: Estimate) -> list[AnyBlock]:
    """Two plans side by side: what they do in a second, which alone compares unequal steps, and the terms that differ."""
    tokens, others = (p.workload.samples_per_step * p.workload.sequence_length for p in (plan, other))
    words = gain_words(its.step_seconds, others, estimate.step_seconds, tokens)
    mine, theirs = ({t.name: t.exposed_seconds / n for t in e.terms} for e, n in ((estimate, tokens), (its, others)))
    names = sorted({**theirs, **mine}, key=lambda name: -abs(mine.get(name, 0.0) - theirs.get(name, 0.0)))
    rows = [
        (name, format_seconds(1e6 * mine.get(name, 0.0)), format_seconds(1e6 * theirs.get(name, 0.0))) for name in names[:8]
    ]
    rows.append(("all", format_seconds(1e6 * estimate.step_seconds / tokens), format_seconds(1e6 * its.step_seconds / others)))
    columns = (Column(name="term"), Column(name="this", align="right"), Column(name="other", align="right"))
    return [
        Heading(text="Against the other plan"),
        Text(text=f"The other: {summary(other)}."),
        Text(text=f"{words} Predicted, not measured."),
        Table(title="Time of a million tokens", columns=columns, rows=tuple(TableRow(cells=cells) for cells in rows)),
    ]
