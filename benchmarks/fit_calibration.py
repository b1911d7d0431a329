"""Fit the coefficients of the cost model to published runs: one set for each kind of GPU and framework.

    python benchmarks/fit_calibration.py RUNS.csv ... [--only FRAMEWORK] [--write FOLDER]

Few runs must not bend many coefficients. Those of shape (depth of a tile, of attention, time of a kernel) stay as assumed.
Each of the others has a prior: a logarithm around its assumed value, with a spread that says how far the assumption may be
off. A run counts as one observation with a Laplace error, runs of one network less each the more there are (what the model
gets wrong on one it gets wrong on all), so that the pull of the prior fades as runs of different networks come in. A framework
that ran on several kinds of GPU is first fitted on all of them together; that is the prior of each kind, with half the spread.

Plans of one network, GPUs and batch in several layouts are a sweep. Beside each run's error its distance from the mean error
of its sweep counts as well: what is wrong for all layouts alike leads to no wrong choice.

The error that is written down is that of cross-validation: whole networks are left out, on every kind of GPU, everything is
fitted on the others, and the ones left out are predicted. What is shipped is then fitted on all.

The search is Gauss-Newton on the logarithms with reweighting for the absolute error (Schlossmacher, 1973).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import math
import sys
from collections import Counter
from pathlib import Path

from msgspec.structs import asdict, replace

from fullstride.cluster.cluster import Coefficients
from fullstride.plan.cost.table import terms
from fullstride.plan.validation.machines import cluster_of
from fullstride.plan.validation.rows import Case, read_rows

BOUNDS = {
    "matmul_share": (0.3, 0.95, 0.15),
    "fp8_share": (0.2, 0.95, 0.2),
    "fp4_share": (0.15, 0.9, 0.2),
    "wave_loss": (0.05, 1.0, 0.3),
    "attention_forward": (0.1, 0.9, 0.3),
    "attention_backward": (0.1, 0.9, 0.3),
    "memory_share": (0.3, 0.95, 0.1),
    "traffic": (0.5, 4.0, 0.3),
    "link_share": (0.2, 0.95, 0.2),
    "network_share": (0.2, 0.95, 0.2),
    "launch_seconds": (1e-6, 6e-5, 0.7),
    "drift": (0.001, 0.3, 1.0),
    "meet_seconds": (2e-6, 5e-4, 1.0),
    "straggle": (0.001, 0.03, 1.0),
    "step_seconds": (2e-4, 0.1, 0.7),
    "loss_seconds": (1e-4, 1e-2, 1.0),
    "hidden_share": (0.1, 0.98, 0.2),
    "tensor_hidden": (0.1, 0.95, 0.4),
    "expert_hidden": (0.1, 0.95, 0.4),
}
"""What is fitted: between which values it means anything, and the spread of its prior (of the natural logarithm). A
coefficient whose assumed value is nothing starts at the one of `STARTS`."""
STARTS = {"drift": 0.02, "meet_seconds": 2e-5, "straggle": 0.005, "loss_seconds": 1e-3}
"""Of costs that the uncalibrated model leaves out, for want of a figure that holds for all software."""
FLASH_2 = {"attention_forward": 0.35, "attention_backward": 0.25}
"""FlashAttention-2 reaches 35 % of an H100's peak forward (FlashAttention-3, arXiv 2407.08608, abstract), less backward."""
HOPPER = ("h100-sxm", "h100-sxm-96", "h200-sxm")
USES_FLASH_2 = ("torchtitan", "llm-foundry")
ERROR = 0.08
"""Expected error of a prediction: what one run weighs against the prior."""
FOLDS = 5
"""Parts of the cross-validation, if there are so many networks."""
ENOUGH = 180
"""More runs of one file than these are thinned out while fitting, whole sweeps by their hash."""
SWEEP = ("source", "layers", "hidden", "ffn_hidden", "heads", "gpu", "gpus", "seq_len", "global_batch", "precision")
ROUNDS = 5

Logs = dict[str, float]


def sweep(case: Case) -> str:
    return "|".join(case.row.get(name, "") for name in SWEEP)


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def network(case: Case) -> tuple[str, ...]:
    return tuple(case.row.get(name, "") for name in ("layers", "hidden", "ffn_hidden", "heads"))


def predicted(case: Case, coefficients: Coefficients) -> float:
    row = case.row
    per_node = int(float(row.get("gpus_per_node") or 8))
    inside, between = row.get("interconnect_intra", ""), row.get("interconnect_inter", "")
    cluster = cluster_of(case.kind, case.plan.layout.world_size, per_node, inside, between, coefficients)
    return sum(term.exposed_seconds for term in terms(case.plan, case.spec, cluster))


