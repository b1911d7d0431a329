"""What two CPU ranks hold, against their ledger: DDP, FSDP2 and flat buffers at each ZeRO stage, pipelines, tensor parallelism
with and without the sequence cut; every kind of recomputation, loss and precision (see `held_bytes.py`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plan.held_bytes import CARRIERS, LENGTH, cases

ROOT = Path(__file__).parents[2]
STEP = 19
"""Of more than 800 combinations."""
FEW = 32 * 2 * LENGTH
"""Bytes: what the loss keeps of each token beside logits, which the ledger leaves out."""


@pytest.mark.multi
@pytest.mark.slow
def test_weights_gradients_and_states_to_the_byte_and_activations_within_three_per_cent():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.plan.held_bytes", str(STEP)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if "[rank" in line or "Error" in line)[
        :6000
    ]
    found = dict(json.loads(done.stdout.strip().splitlines()[-1]))
    assert set(found) == set(cases(STEP))
    for name, ranks in found.items():
        for what in ranks[0]:
            pairs = [rank[what] for rank in ranks]
            if what == "activations":
                assert all(said == pytest.approx(held, rel=0.03, abs=FEW) for held, said in pairs), (name, what, pairs)
            elif "pipeline" in name:  # each stage has a ledger of its own
                assert all(held == said for held, said in pairs), (name, what, pairs)
            else:  # the ledger is the fullest rank's
                assert max(held for held, _ in pairs) == pairs[0][1], (name, what, pairs)


def test_the_cases_cover_every_carrier_with_every_choice():
    names = list(cases(STEP))
    for carrier in CARRIERS:
        mine = [name for name in names if f", {carrier}, " in name]
        for word in ("none", "norm_activation", "full", "model loss", "chunked loss", "1 micro", "2 micro"):
            assert any(word in name for name in mine), (carrier, word)
