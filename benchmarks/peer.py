"""torchtitan at its best setting, for benchmarks that stand between two runs of it."""

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
    ("llama3-8b-half", 1): ["--model.flavor", "8B-half", "--training.local_batch_size", "1", "--compile.enable"],
    ("llama3-8b", 2): ["--model.flavor", "8B", "--training.local_batch_size", "1", "--compile.enable"],
}
STEP = re.compile(r"step:\s*(\d+).*?loss:\s*([\d.]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)", re.DOTALL)


def environment():
    """Peers and ours see the same variables."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **quiet, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def peer(model, num_gpus, out, when, seq):
    """One torchtitan run of 15 steps; the last report counts. Writes `torchtitan-WHEN.json` into `out`, and returns it."""
    out.mkdir(parents=True, exist_ok=True)
    assets = out / "assets"
    if not (assets / "tok").exists():
        subprocess.run([sys.executable, HERE / "peers" / "assets.py", assets], check=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    command += [str(HERE / "peers" / "torchtitan_llama.py"), "--model.name", "llama3"]
    command += ["--model.hf_assets_path", str(assets / "tok"), "--training.dataset", "c4_test"]
    command += ["--training.dataset_path", str(assets / "data"), "--training.seq_len", str(seq), "--training.steps", "15"]
    command += ["--metrics.log_freq", "5", "--metrics.disable_color_printing", "--activation_checkpoint.mode", "none"]
    command += BEST[(Path(model).stem, num_gpus)]
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
    print(f"torchtitan {when}: {result.get('tokens_per_second_per_gpu', 'failed')} tok/s/GPU, exit {code}", flush=True)
    return result
