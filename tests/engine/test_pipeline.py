"""Pipelines: whatever the schedule, the numbers are those of one process; what cannot be exact is refused."""

import pytest

from fullstride.engine.parity import run_cases
from fullstride.engine.parity_cases import make_case
from fullstride.plan.plan import Loss, Recompute

FULL, PART = Recompute(mode="full"), Recompute(mode="norm_activation")
CHUNKS = Loss(kind="chunked", chunk_tokens=7)

CASES = {
    2: (
        make_case("plain", pp=2, schedule="gpipe", accumulation=2, micro_batch=3, micro_batch_per_stage=(4, 2)),
        make_case("llama", pp=2, accumulation=3, layers_per_stage=(2, 1), recompute=PART, loss=CHUNKS),
        make_case("gpt2", tied=True, pp=2, accumulation=2, micro_batch=4, micro_batch_per_stage=(1, 4), recompute=FULL),
        make_case("plain", tied=True, pp=2, accumulation=2, micro_batch=4, micro_batch_per_stage=(4, 1), loss=CHUNKS),
        make_case("gpt2", pp=2, schedule="zb-h1", accumulation=4, micro_batch=1, recompute=FULL),
        make_case("plain", tied=True, pp=2, schedule="zb-h1", accumulation=2, micro_batch_per_stage=(1, 2), recompute=PART),
        make_case("mixtral", pp=2, schedule="zb-h1", accumulation=2, dtype="fp32"),
        make_case("phi", tied=True, pp=2, accumulation=2),  # a tied head with a bias of its own
        make_case("plain", tied=True, pp=2, schedule="interleaved", chunks=3, layers=6, accumulation=4, micro_batch=1),
        make_case("plain", pp=2, schedule="bfs", chunks=2, layers=5, accumulation=2, micro_batch_per_stage=(1, 2, 2, 4)),
        make_case("gpt2", tied=True, pp=2, schedule="zb-v", chunks=2, layers=4, accumulation=4, micro_batch=1, loss=CHUNKS),
    ),
    3: (
        make_case("plain", tied=True, pp=3, layers=4, accumulation=4, micro_batch=1, layers_per_stage=(1, 2, 1)),
        make_case("plain", pp=3, schedule="zb-v", chunks=2, layers=6, accumulation=3, recompute=FULL),
    ),
    4: (
        make_case("plain", tied=True, pp=4, schedule="zb-v", chunks=2, layers=8, accumulation=7, micro_batch=1),
        make_case("plain", pp=2, ranks=2, stage=1, accumulation=3, micro_batch=1),
        make_case("gpt2", tied=True, pp=2, ranks=2, stage=2, accumulation=2, micro_batch=1, loss=CHUNKS),
        make_case("gpt2", tied=True, pp=2, ranks=2, stage=1, carrier="flat", schedule="zb-h1", accumulation=3, micro_batch=1),
        make_case("plain", pp=2, ranks=2, stage=2, carrier="flat", accumulation=3, micro_batch=1, recompute=FULL),
        make_case("plain", pp=2, ranks=2, stage=2, carrier="flat", schedule="interleaved", chunks=2, layers=4, accumulation=2),
        make_case("llama", pp=2, tp=2, accumulation=2, micro_batch=1, recompute=FULL),
        make_case("gpt2", tied=True, pp=2, tp=2, schedule="zb-h1", accumulation=3, micro_batch=1, loss=CHUNKS),
        make_case("llama", pp=2, tp=2, schedule="zb-v", chunks=2, layers=4, accumulation=2, sequence_parallel=False),
    ),
}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(CASES))
def test_pipelines_equal_a_plain_loop(ranks):
    outcomes = run_cases(CASES[ranks], ranks)
    assert len(outcomes) == len(CASES[ranks])
    assert not [(o.name, o.errors) for o in outcomes if o.errors]
