"""ZeRO on flat buffers equals a plain loop, and holds what it says."""

import pytest

from fullstride.engine.parity import run_cases
from fullstride.engine.parity_cases import make_case
from fullstride.plan.plan import Loss, Recompute

FULL, PART = Recompute(mode="full"), Recompute(mode="norm_activation")
CHUNKS = Loss(kind="chunked", chunk_tokens=7)

CASES = {
    2: (
        make_case("plain", ranks=2, stage=2, carrier="flat"),
        make_case("gpt2", tied=True, ranks=2, stage=1, carrier="flat", accumulation=3, recompute=PART, loss=CHUNKS),
        make_case("gpt2", tied=True, ranks=2, stage=2, carrier="flat", accumulation=3, recompute=FULL),
        make_case("plain", ranks=2, stage=3, carrier="flat", accumulation=3, recompute=FULL, loss=CHUNKS),
        make_case("llama", ranks=2, stage=3, carrier="flat", recompute=PART, reshard={"blocks": False, "head": False}),
        make_case("qwen3", tied=True, ranks=2, stage=3, carrier="flat", dtype="fp32", reshard={"model.layers.1": False}),
        make_case("mixtral", ranks=2, stage=2, carrier="flat", accumulation=3, dtype="fp32"),
    ),
    3: (
        make_case("plain", tied=True, ranks=3, stage=1, carrier="flat", accumulation=3, micro_batch=1),
        make_case("plain", ranks=3, stage=2, carrier="flat", micro_batch=1, recompute=PART),
        make_case("gpt2", tied=True, ranks=3, stage=3, carrier="flat", micro_batch=1, accumulation=3, loss=CHUNKS),
    ),
    4: (
        make_case("plain", ranks=4, stage=1, carrier="flat", replicate=2, accumulation=3, micro_batch=1),
        make_case("gpt2", tied=True, ranks=4, stage=2, carrier="flat", replicate=2, accumulation=3, micro_batch=1),
        make_case(
            "plain", tied=True, ranks=4, stage=3, carrier="flat", replicate=2, accumulation=3, micro_batch=1, loss=CHUNKS
        ),
        make_case("plain", ranks=4, stage=3, carrier="flat", micro_batch=1, recompute=FULL),
    ),
}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(CASES))
def test_flat_buffers_equal_a_plain_loop(ranks):
    outcomes = run_cases(CASES[ranks], ranks)
    assert len(outcomes) == len(CASES[ranks])
    assert not [(o.name, o.errors) for o in outcomes if o.errors]
