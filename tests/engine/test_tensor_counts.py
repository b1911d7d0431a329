"""Every collective of a step with tensor parallelism: in the places of docs/tensor.md, of the bytes that are priced."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.engine.tensor_counts import OTHERS, cases

from fullstride.engine.parity_draws import _spec
from fullstride.plan.cost.exchanges import bytes_a_step

ROOT = Path(__file__).parents[2]
OLDER = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
"""Its compiler keeps what a collective gave where a whole block is made again."""
LETTERS = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "R"}
BLOCKS = 2


def told(*arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "tests.engine.tensor_counts", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return told()


def in_words(seen):
    """`forward RGSGS`, one string a phase."""
    phases = []
    for phase, kind, _, _ in seen:
        if not phases or phases[-1][0] != phase:
            phases.append([phase, ""])
        phases[-1][1] += LETTERS[kind]
    return [" ".join(each) for each in phases]


def table(sequence, mode, overlap):
    """The table of docs/tensor.md for two blocks of two regions, and two micro-batches."""
    n = 2 if overlap else 1  # parts
    gather, scatter, reduce = "G" * n, "S" * n, "R" * n
    if sequence:
        forward = "R" + (gather + scatter) * 2 * BLOCKS + "G" + "G"  # embedding, regions, final norm, loss
        kept = gather + "G" + scatter  # of the exit's gradient, of the input, sum of the input's gradient
        made = gather * 2, gather + scatter + gather  # what is made again, behind the gather of the first exit's gradient
        rest = scatter + gather + scatter
        block = {"none": kept * 2, "norm_activation": gather + made[0] + rest, "full": gather + made[1] + rest}
        backward = "S" + block[mode] * BLOCKS + "G"
        return ["forward " + forward, "backward " + backward] * 2 + ["optimizer in place RR"]
    forward = "R" + reduce * 2 * BLOCKS + "G"
    again = reduce if mode == "full" else ""  # attention's sum; nothing asks for the MLP's
    return ["forward " + forward, "backward R" + (again + reduce * 2) * BLOCKS] * 2 + ["optimizer in place R"]


@pytest.mark.multi
@pytest.mark.timeout(700)
def test_all_ranks_meet_in_one_order(found):
    assert set(found) == set(cases())
    for name, (one, other) in found.items():
        assert one == other, name
        assert {ranks for _, _, ranks, _ in one} == {2}, name


@pytest.mark.multi
def test_places_are_those_of_the_table(found):
    checked = 0
    for name, case in cases().items():
        if case.family in ("llama", "gpt2"):
            plan = case.plan
            said = table(plan.layout.sequence_parallel, plan.recompute.mode, plan.overlap.tensor)
            assert in_words(found[name][0]) == said, name
            checked += 1
    assert checked == 13


@pytest.mark.multi
def test_bytes_are_those_that_are_priced(found):
    for name, case in cases().items():
        spec = _spec(case.family, case.tied, case.layers, ())
        counted = Counter(dict.fromkeys(LETTERS, 0))
        for phase, kind, _, size in found[name][0]:
            if "in place" not in phase:
                counted[kind] += size
        assert dict(counted) == bytes_a_step(case.plan, spec), name
    assert len(found) == 12 + len(OTHERS)


@pytest.mark.multi
def test_gradients_that_are_terms_are_summed_once_a_step(found):
    case = cases()["llama sequence none one"]
    spec = _spec(case.family, case.tied, case.layers, ())
    norms = sum(p.count for s in spec.tail if s.kind == "norm" for p in s.parameters)
    norms += BLOCKS * sum(p.count for s in spec.stacks[0].sublayers if s.kind == "norm" for p in s.parameters)
    in_place = [size for phase, _, _, size in found["llama sequence none one"][0] if "in place" in phase]
    assert in_place == [4 * norms, 4], "the gradients of norms, and the norm of all"


@pytest.mark.multi
def test_selective_recomputation_repeats_no_sum(found):
    for sequence in ("sequence", "whole"):
        for overlap in ("one", "overlap"):
            none, selective = (found[f"llama {sequence} {mode} {overlap}"][0] for mode in ("none", "norm_activation"))
            for count in (lambda seen: Counter(kind for _, kind, _, _ in seen if kind != "all_gather"), total):
                assert count(none) == count(selective), (sequence, overlap)


def total(seen):
    """Bytes by kind: what is gathered in parts is as much as what is gathered at once."""
    counted = Counter()
    for _, kind, _, size in seen:
        counted[kind] += size
    return counted


@pytest.mark.multi
@pytest.mark.timeout(700)
def test_compiled_blocks_are_whole_and_move_what_eager_ones_move():
    found = told("compiled")
    assert len(found) == 12
    for name, (eager, compiled, breaks) in found.items():
        assert breaks == {}, name
        if OLDER and " full " in name:
            assert all(compiled[kind] <= count for kind, count in eager.items()), name
        else:
            assert compiled == eager, name
