"""PEFT itself loads the adapters that are exported, and models that it wrapped are trained; skipped where it is not installed.

FULLSTRIDE_DOORS_PYTHON names an interpreter that has peft; else this one is asked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.engine.test_adapter import plan_from, saved_model, steps

from fullstride.engine.export import export
from fullstride.engine.parity import batches
from fullstride.engine.parity_cases import make_case, model_of
from fullstride.engine.run import prepare
from fullstride.plan.plan import Adapter

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("FULLSTRIDE_DOORS_PYTHON", sys.executable)
LOAD = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
folder = sys.argv[1]
for kind in sys.argv[2:]:
    base = AutoModelForCausalLM.from_pretrained(f"{folder}/{kind}-base")
    model = PeftModel.from_pretrained(base, f"{folder}/{kind}-adapter").eval()
    found = sum("lora_" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        torch.save((found, model(input_ids=torch.load(f"{folder}/{kind}-ids")).logits), f"{folder}/{kind}-logits")
"""
WRAPPED = """
from peft import LoraConfig, get_peft_model
from fullstride.engine.parity_cases import make_case, model_of

def wrapped():
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    return get_peft_model(model_of(make_case("llama", dtype="fp32")), config)
"""
TRAIN = """
import json, os, sys
import torch
from msgspec.structs import replace
from fullstride.engine.build import build_model
from fullstride.engine.parity import batches, share
from fullstride.engine.parity_cases import make_case
from fullstride.engine.run import prepare
from fullstride.plan.plan import ModelRef, Recompute
folder, ways = sys.argv[1], {"none": (1, 0), "ddp": (2, 0), "fsdp2": (2, 3), "flat": (2, 3)}
told = {}
for carrier in sys.argv[2:]:
    ranks, stage = ways[carrier]
    case = make_case("llama", dtype="fp32", ranks=ranks, stage=stage, carrier=carrier, micro_batch=4 // ranks,
                     recompute=Recompute(mode="full"))
    source = f"{folder}/wrapped.py:wrapped"
    run = prepare(build_model(source), replace(case.plan, model=ModelRef(source=source)), device="cpu")
    if carrier == "none":
        named = dict(run.module.named_parameters())
        before = {n: p.detach().clone() for n, p in named.items()}
        assert all(bool(p.any()) is ("lora_B" not in n) for n, p in named.items()), "initial values"
    mine = [{n: t[share(case, run.data_rank)] for n, t in batch.items()} for batch in batches(case)]
    told[carrier] = [run.step(batch).loss for batch in mine]
    if carrier == "none":
        moved = {n for n, p in named.items() if not torch.equal(p, before[n])}
        assert moved == {n for n in named if "lora_" in n}, moved
    run.close()
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(told))
"""


def asked(command, folder):
    probe = subprocess.run([PYTHON, "-c", "import peft"], capture_output=True, text=True, timeout=120, check=False)
    if probe.returncode:
        assert "FULLSTRIDE_DOORS_PYTHON" not in os.environ, probe.stderr[-3000:]
        pytest.skip(f"{PYTHON} has no peft (FULLSTRIDE_DOORS_PYTHON names an interpreter that has)")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_peft_loads_exported_adapters_and_gives_the_same_logits(tmp_path):
    adapters = {"llama": Adapter(rank=3, alpha=6), "gpt2": Adapter(rank=2, targets=("qkv", "down"))}
    wanted = {}
    for kind, adapter in adapters.items():
        case = make_case(kind, adapter=adapter, dtype="fp32")
        run = prepare(model_of(case), plan_from(saved_model(tmp_path / f"{kind}-base", kind), case), device="cpu")
        steps(run, case, 3)
        export(run, tmp_path / f"{kind}-adapter")
        ids = batches(case)[0]["input_ids"]
        torch.save(ids, tmp_path / f"{kind}-ids")
        with torch.no_grad():
            wanted[kind] = run.module(input_ids=ids).logits
        run.close()
    asked(["-c", LOAD, str(tmp_path), *adapters], tmp_path)
    for kind, count in (("llama", 3 * 7 * 2), ("gpt2", 3 * 2 * 2)):
        found, logits = torch.load(tmp_path / f"{kind}-logits")
        assert found == count
        assert torch.allclose(logits, wanted[kind], atol=2e-5), kind


@pytest.mark.multi
@pytest.mark.slow
def test_a_model_that_peft_wrapped_is_trained_by_every_carrier(tmp_path):
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    (tmp_path / "train.py").write_text(TRAIN)
    alone = json.loads(asked(["train.py", str(tmp_path), "none"], tmp_path).splitlines()[-1])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    spread = asked([*launcher, "train.py", str(tmp_path), "ddp", "fsdp2", "flat"], tmp_path)
    for carrier, losses in json.loads(spread.splitlines()[-1]).items():
        assert losses == pytest.approx(alone["none"], rel=1e-5), carrier
