"""Does the cost model choose well? Sweeps of one model on one cluster: what its first choice costs against the best measured.

    python benchmarks/choice.py RUNS.csv ...

A sweep is every run of a file with the same network, GPUs, sequence, global batch and precision, in three layouts or more.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from fullstride.plan.cost.table import terms
from fullstride.plan.validation.rows import Case, read_rows

SAME = ("source", "layers", "hidden", "heads", "ffn_hidden", "gpu", "gpus", "seq_len", "global_batch", "precision")
LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "zero_stage_or_fsdp", "recompute")


def losses(path: Path) -> list[float]:
    """For each sweep of a file, the measured time of the plan ranked first over the best measured, less one."""
    sweeps: dict[tuple[str, ...], list[tuple[float, float, tuple[str, ...]]]] = defaultdict(list)
    for item in read_rows(path):
        if isinstance(item, Case) and item.seconds:
            said = sum(term.exposed_seconds for term in terms(item.plan, item.spec, item.cluster))
            layout = tuple(item.row.get(name, "") for name in LAYOUT)
            sweeps[tuple(item.row.get(name, "") for name in SAME)].append((said, item.seconds, layout))
    wide = [runs for runs in sweeps.values() if len({layout for _, _, layout in runs}) >= 3]
    return [min(runs)[1] / min(seconds for _, seconds, _ in runs) - 1 for runs in wide]


BETTER = (0.05, 0.1, 0.2)
"""Losses that sweeps are counted up to."""


def main() -> None:
    for name in sys.argv[1:]:
        found = sorted(losses(Path(name)))
        if found:
            counts = ", ".join(f"{sum(loss <= bar for loss in found)} within {bar:.0%}" for bar in BETTER)
            places = " ".join(f"{100 * found[round(share * (len(found) - 1))]:.1f}" for share in (0.5, 0.75, 0.9, 1.0))
            print(
                f"{Path(name).name}: {len(found)} sweeps, first choice is the best in {found.count(0.0)}, {counts}; "
                f"loss in %: mean {100 * sum(found) / len(found):.1f}, median, 75th, 90th percentile and worst {places}"
            )


if __name__ == "__main__":
    main()
