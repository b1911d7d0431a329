"""How long an answer of `fullstride plan` takes, against the number of GPUs and the depth of the model.

Run `python benchmarks/planner_speed.py`. Each case is a process of its own on one core: seconds from its start to the end
of the search (imports included) on the wall and of the processor, which differ where others use the machine; the largest
resident memory, the plans priced, and the best plan found.
Writes `benchmarks/results/planner-speed-DATE.json` and prints the table. `--quick` leaves out the large cases and writes
nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}
"""The published sizes of DeepSeek-V3 (arXiv 2412.19437, section 4.2)."""


def cases() -> list[dict[str, Any]]:
    """Against GPUs, against depth, and the two large ones."""
    found: list[dict[str, Any]] = [{"model": "llama3-8b", "gpus": n, "batch": 8 * n} for n in (1, 8, 32, 128, 512, 2048)]
    found += [{"model": "llama3-70b", "layers": n, "gpus": 256, "batch": 1024} for n in (20, 40, 80, 160)]
    found.append({"model": "llama3-405b", "gpus": 16384, "batch": 2048})
    found.append({"model": "deepseek-v3", "gpus": 2048, "batch": 15360, "sequence": 4096})
    return found


def one(case: dict[str, Any]) -> dict[str, Any]:
    """One search, in this process."""
    start = time.perf_counter()
    from fullstride.cluster.catalogue import assumed_cluster
    from fullstride.model.config import spec_from_config
    from fullstride.model.presets import preset_config
    from fullstride.plan.plan import ModelRef, Recipe, Workload
    from fullstride.plan.search import search
    from fullstride.plan.space import summary

    config = DEEPSEEK_V3 if case["model"] == "deepseek-v3" else preset_config(case["model"])
    if "layers" in case:
        config["num_hidden_layers"] = case["layers"]
    spec = spec_from_config(config, case["model"])
    work = Workload(sequence_length=case.get("sequence", 8192), samples_per_step=case["batch"])
    cluster = assumed_cluster("h100-sxm", case["gpus"], min(8, case["gpus"]))
    ranking = search(spec, cluster, ModelRef(source=case["model"]), work, Recipe(), to_run=False)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        **case,
        "seconds": round(seconds, 3),
        "cpu_seconds": round(time.process_time(), 3),
        "peak_bytes": peak,
        "priced": ranking.considered,
        "exhaustive": ranking.exhaustive,
        "best": summary(ranking.best[0]),
        "step_seconds": ranking.estimates[0].step_seconds,
        "mfu_causal": ranking.estimates[0].mfu_causal,
    }


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """One search in a process of its own; a search that finds nothing is a result too."""
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        return {**case, "error": done.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def cold_command() -> tuple[float, float]:
    """Seconds of `fullstride plan llama3-8b --gpus 8` from a cold start, and those of the processor: medians of five."""
    command = [sys.executable, "-m", "fullstride", "plan", "llama3-8b", "--gpus", "8", "--gpu", "h100-sxm"]
    walls, works = [], []
    for _ in range(5):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True, timeout=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        works.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return sorted(walls)[2], sorted(works)[2]


def table(results: list[dict[str, Any]]) -> str:
    """The results a line each."""
    lines = [f"{'model':<14}{'layers':>7}{'GPUs':>7}{'seconds':>9}{'CPU s':>7}{'MB':>5}{'priced':>8}  best plan"]
    for r in results:
        if "error" in r:
            lines.append(f"{r['model']:<14}{r.get('layers', ''):>7}{r['gpus']:>7}  {r['error']}")
            continue
        name = f"{r['model']:<14}{r.get('layers', ''):>7}{r['gpus']:>7}"
        used = f"{r['seconds']:>9.2f}{r['cpu_seconds']:>7.2f}{r['peak_bytes'] / 1e6:>5.0f}"
        lines.append(f"{name}{used}{r['priced']:>8}  {r['best']}")
    return "\n".join(lines)


def main() -> int:
    """Measure all cases, print them, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small cases only, nothing is written")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(one(json.loads(args.case))))
        return 0
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    chosen = [case for case in cases() if case["gpus"] <= 32] if args.quick else cases()
    results = [measured(case) for case in chosen]
    cold, work = cold_command()
    print(table(results))
    print(f"fullstride plan llama3-8b --gpus 8, cold: {cold:.2f} s, {work:.2f} s of the processor")
    print(f"load average {os.getloadavg()[0]:.1f}")
    if not args.quick:
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        machine = {"cpu": platform.processor() or platform.machine(), "python": platform.python_version(), "cores": 1}
        load = os.getloadavg()[0]
        command = {"seconds": cold, "cpu_seconds": work}
        record = {"date": date, "machine": machine, "load_average": load, "cold_command": command, "cases": results}
        target = RESULTS / f"planner-speed-{date}.json"
        target.write_text(json.dumps(record, indent=2) + "\n")
        print(f"wrote {target.relative_to(RESULTS.parent.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
