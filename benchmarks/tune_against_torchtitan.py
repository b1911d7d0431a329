"""Tune a Llama on this machine's GPUs between two runs of torchtitan at its best setting, and write the record.

    python benchmarks/tune_against_torchtitan.py llama3-1b --minutes 8 --out runs/bench-1b

Everything runs on one held machine in this order: peer, ours, peer; the ratio is taken against the mean of the two peers.
Where commands are limited in time, run the stages one by one with `--stage before|tune|after|record` and the same `--out`.
Needs torchtitan (0.2.2 was used) beside fullstride. Failures go into the record.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# torchtitan's best settings on H200, found by sweeping recompute, batch and compile.
BEST = {
    ("llama3-1b", 1): ["--model.flavor", "1B", "--training.local_batch_size", "4", "--compile.enable"],
    ("llama3-3b", 1): ["--model.flavor", "3B", "--training.local_batch_size", "1", "--compile.enable"],
    ("llama3-8b", 2): ["--model.flavor", "8B", "--training.local_batch_size", "1", "--compile.enable"],
}
STEP = re.compile(r"step:\s*(\d+).*?loss:\s*([\d.]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", re.DOTALL)


def environment():
    """Peers and ours see the same variables."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def peer(model, num_gpus, out, when, seq):
    """One torchtitan run of 15 steps; the last report counts."""
    assets = out / "assets"
    if not (assets / "tok").exists():
        subprocess.run([sys.executable, HERE / "peers" / "assets.py", assets], check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    command += [str(HERE / "peers" / "torchtitan_llama.py"), "--model.name", "llama3"]
    command += ["--model.hf_assets_path", str(assets / "tok"), "--training.dataset", "c4_test"]
    command += ["--training.dataset_path", str(assets / "data"), "--training.seq_len", str(seq), "--training.steps", "15"]
    command += ["--metrics.log_freq", "5", "--metrics.disable_color_printing", "--activation_checkpoint.mode", "none"]
    command += BEST[(model, num_gpus)]
    started = time.time()
    log = out / f"torchtitan-{when}.log"
    with open(log, "w") as text:
        code = subprocess.run(command, stdout=text, stderr=text, env=environment(), timeout=280, check=False).returncode
    found = STEP.findall(log.read_text())
    shown = " ".join(command).replace(sys.executable, "python").replace(str(HERE), "benchmarks").replace(str(out), "OUT")
    result = {"command": shown, "exit_code": code, "seconds": time.time() - started}
    if found:
        step, loss, memory, rate = found[-1]
        result |= {"step": int(step), "loss": float(loss), "peak_gib": float(memory)}
        result |= {"tokens_per_second_per_gpu": float(rate.replace(",", ""))}
    (out / f"torchtitan-{when}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"torchtitan {when}: {result.get('tokens_per_second_per_gpu', 'failed')} tok/s/GPU, exit {code}")


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
