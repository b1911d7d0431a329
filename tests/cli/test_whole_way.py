"""The whole way through the command: from scratch on text, killed, resumed, exported, reloaded, fine-tuned."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullstride.cli.record import read_run

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PLAN = """
kind = "plan"
format = 1
[model]
source = "config.json"
[workload]
sequence_length = 32
samples_per_step = 4
data = "corpus.txt"
[recipe]
steps = 30
[layout]
dp_replicate = 2
[shard]
carrier = "ddp"
[batch]
micro_batch = 2
"""


def command(*words):
    return [sys.executable, "-m", "fullstride", *words]


def train(folder, *words):
    done = subprocess.run(command("train", *words), cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(folder):
    return [step.loss for step in read_run(folder).steps]


def wait_for(path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < end, f"waited {seconds} s for {path}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("way")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "p.toml").write_text(PLAN)
    (folder / "corpus.txt").write_text("".join(f"line {n} of a corpus, {n * n} of its squares\n" for n in range(2000)))
    chats = [{"prompt": f"{n} times {n} is", "completion": f" {n * n}"} for n in range(200)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


@pytest.mark.slow
@pytest.mark.multi
def test_killed_and_resumed_the_losses_are_those_of_one_run_and_the_export_loads(folder):
    words = ["p.toml", "--save-every", "5", "--export"]
    train(folder, *words, "whole-model", "-o", "whole")
    killed = subprocess.Popen(command("train", *words, "model", "-o", "cut"), cwd=folder, stderr=subprocess.DEVNULL)
    wait_for(folder / "cut/checkpoints/step-00000010/manifest.json", killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    assert not (folder / "cut/DONE").exists()
    again = train(folder, *words, "model", "-o", "cut")
    assert "resuming cut" in again.stderr
    assert len(losses(folder / "whole")) == 30
    assert losses(folder / "cut") == losses(folder / "whole")
    assert losses(folder / "cut")[-1] < losses(folder / "cut")[0] < math.log(260) * 1.2
    check_export(folder)


def check_export(folder):
    import torch
    import transformers

    models = [
        transformers.AutoModelForCausalLM.from_pretrained(str(folder / name), local_files_only=True)
        for name in ("model", "whole-model")
    ]
    tokens = torch.arange(32).reshape(1, 32)
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    assert torch.equal(*logits) and bool(logits[0].isfinite().all())


@pytest.mark.slow
@pytest.mark.multi
def test_a_fine_tune_starts_from_the_exported_weights(folder):
    if not (folder / "model/config.json").exists():
        train(folder, "p.toml", "--steps", "5", "-o", "first", "--export", "model")
    done = train(folder, "p.toml", "--init", "model", "--data", "chats.jsonl", "--steps", "3", "-o", "tuned", "--json")
    told = json.loads(done.stdout)
    assert told["data"]["last_step"] == 2
    assert read_run(folder / "tuned").plan.model.source == "model"
    page = subprocess.run(command("report", "tuned"), cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert page.returncode == 0, page.stderr
    assert "<html" in Path(folder / "tuned/report.html").read_text()[:300].lower()
