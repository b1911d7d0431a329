"""Tune a Llama on this machine's GPUs between two runs of torchtitan at its best setting, and write the record.

    python benchmarks/tune_against_torchtitan.py llama3-1b --minutes 8 --out runs/bench-1b

Everything runs on one held machine in this order: peer, ours, peer; the ratio is taken against the mean of the two peers.
Where commands are limited in time, run the stages one by one with `--stage before|tune|after|record` and the same `--out`.
Needs torchtitan (0.2.2 was used) beside fullstride. Failures go into the record.
"""

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

from peer import BEST, environment, peer

HERE = Path(__file__).parent


def ours(model, out, arguments):
    """The loop, as its user runs it."""
    work = ["--baseline", str(arguments.baseline)] if arguments.baseline else [model, "--seq", str(arguments.seq)]
    command = [sys.executable, "-m", "fullstride", "tune", *work, "--minutes", str(arguments.minutes), "-o", str(out / "tune")]
    if (out / "tune" / "ladder.json").exists():
        command.append("--resume")
    code = subprocess.run(command, env=environment(), check=False).returncode
    (out / "tune-command.json").write_text(json.dumps({"command": " ".join(command), "exit_code": code}) + "\n")


def rate_of(measurement):
    """Tokens per second and GPU."""
    return measurement["tokens_per_second"] / measurement["world_size"]


def record(model, num_gpus, out):
    """The dated record: JSON beside a page in Markdown."""
    peers = [json.loads(path.read_text()) for path in sorted(out.glob("torchtitan-*.json"), reverse=True)]
    rates = [run["tokens_per_second_per_gpu"] for run in peers if "tokens_per_second_per_gpu" in run]
    ladder = json.loads((out / "tune" / "ladder.json").read_text())
    final, base = ladder["final"], ladder["baseline"]
    best = final["other"] if final else base
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = f"{date}-tune-{model}-{num_gpus}xgpu"
    data = {"date": date, "model": model, "num_gpus": num_gpus, "torchtitan": peers, "ladder": ladder}
    data |= {"ours_per_gpu": rate_of(best), "baseline_per_gpu": rate_of(base) if base else None}
    data |= {"ratio_to_torchtitan": rate_of(best) / (sum(rates) / len(rates)) if rates else None}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (results / f"{name}.md").write_text("\n".join(page(data, best, base)) + "\n")
    print(f"wrote {results / name}.md: ours / torchtitan = {data['ratio_to_torchtitan']}")


def page(data, best, base):
    """Lines of the Markdown page."""
    ladder = data["ladder"]
    yield f"# {data['model']} tuned on {data['num_gpus']} x {best['device']}, {data['date']}\n"
    yield f"Versions: {', '.join(f'{k} {v}' for k, v in best['versions'].items())}\n"
    yield "| what | tok/s/GPU | peak GiB |\n|---|---|---|"
    for number, run in enumerate(data["torchtitan"], 1):
        yield f"| torchtitan, run {number} | {run.get('tokens_per_second_per_gpu', 'failed')} | {run.get('peak_gib', '')} |"
    for name, one in (("baseline", base), ("final plan", best)):
        if one:
            yield f"| {name} | {rate_of(one):.0f} | {one['memory']['peak_allocated_bytes'] / 2**30:.1f} |"
    if data["ratio_to_torchtitan"]:
        yield f"\nFinal plan over torchtitan: **{data['ratio_to_torchtitan']:.3f}**\n"
    yield "| lever | change | outcome | predicted | measured | seconds | reason |\n|---|---|---|---|---|---|---|"
    for trial in ladder["trials"]:
        ratio = trial["comparison"]["ratio"] if trial["comparison"] else None
        measured = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else ""
        cells = [trial["lever"], trial["change"], trial["outcome"], f"{trial['predicted_ratio']:.3f}", measured]
        cells += [f"{trial['seconds']:.0f}", trial["reason"]]
        yield "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
    yield f"\nStopped: {ladder['stopped']}. Spent {ladder['spent_seconds']:.0f} s of {ladder['budget_seconds']:.0f} s.\n"
    yield "Commands:\n"
    for run in data["torchtitan"]:
        yield f"    {run['command']}"


def main():
    """Run the stages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted({model for model, _ in BEST}))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", choices=["all", "before", "tune", "after", "record"], default="all")
    parser.add_argument("--baseline", type=Path, help="a plan to start from, as `fullstride tune --baseline` takes it")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    stages = ["before", "tune", "after", "record"] if arguments.stage == "all" else [arguments.stage]
    for stage in stages:
        if stage in {"before", "after"}:
            peer(arguments.model, arguments.gpus, arguments.out, stage, arguments.seq)
        elif stage == "tune":
            ours(arguments.model, arguments.out, arguments)
        else:
            record(arguments.model, arguments.gpus, arguments.out)


if __name__ == "__main__":
    main()
