"""The ledger's peak against the live bytes of real steps of an unmodified Hugging Face model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plan.live_bytes import peaks, write_config
from tests.plan.plan_values import plan_of

from fullstride.plan.defaults import AUTOCAST, FP32, layout_for, weights_cast
from fullstride.plan.plan import Batch, Loss, Recompute, Workload
from fullstride.plan.toml import write_plan

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.05


def plan_for(stage=0, ranks=1, micro=2, accumulation=1, mode="none", kind="model", precision=FP32):
    layout, shard = layout_for(stage, ranks)
    return plan_of(
        workload=Workload(sequence_length=128, samples_per_step=ranks * micro * accumulation),
        layout=layout,
        shard=shard,
        batch=Batch(micro_batch=micro, accumulation=accumulation),
        recompute=Recompute(mode=mode),
        loss=Loss(kind=kind, chunk_tokens=64),
        precision=precision,
    )


ONE_RANK = {
    "fp32": plan_for(),
    "fp32, full recompute": plan_for(mode="full"),
    "autocast, full recompute, chunked": plan_for(mode="full", kind="chunked", precision=AUTOCAST),
    "weights": plan_for(precision=weights_cast(1, "none")),
    "weights, norm+activation, chunked": plan_for(mode="norm_activation", kind="chunked", precision=weights_cast(1, "none")),
    "weights, accumulation": plan_for(accumulation=2, precision=weights_cast(2, "none")),
    "autocast": plan_for(precision=AUTOCAST),
}
TWO_RANKS = {
    "zero 3": plan_for(3, 2, kind="chunked", precision=weights_cast(1, "fsdp2")),
    "zero 2, accumulation": plan_for(2, 2, accumulation=2, kind="chunked", precision=weights_cast(2, "fsdp2")),
    "zero 1, accumulation": plan_for(1, 2, accumulation=2, kind="chunked", precision=weights_cast(2, "fsdp2")),
    "ddp": plan_for(0, 2, kind="chunked"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(name, tmp_path):
    measured, predicted, states, said = peaks(write_config(tmp_path), ONE_RANK[name])
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
    assert said == states


@pytest.mark.multi
@pytest.mark.slow
def test_two_ranks(tmp_path):
    config = write_config(tmp_path)
    files = []
    for index, plan in enumerate(TWO_RANKS.values()):
        files.append(str(tmp_path / f"{index}.toml"))
        write_plan(plan, files[-1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.plan.live_bytes", str(config), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(found) == len(TWO_RANKS)
    for name, (measured, predicted, states, said) in zip(TWO_RANKS, found, strict=True):
        assert predicted == pytest.approx(measured, rel=TOLERANCE), name
        assert said == states, name
