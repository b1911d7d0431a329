"""Planning and explaining need no torch: the verbs run with it blocked."""

import json
import subprocess
import sys

import pytest

BLOCKED = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None
from fullstride.cli.main import main
code = main(sys.argv[1:])
heavy = sorted({"plotly", "numpy", "pyarrow"} & set(sys.modules))
assert not heavy, f"{heavy} were imported: each costs a tenth of a second or more"
sys.exit(code)
"""


def run(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *words], capture_output=True, text=True, timeout=120, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("model", ["llama3-8b", "tiny"])
def test_plan_and_explain_run_with_torch_blocked(model, tmp_path):
    told = json.loads(run("plan", model, "--gpus", "8", "-o", "p.toml", "--json", cwd=tmp_path).stdout)
    assert told["kind"] == "ranking" and told["data"]["best"]
    assert any("assumed cluster" in warning for warning in told["warnings"])
    shown = run("explain", "p.toml", cwd=tmp_path).stdout
    assert "ssumed cluster" in shown.splitlines()[0] + shown.splitlines()[3] and "MFU" in shown
    estimate = json.loads(run("explain", "p.toml", "--json", cwd=tmp_path).stdout)
    ranking = told["data"]
    runnable = ranking["estimates"][0] if ranking["runs"][0] else ranking["runnable_estimate"]
    assert estimate["data"]["plan_hash"] == runnable["plan_hash"]


def test_a_model_that_is_too_large_says_by_how_much(tmp_path):
    command = [sys.executable, "-m", "fullstride", "plan", "llama3-405b", "--gpu", "h100-sxm", "--gpus", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fullstride plan: error:") and "GiB" in last


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "no-such-model"], 3),
        (["plan", "bad.json"], 3),
        (["plan", "odd.json"], 3),
        (["plan", "tiny", "--gpu", "abacus"], 3),
        (["plan", "tiny", "--gpus", "0"], 2),
        (["plan", "tiny", "--cluster", "none.json"], 3),
        (["plan", "llama3-8b", "--seq", "0"], 2),
        (["plan", "tiny", "--gpus", "13", "--gpus-per-node", "13", "--global-batch", "9"], 3),
        (["plan", "llama3-8b", "--gpus", "8", "--why", "size=1"], 3),
        (["plan", "llama3-8b", "--gpus", "8", "--why", "tp"], 2),
        (["plan", "llama3-8b", "--gpus", "8", "--tokens", "many"], 2),
        (["explain", "none.toml"], 3),
        (["probe", "-o", "bad.json"], 3),
    ],
)
def test_bad_input_is_one_line(words, code, tmp_path, monkeypatch, capsys):
    from fullstride.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{not json")
    (tmp_path / "odd.json").write_text('{"model_type": "sausage", "architectures": ["SausageForCausalLM"]}')
    assert main(words) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: assumed")]
    assert len(lines) == 1 and lines[0].startswith(f"fullstride {words[0]}: error: "), lines


def test_explain_of_a_plan_that_does_not_fit_shows_it_and_exits_4(tmp_path, monkeypatch, capfd):
    from fullstride.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(
        'kind = "plan"\nformat = 1\n[model]\nsource = "llama3-70b"\n[workload]\nsequence_length = 2048\nsamples_per_step = 1\n'
        '[made_for]\ndevice = "h100-sxm"\n'
    )
    assert main(["explain", "p.toml", "--json"]) == 4
    told = json.loads(capfd.readouterr().out)
    assert told["kind"] == "estimate"
    assert told["data"]["peak_device_bytes"] > told["data"]["capacity_bytes"]
    assert any("more than it has" in warning for warning in told["warnings"])
