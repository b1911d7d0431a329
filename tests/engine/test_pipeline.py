"""Pipelines: whatever the schedule, the numbers are those of one process; what cannot be exact is refused."""

import pytest

from fullstride.engine.parity import run_cases
from fullstride.engine.parity_cases import make_case

CASES = {
    2: (
        make_case("plain", pp=2, accumulation=3, layers_per_stage=(2, 1)),
        make_case("llama", pp=2, accumulation=3, layers_per_stage=(2, 1)),
        make_case("gpt2", tied=True, pp=2, accumulation=3, layers_per_stage=(1, 2)),
        make_case("plain", pp=2, schedule="gpipe", accumulation=3, micro_batch=1),
    ),
}


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize("ranks", sorted(CASES))
def test_pipelines_equal_a_plain_loop(ranks):
    outcomes = run_cases(CASES[ranks], ranks)
    assert len(outcomes) == len(CASES[ranks])
    assert not [(o.name, o.errors) for o in outcomes if o.errors]
