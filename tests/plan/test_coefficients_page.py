"""Every coefficient is told, with where it is from."""

from msgspec.structs import asdict, replace

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.cluster.cluster import DEFAULT_COEFFICIENTS, MatmulPoint
from fullstride.plan.calibration import calibrated
from fullstride.plan.coefficients_page import WORDS, coefficients_table


def test_every_coefficient_has_words():
    assert set(WORDS) == set(asdict(DEFAULT_COEFFICIENTS)) - {"source"}


def test_each_is_assumed_or_from_the_calibration():
    plain = assumed_cluster("h100-sxm-96", 8)
    cluster = calibrated(plain, "fsdp2")
    (table,) = coefficients_table(cluster)
    told = {row.cells[0]: row.cells[2] for row in table.rows}
    changed = {name for name, value in asdict(cluster.reached).items() if value != getattr(DEFAULT_COEFFICIENTS, name)}
    assert changed > {"matmul_share", "source"}
    for name, words in WORDS.items():
        assert told[words] == (cluster.reached.source if name in changed else "assumed")
    assert {row.cells[2] for row in coefficients_table(plain)[0].rows} == {"assumed"}


def test_a_measured_machine_needs_none():
    known = replace(assumed_cluster("h100-sxm", 1), matmuls=(MatmulPoint(dtype="bf16", m=1, n=1, k=1, seconds=1e-5),))
    assert coefficients_table(known) == ()
