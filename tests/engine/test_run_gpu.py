"""A Run on one GPU: lower dtypes, compilation, chunks and recomputation against fp32 and each other."""

import gc

import pytest
import torch

from fullstride.engine import compiling
from fullstride.engine.build import from_config
from fullstride.engine.parity_models import FAMILIES
from fullstride.engine.run import prepare
from fullstride.plan.plan import Batch, Compile, Loss, ModelRef, Plan, Precision, Recipe, Recompute, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own
]
CONFIG = {**FAMILIES["llama"], "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 8191}
CONFIG |= {"num_key_value_heads": 4, "num_hidden_layers": 12, "max_position_embeddings": 2048, "initializer_range": 0.02}
WEIGHTS = Precision(cast="weights", embedding="bf16", block="bf16", head="bf16", gradient="bf16")
AUTOCAST = Precision(cast="autocast", embedding="bf16", block="bf16", head="bf16")
COMPILED, CHUNKS = Compile(mode="block"), Loss(kind="chunked", chunk_tokens=1000)


def losses(*, micro_batch=2, accumulation=1, steps=3, **parts):
    torch._dynamo.reset()
    gc.collect()  # a model whose forwards were replaced is part of cycles
    plan = Plan(
        model=ModelRef(source="test"),
        workload=Workload(sequence_length=1024, samples_per_step=micro_batch * accumulation),
        recipe=Recipe(learning_rate=1e-5, warmup_steps=0),  # small, so that rounding of one step does not grow in the next
        batch=Batch(micro_batch=micro_batch, accumulation=accumulation),
        **parts,
    )
    run = prepare(from_config(CONFIG, "test"), plan, device="cuda")
    found, counts = [], []
    torch.cuda.reset_peak_memory_stats()
    for seed in range(steps):
        ids = torch.randint(0, 8191, (2, 1024), generator=torch.Generator().manual_seed(seed))
        out = run.step({"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)})
        found.append((out.loss, out.grad_norm))
        counts.append(compiling.recompile_count())
    peak = torch.cuda.max_memory_allocated()
    run.close()
    assert counts[0] == counts[-1]
    return torch.tensor(found), peak


@pytest.fixture(scope="module")
def wide():
    return losses()[0]


@pytest.mark.parametrize("parts", [
    {"precision": WEIGHTS},
    {"precision": AUTOCAST},
    {"precision": WEIGHTS, "loss": CHUNKS},
    {"precision": AUTOCAST, "loss": CHUNKS},
    {"precision": WEIGHTS, "compile": COMPILED, "loss": CHUNKS},
    {"precision": WEIGHTS, "compile": COMPILED, "loss": CHUNKS, "recompute": Recompute(mode="norm_activation")},
    {"precision": WEIGHTS, "compile": COMPILED, "recompute": Recompute(mode="full", every=2)},
    {"precision": AUTOCAST, "compile": COMPILED, "loss": CHUNKS},
    {"precision": Precision(cast="weights", embedding="bf16", block="bf16", head="bf16"), "accumulation": 2, "micro_batch": 1},
], ids=str)  # fmt: skip
def test_bf16_is_close_to_fp32(wide, parts):
    found, _ = losses(**parts)
    assert torch.allclose(found[:, 0], wide[:, 0], rtol=2e-3)
    assert torch.allclose(found[:, 1], wide[:, 1], rtol=2e-2)


@pytest.mark.parametrize("compile", [Compile(), COMPILED], ids=["eager", "compiled"])
def test_recomputation_lowers_the_peak(compile):
    peaks = [losses(precision=WEIGHTS, compile=compile, loss=CHUNKS, recompute=Recompute(mode=m))[1] for m in ("none", "full")]
    part = losses(precision=WEIGHTS, compile=compile, loss=CHUNKS, recompute=Recompute(mode="norm_activation"))[1]
    assert peaks[1] < peaks[0]
    assert peaks[1] < part <= peaks[0]


def test_chunks_lower_the_peak_and_fp32_agrees(wide):
    (found, chunked), whole = losses(loss=CHUNKS), losses()[1]
    assert torch.allclose(found, wide, rtol=1e-4)
    assert chunked < whole
