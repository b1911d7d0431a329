"""What software is taken to reach of the hardware, figure by figure, with where each is from."""

from __future__ import annotations

from msgspec.structs import asdict

from fullstride.cluster.cluster import DEFAULT_COEFFICIENTS, Cluster
from fullstride.report.document import Column, Table, TableRow
from fullstride.units import format_percent, format_seconds

WORDS: dict[str, str] = {
    "matmul_share": "of the 16-bit peak, large products",
    "fp8_share": "of the fp8 peak, large products",
    "fp4_share": "of the fp4 peak, large products",
    "matmul_depth": "inner size that costs as much as filling a tile",
    "wave_loss": "of an unfilled last wave of tiles is lost",
    "attention_forward": "of the 16-bit peak, flash attention forward",
    "attention_backward": "of the 16-bit peak, flash attention backward",
    "attention_depth": "sequence length at which attention reaches half of that",
    "memory_share": "of memory bandwidth, memory-bound operators",
    "traffic": "bytes of memory-bound operators over those counted",
    "link_share": "of a link's bandwidth inside a node",
    "network_share": "of the network's bandwidth",
    "launch_seconds": "host time of an operator",
    "drift": "of the host's time more, for each further tensor rank",
    "meet_seconds": "wait at each collective inside a block",
    "kernel_seconds": "device time of any kernel, however small",
    "step_seconds": "host time of a step",
    "loss_seconds": "host time of each micro-batch's loss",
    "hidden_share": "of computation can hide communication of data parallelism",
    "tensor_hidden": "of tensor-parallel communication hides where overlapped",
    "expert_hidden": "of the exchange between experts hides where overlapped",
    "straggle": "of a step lost for each doubling of the nodes",
    "contention": "of hidden communication's time slows computation",
}
"""Every coefficient, as what its figure says."""


def coefficients_table(cluster: Cluster) -> tuple[Table, ...]:
    """The coefficients in force; none where the machine was measured, whose tables stand in their place."""
    if cluster.matmuls or cluster.device.kind == "cpu":
        return ()
    assumed, reached = asdict(DEFAULT_COEFFICIENTS), asdict(cluster.reached)
    rows = []
    for name, words in WORDS.items():
        source = "assumed" if reached[name] == assumed[name] else cluster.reached.source
        rows.append(
            TableRow(cells=(words, _figure(name, reached[name]), source), tone="quiet" if source == "assumed" else "plain")
        )
    columns = (Column(name="coefficient"), Column(name="value", align="right"), Column(name="from"))
    return (Table(title="What software is taken to reach", columns=columns, rows=tuple(rows)),)


def _figure(name: str, value: float) -> str:
    if name.endswith("_seconds"):
        return format_seconds(value)
    return f"{value:.3g}" if name.endswith("_depth") or name == "traffic" else format_percent(value)