def misses(cases: list[Case], coefficients: Coefficients) -> list[float]:
    return [math.log(predicted(case, coefficients) / (case.seconds or 1.0)) for case in cases]


def within(cases: list[Case], values: list[float]) -> list[float]:
    """The values, and then each one's distance from the mean of its sweep."""
    sweeps: dict[str, list[float]] = {}
    for case, value in zip(cases, values, strict=True):
        sweeps.setdefault(sweep(case), []).append(value)
    means = {name: sum(found) / len(found) for name, found in sweeps.items()}
    return values + [value - means[sweep(case)] for case, value in zip(cases, values, strict=True)]


def error(cases: list[Case], coefficients: Coefficients) -> float:
    return 100 * sum(abs(math.exp(miss) - 1) for miss in misses(cases, coefficients)) / max(1, len(cases))


def logs_of(coefficients: Coefficients) -> Logs:
    return {name: math.log(getattr(coefficients, name) or STARTS[name]) for name in BOUNDS}


def made(logs: Logs) -> Coefficients:
    values = {name: min(BOUNDS[name][1], max(BOUNDS[name][0], math.exp(value))) for name, value in logs.items()}
    return replace(Coefficients(), **values)


def weights(cases: list[Case]) -> list[float]:
    """Of each case, and again of its distance from its sweep: runs of one network share a weight, and files weigh alike."""
    many = Counter((case.kind, network(case)) for case in cases)
    shares = [1.0 / math.sqrt(many[case.kind, network(case)]) for case in cases]
    files = Counter[str]()
    for case, share in zip(cases, shares, strict=True):
        files[case.file] += share  # type: ignore[assignment]
    each = sum(shares) / len(files)
    return 2 * [share * each / files[case.file] / ERROR for case, share in zip(cases, shares, strict=True)]


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination; the matrix is positive definite."""
    size, rows = len(right), [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


def step_of(
    jacobian: dict[str, list[float]], missed: list[float], each: list[float], prior: Logs, at: Logs, tight: float
) -> Logs:
    """The change of each coefficient that is best for the linear model, by reweighted least squares."""
    names, change = list(jacobian), dict.fromkeys(jacobian, 0.0)
    for _ in range(12):
        left = [m + sum(jacobian[n][i] * change[n] for n in names) for i, m in enumerate(missed)]
        pull = [w / max(abs(value), 0.01) for w, value in zip(each, left, strict=True)]
        matrix, right = [], []
        for a in names:
            strength = 1.0 / (tight * BOUNDS[a][2]) ** 2
            weighed = [p * j for p, j in zip(pull, jacobian[a], strict=True)]
            row = [sum(w * j for w, j in zip(weighed, jacobian[b], strict=True)) for b in names]
            row[names.index(a)] += strength
            matrix.append(row)
            right.append(-sum(w * m for w, m in zip(weighed, missed, strict=True)) - strength * (at[a] - prior[a]))
        change = dict(zip(names, solve(matrix, right), strict=True))
    return change


def fit(cases: list[Case], prior: Logs, tight: float = 1.0) -> Logs:
    """The most likely coefficients; those that the runs say nothing about stay at the prior."""
    cases, at = thinned(cases), dict(prior)
    each = weights(cases)

    def loss(logs: Logs) -> tuple[float, list[float]]:
        missed = within(cases, misses(cases, made(logs)))
        pull = sum(((logs[n] - prior[n]) / (tight * BOUNDS[n][2])) ** 2 for n in BOUNDS)
        return sum(w * abs(m) for w, m in zip(each, missed, strict=True)) + pull / 2, missed

    least, missed = loss(at)
    names = list(BOUNDS)
    for _ in range(ROUNDS):
        before, jacobian = least, {}
        for name in names:
            width = 0.08 if at[name] + 0.08 <= math.log(BOUNDS[name][1]) else -0.08
            moved = within(cases, misses(cases, made({**at, name: at[name] + width})))
            column = [(a - b) / width for a, b in zip(moved, missed, strict=True)]
            if max(map(abs, column)) > 1e-3:
                jacobian[name] = column
        names = list(jacobian)
        change = step_of(jacobian, missed, each, prior, at, tight)
        for size in (1.0, 0.5, 0.25, 0.1):
            limited = {n: max(-0.5, min(0.5, size * d)) for n, d in change.items()}
            trial = {n: at[n] + limited.get(n, 0.0) for n in at}
            trial = {n: min(math.log(BOUNDS[n][1]), max(math.log(BOUNDS[n][0]), v)) for n, v in trial.items()}
            now, other = loss(trial)
            if now < least:
                at, least, missed = trial, now, other
                break
        if before - least < 1e-3 * before:
            break
    return at


def thinned(cases: list[Case]) -> list[Case]:
    """At most so many of each file, sweep by sweep."""
    found: list[Case] = []
    for file in sorted({case.file for case in cases}):
        found += sorted((case for case in cases if case.file == file), key=lambda case: hashed(sweep(case)))[:ENOUGH]
    return found


def prior_of(cases: list[Case]) -> Logs:
    """What is known before any run."""
    hopper = all(case.kind in HOPPER and case.framework in USES_FLASH_2 for case in cases)
    return logs_of(replace(Coefficients(), **FLASH_2) if hopper and cases else Coefficients())


def fit_kinds(cases: list[Case]) -> dict[str, Coefficients]:
    """One set for each kind of GPU of a framework; generations whose attention kernels differ share no prior."""
    found: dict[str, Coefficients] = {}
    for hopper in (True, False):
        some = [case for case in cases if (case.kind in HOPPER and case.framework in USES_FLASH_2) is hopper]
        kinds = sorted({case.kind for case in some})
        shared = fit(some, prior_of(some)) if some else {}
        for kind in kinds:
            own = fit([case for case in some if case.kind == kind], shared, 0.5) if len(kinds) > 1 else shared
            found[kind] = made(own)
    return found


def cross_validated(cases: list[Case]) -> dict[str, float]:
    """Mean absolute error of each kind over networks that were left out, per cent."""
    networks = sorted({network(case) for case in cases}, key=lambda name: hashed("|".join(name)))
    folds = {name: index % FOLDS for index, name in enumerate(networks)}
    missed: dict[str, list[float]] = {}
    apart: dict[tuple[str, ...], list[float]] = {}
    for part in range(min(FOLDS, len(networks))):
        rest = [case for case in cases if folds[network(case)] != part]
        found = fit_kinds(rest) if rest else {}
        for case in cases:
            if folds[network(case)] == part:
                said = predicted(case, found.get(case.kind) or made(prior_of([case])))
                missed.setdefault(case.kind, []).append(abs(said / (case.seconds or 1.0) - 1))
                apart.setdefault((case.model, case.kind), []).append(100 * (said / (case.seconds or 1.0) - 1))
    for name, values in sorted(apart.items()):
        print("    left out:", *name, " ".join(f"{value:+.0f}" for value in values[:12]))
    return {kind: 100 * sum(values) / len(values) for kind, values in missed.items()}


def written(kind: str, framework: str, cases: list[Case], errors: tuple[float, float], best: Coefficients) -> str:
    networks = len({network(case) for case in cases})
    lines = [
        f"# Made by benchmarks/fit_calibration.py from {len(cases)} published runs; errors in per cent, mean absolute.",
        f'framework = "{framework}"',
        f'kind = "{kind}"',
        f'version = "{datetime.date.today().isoformat()}"',
        f"rows = {len(cases)}",
        f"networks = {networks}",
        f"error_fitted = {errors[0]:.2f}",
        f"error_held_out = {errors[1]:.2f}",
        "",
        "[coefficients]",
    ]
    for name, value in asdict(best).items():
        if name in BOUNDS and abs(value / (getattr(Coefficients(), name) or 1e-12) - 1) > 0.005:
            lines.append(f"{name} = {float(f'{value:.3g}')}")
    lines.append(f'source = "calibration {framework} on {kind}"')
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", metavar="FRAMEWORK")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--fewest", type=int, default=6, help="do not write a file from fewer runs")
    args = parser.parse_args()
    groups: dict[str, list[Case]] = {}
    for path in args.files:
        for item in read_rows(path):
            if isinstance(item, Case) and item.seconds:
                groups.setdefault(item.framework, []).append(item)
    for framework, cases in sorted(groups.items()):
        if args.only and args.only != framework:
            continue
        held_out, found = cross_validated(cases), fit_kinds(cases)
        for kind, best in found.items():
            here = [case for case in cases if case.kind == kind]
            errors = error(here, best), held_out[kind]
            assumed = error(here, Coefficients())
            print(
                f"{kind} {framework}: {len(here)} runs, {len({network(c) for c in here})} networks, assumed {assumed:.1f} %, "
                f"all {errors[0]:.1f} %, networks left out {errors[1]:.1f} %",
                flush=True,
            )
            print("   ", {k: float(f"{v:.3g}") for k, v in asdict(best).items() if k in BOUNDS})
            if args.write and len(here) >= args.fewest:
                args.write.mkdir(parents=True, exist_ok=True)
                (args.write / f"{framework}-{kind}.toml").write_text(written(kind, framework, here, errors, best))
        mean = sum(held_out[case.kind] for case in cases) / len(cases)
        print(f"{framework}: networks left out, all kinds: {mean:.1f} %", flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
