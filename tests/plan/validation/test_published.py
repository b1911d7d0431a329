"""The published runs themselves, where they lie beside this checkout: errors of time stay below what was reached."""

from pathlib import Path

import pytest

from fullstride.plan.cost.table import terms
from fullstride.plan.validation.errors import errors_of, naive_seconds
from fullstride.plan.validation.rows import Case, Skip, read_rows

FOLDER = Path(__file__).parents[4] / "shared" / "validation"
BARS = {
    "mosaicml_llm_foundry": 8.0,
    "megatron_bridge": 12.0,
    "vtrain_singlenode": 12.0,
    "torchtitan": 8.0,
    "simumax_b200": 4.0,
    "bigscience_176b_prequel": 8.0,
    "papers_and_readmes": 7.0,
}
"""Mean absolute error of step time in per cent."""


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="the published runs are not here")
@pytest.mark.parametrize(("name", "bar"), BARS.items())
def test_mean_error_of_step_time(name, bar):
    rows = read_rows(FOLDER / f"{name}.csv")
    cases = [row for row in rows if isinstance(row, Case) and row.seconds]
    said = [sum(term.exposed_seconds for term in terms(case.plan, case.spec, case.cluster)) for case in cases]
    found = errors_of([100 * (time / case.seconds - 1) for time, case in zip(said, cases, strict=True)])
    naive = errors_of([100 * (time / case.seconds - 1) for time, case in zip(naive_seconds(cases), cases, strict=True)])
    assert found.mean_abs_pct <= bar
    limit = naive.mean_abs_pct / 2 if naive.mean_abs_pct > 15 else naive.mean_abs_pct
    assert found.mean_abs_pct <= limit
    lost = sum(isinstance(row, Skip) and row.eligible for row in rows)
    assert lost <= 0.05 * (len(cases) + lost)
