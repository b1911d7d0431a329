"""Fit the coefficients of the cost model to published runs: one set for each kind of GPU and framework.

    python benchmarks/fit_calibration.py RUNS.csv ... [--only KIND FRAMEWORK] [--write FOLDER]

The runs are split in halves at random (by a hash of the row, so that the split is the same each time). A set is fitted on
one half and tried on the other, and the error of both is printed and written down; what is shipped is then fitted on all.
What is minimised is the mean absolute logarithm of predicted over measured time, with a weak pull towards the assumed
values, so that a coefficient that the runs say nothing about stays where it was. Coordinate search, no derivatives.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import sys
from pathlib import Path

from msgspec.structs import asdict, replace

from fullstride.cluster.cluster import Coefficients
from fullstride.plan.cost.table import terms
from fullstride.plan.validation.machines import cluster_of
from fullstride.plan.validation.rows import Case, read_rows

BOUNDS = {
    "matmul_share": (0.3, 0.95),
    "fp8_share": (0.2, 0.95),
    "fp4_share": (0.15, 0.9),
    "matmul_depth": (16.0, 1024.0),
    "wave_loss": (0.05, 1.0),
    "attention_forward": (0.1, 0.9),
    "attention_backward": (0.1, 0.9),
    "attention_depth": (32.0, 2048.0),
    "memory_share": (0.3, 0.95),
    "traffic": (0.5, 4.0),
    "link_share": (0.2, 0.95),
    "network_share": (0.2, 0.95),
    "launch_seconds": (1e-6, 6e-5),
    "kernel_seconds": (1e-6, 2e-5),
    "drift": (0.01, 0.3),
    "meet_seconds": (1e-6, 5e-4),
    "straggle": (0.001, 0.03),
    "step_seconds": (2e-4, 0.1),
    "hidden_share": (0.1, 0.98),
    "tensor_hidden": (0.1, 0.95),
    "expert_hidden": (0.1, 0.95),
}
"""What is fitted, and between which values it means anything."""
PULL = 0.012
"""Weight of the squared logarithm of a coefficient over its assumed value."""
FEW = 40
"""With fewer runs than these the pull is stronger in proportion."""
ENOUGH = 120
"""More runs of one file than these are thinned out while fitting, evenly by their hash."""


def hashed(case: Case) -> int:
    text = "|".join(str(case.row.get(name, "")) for name in sorted(case.row) if name not in ("note", "step_time_s"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def predicted(case: Case, coefficients: Coefficients) -> float:
    row = case.row
    per_node = int(float(row.get("gpus_per_node") or 8))
    inside, between = row.get("interconnect_intra", ""), row.get("interconnect_inter", "")
    cluster = cluster_of(case.kind, case.plan.layout.world_size, per_node, inside, between, coefficients)
    return sum(term.exposed_seconds for term in terms(case.plan, case.spec, cluster))


def miss(cases: list[Case], coefficients: Coefficients, start: Coefficients) -> float:
    total = sum(abs(math.log(predicted(case, coefficients) / case.seconds)) for case in cases) / len(cases)
    pull = sum(math.log(getattr(coefficients, name) / getattr(start, name)) ** 2 for name in BOUNDS if getattr(start, name))
    return total + PULL * max(1.0, FEW / len(cases)) * pull


def error(cases: list[Case], coefficients: Coefficients) -> float:
    return 100 * sum(abs(predicted(case, coefficients) / case.seconds - 1) for case in cases) / max(1, len(cases))


def names_that_matter(cases: list[Case], start: Coefficients) -> list[str]:
    """Coefficients that change these runs' predictions at all."""
    some = cases[:: max(1, len(cases) // 24)]
    base = [predicted(case, start) for case in some]
    found = []
    for name, (low, high) in BOUNDS.items():
        value = min(high, max(low, getattr(start, name) * 1.3 or low * 20))
        other = [predicted(case, replace(start, **{name: value})) for case in some]
        if any(abs(a / b - 1) > 1e-3 for a, b in zip(other, base, strict=True)):
            found.append(name)
    return found


def fit(cases: list[Case], start: Coefficients) -> Coefficients:
    """The better of two searches: from a host that nobody notices, and from one that paces the device."""
    busy = replace(start, launch_seconds=max(4e-5, start.launch_seconds), drift=max(0.05, start.drift))
    return min((search(cases, begin, start) for begin in (start, busy)), key=lambda found: miss(cases, found, Coefficients()))


def search(cases: list[Case], begin: Coefficients, start: Coefficients) -> Coefficients:
    names, best = names_that_matter(cases, begin), begin
    least = miss(cases, best, start)
    factors = dict.fromkeys(names, 1.5)
    for _ in range(10):
        before = least
        for name in names:
            low, high = BOUNDS[name]
            moved = False
            for factor in (factors[name], 1 / factors[name]):
                value = min(high, max(low, (getattr(best, name) or low) * factor))
                trial = replace(best, **{name: value})
                if (now := miss(cases, trial, start)) < least - 1e-6:
                    best, least, moved = trial, now, True
                    break
            if not moved:
                factors[name] = factors[name] ** 0.5
        if before - least < 2e-5 and max(factors.values()) < 1.03:
            break
    return best


def thinned(cases: list[Case]) -> list[Case]:
    """At most so many of each file."""
    found: list[Case] = []
    for file in sorted({case.file for case in cases}):
        found += sorted((case for case in cases if case.file == file), key=hashed)[:ENOUGH]
    return found


def written(kind: str, framework: str, cases: list[Case], errors: tuple[float, float], best: Coefficients) -> str:
    lines = [
        f"# Made by benchmarks/fit_calibration.py from {len(cases)} published runs; errors in per cent, mean absolute.",
        f'framework = "{framework}"',
        f'kind = "{kind}"',
        f'version = "{datetime.date.today().isoformat()}"',
        f"rows = {len(cases)}",
        f"error_fitted = {errors[0]:.2f}",
        f"error_held_out = {errors[1]:.2f}",
        "",
        "[coefficients]",
    ]
    for name, value in asdict(best).items():
        if name in BOUNDS and value != getattr(Coefficients(), name):
            lines.append(f"{name} = {float(f'{value:.4g}')}")
    lines.append(f'source = "calibration {framework} on {kind}"')
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "FRAMEWORK"))
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--fewest", type=int, default=6, help="do not fit on fewer runs")
    args = parser.parse_args()
    groups: dict[tuple[str, str], list[Case]] = {}
    for path in args.files:
        for item in read_rows(path):
            if isinstance(item, Case) and item.seconds:
                groups.setdefault((item.kind, item.framework), []).append(item)
    for (kind, framework), cases in sorted(groups.items()):
        if (args.only and args.only != [kind, framework]) or len(cases) < args.fewest:
            continue
        start = Coefficients()
        cases.sort(key=hashed)
        halves = [case for case in cases if hashed(case) % 2], [case for case in cases if not hashed(case) % 2]
        half = fit(thinned(halves[0]), start)
        errors = error(halves[0], half), error(halves[1], half)
        whole = fit(thinned(cases), half)
        print(
            f"{kind} {framework}: {len(cases)} runs, assumed {error(cases, start):.1f} %, fitted half {errors[0]:.1f} %, "
            f"other half {errors[1]:.1f} %, all {error(cases, whole):.1f} %",
            flush=True,
        )
        print("   ", {k: float(f"{v:.3g}") for k, v in asdict(whole).items() if k in BOUNDS and v != getattr(start, k)})
        if args.write:
            args.write.mkdir(parents=True, exist_ok=True)
            name = args.write / f"{framework}-{kind}.toml"
            name.write_text(written(kind, framework, cases, errors, whole))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
