"""Look-ups: exact at the points, monotone between them, a roofline where nothing was measured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullstride.cluster.catalogue import assumed_cluster
from fullstride.cluster.cluster import AttentionPoint, Coefficients, CollectivePoint, Figure, MatmulPoint
from fullstride.cluster.rates import (
    algorithms,
    attention_seconds,
    collective_seconds,
    copy_seconds,
    launch_seconds,
    matmul_seconds,
)
from fullstride.files import convert

BASE = assumed_cluster()
SIZES = st.integers(1, 2**18)


def changed(cluster, **fields):
    content = {name: getattr(cluster, name) for name in cluster.__struct_fields__} | fields
    return type(cluster)(**content)


def rising(draw, sizes, low, high):
    """Seconds that rise with size, at a rate that never falls: what a real table looks like."""
    seconds, rate = [], draw(st.floats(low, high))
    for size in sizes:
        rate *= draw(st.floats(1.0, 1.9))
        seconds.append(max(size / rate, seconds[-1] if seconds else 0))
    return seconds


@st.composite
def tables(draw):
    points = []
    shapes = draw(
        st.lists(
            st.tuples(st.sampled_from([256, 1024, 4096, 14336]), st.sampled_from([256, 2048, 8192])),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    for n, k in shapes:
        sizes = sorted(draw(st.sets(st.sampled_from([256, 512, 1024, 4096, 16384]), min_size=1)))
        for m, seconds in zip(sizes, rising(draw, sizes, 1e7, 1e8), strict=True):
            points.append(MatmulPoint(dtype="bf16", m=m, n=n, k=k, seconds=seconds))
    return tuple(points)


@given(tables())
def test_a_measured_product_is_met_exactly(points):
    cluster = changed(BASE, matmuls=points)
    for point in points:
        seconds, confidence, source = matmul_seconds(cluster, "bf16", point.m, point.n, point.k)
        assert seconds == pytest.approx(point.seconds, rel=1e-9)
        assert confidence == "modelled" and "measured" in source


@given(tables(), SIZES, SIZES, st.sampled_from([128, 1000, 4096, 128256]), st.sampled_from([64, 512, 5000]))
def test_more_tokens_never_take_less_time(points, a, b, n, k):
    for cluster in (changed(BASE, matmuls=points), BASE):
        low, high = sorted((a, b))
        first, second = (matmul_seconds(cluster, "bf16", m, n, k).seconds for m in (low, high))
        assert 0 < first <= second * (1 + 1e-9)


@given(st.tuples(SIZES, SIZES, SIZES), st.integers(0, 2))
def test_the_roofline_rises_in_every_size(sizes, which):
    sizes = [8 * size for size in sizes]
    larger = [size * 2 if index == which else size for index, size in enumerate(sizes)]
    assert matmul_seconds(BASE, "bf16", *sizes).seconds <= matmul_seconds(BASE, "bf16", *larger).seconds


def test_the_roofline_nears_its_share_of_the_peak_and_small_products_do_not():
    seconds, confidence, source = matmul_seconds(BASE, "bf16", 16384, 8192, 8192)
    assert 0.6 < 2 * 16384 * 8192 * 8192 / seconds / 989.4e12 < 0.75
    assert confidence == "assumed" and "datasheet" in source
    assert 2 * 64**3 / matmul_seconds(BASE, "bf16", 64, 64, 64).seconds < 1e12


def test_a_dtype_that_was_not_measured_falls_back_and_says_so():
    cluster = changed(BASE, matmuls=(MatmulPoint(dtype="bf16", m=64, n=64, k=64, seconds=1e-3),))
    assert "bf16 taken for fp16" in matmul_seconds(cluster, "fp16", 64, 64, 64).source
    assert matmul_seconds(cluster, "fp32", 64, 64, 64).confidence == "assumed"


def test_no_work_takes_no_time():
    assert matmul_seconds(BASE, "bf16", 0, 8, 8).seconds == 0
    assert attention_seconds(BASE, "bf16", 0, 8, 8, 64, 128)[0].seconds == 0
    assert collective_seconds(BASE, "all_reduce", 1e9, 1).seconds == 0
    assert copy_seconds(BASE, 0).seconds == 0


def test_attention_meets_its_points_and_grows_with_the_square_beyond_them():
    points = tuple(
        AttentionPoint(
            dtype="bf16", batch=1, num_heads=32, num_kv_heads=8, head_dim=128, sequence_length=s,
            forward_seconds=1e-3 * (s / 1024) ** 2, backward_seconds=3e-3 * (s / 1024) ** 2,
        )
        for s in (1024, 4096)
    )  # fmt: skip
    cluster = changed(BASE, attentions=points)
    forward, backward = attention_seconds(cluster, "bf16", 1, 32, 8, 128, 4096, True)
    assert (forward.seconds, backward.seconds) == (pytest.approx(16e-3), pytest.approx(48e-3))
    assert attention_seconds(cluster, "bf16", 1, 32, 8, 128, 4096, False)[0].seconds == pytest.approx(32e-3)
    assert attention_seconds(cluster, "bf16", 2, 32, 8, 128, 4096, True)[0].seconds == pytest.approx(32e-3)
    assert attention_seconds(cluster, "bf16", 1, 32, 8, 128, 8192, True)[0].seconds == pytest.approx(64e-3)
    guessed = attention_seconds(BASE, "bf16", 1, 32, 8, 128, 4096, True)
    assert guessed[0].confidence == "assumed" and guessed[1].seconds > guessed[0].seconds


@given(st.integers(1, 2**34), st.integers(1, 2**34), st.integers(2, 64))
def test_collectives_rise_with_bytes(a, b, ranks):
    points = tuple(CollectivePoint(op="all_reduce", ranks=8, bytes=2**p, seconds=1e-5 + 2**p / 3e11) for p in range(10, 30, 4))
    for cluster in (BASE, changed(assumed_cluster("h100-sxm", 64), collectives=points)):
        low, high = sorted((a, b))
        one, two = (collective_seconds(cluster, "all_reduce", size, ranks).seconds for size in (low, high))
        assert 0 < one <= two * (1 + 1e-9)


def test_collectives_meet_their_points_and_the_ring_formula():
    points = (CollectivePoint(op="all_gather", ranks=2, bytes=2**20, seconds=5e-4),)
    cluster = changed(BASE, collectives=points)
    assert collective_seconds(cluster, "all_gather", 2**20, 2).seconds == pytest.approx(5e-4)
    seconds, confidence, source = collective_seconds(BASE, "all_gather", 8e9, 8)
    assert confidence == "assumed" and "ring" in source
    assert seconds == pytest.approx(7 / 8 * 8e9 / (450e9 * 0.8) + 7 * 4e-6)


def test_between_nodes_the_adapters_of_the_group_carry_it():
    cluster = assumed_cluster("h100-sxm", 16)
    whole = collective_seconds(cluster, "all_gather", 1e10, 16).seconds
    spread = collective_seconds(cluster, "all_gather", 1e10, 2, per_node=1).seconds
    assert whole == pytest.approx(15 / 16 * 1e10 / (0.8 * 400e9), rel=0.01)
    assert spread == pytest.approx(1 / 2 * 1e10 / (0.8 * 50e9), rel=0.01)


def test_a_cpu_with_no_measurements_says_that_it_assumes():
    content = {"kind": "cpu", "name": "cpu", "memory_bytes": {"value": 1e9, "source": "assumed"}}
    device = convert(content, type(BASE.device), "test")
    cluster = changed(BASE, groups=(changed(BASE.groups[0], device=device),))
    for rate in (matmul_seconds(cluster, "fp32", 64, 64, 64), copy_seconds(cluster, 1e6), launch_seconds(cluster)):
        assert rate.confidence == "assumed" and "assumed" in rate.source
    faster = changed(device, memory_bandwidth=Figure(value=1e10, source="measured"))
    assert copy_seconds(changed(BASE, groups=(changed(BASE.groups[0], device=faster),)), 1e10).seconds == pytest.approx(1.0)


@given(st.integers(2, 512), st.floats(1, 1e10), st.integers(1, 8))
def test_ring_and_tree_in_closed_form(ranks, size, inside):
    """Ring 2 (n - 1) messages and 2 (n - 1) / n of the bytes; a tree's depth grows with the logarithm of the nodes."""
    found = algorithms("all_reduce", size, ranks, inside, 1e11, 5e-6)
    assert found["ring"] == pytest.approx(2 * (ranks - 1) * 5e-6 + 2 * (ranks - 1) / ranks * size / 1e11)
    nodes = -(-ranks // inside)
    hops = 2 * (inside - 1) + 2 * math.ceil(math.log2(nodes)) if nodes > 1 else 2 * math.ceil(math.log2(ranks))
    assert found["tree"] == pytest.approx(hops * 5e-6 + 2 * size / 0.9e11)
    assert set(algorithms("all_gather", size, ranks, inside, 1e11, 5e-6)) == {"ring"}


def test_small_messages_over_many_nodes_go_by_tree_and_large_ones_in_a_node_by_the_switch():
    many = assumed_cluster("h100-sxm", 512)
    assert "tree" in collective_seconds(many, "all_reduce", 1e4, 512).source
    assert "NVLS" in collective_seconds(BASE, "all_reduce", 1e9, 8).source
    assert "ring" in collective_seconds(assumed_cluster("a100-sxm-80"), "all_reduce", 1e9, 8).source


def test_what_leaves_the_node_in_an_exchange_goes_through_one_adapter():
    many = assumed_cluster("h100-sxm", 64)
    inside, across = (collective_seconds(many, "all_to_all", 1e9, n).seconds for n in (8, 64))
    assert across == pytest.approx(56 / 64 * 1e9 / (50e9 * 0.8) + 63**0.5 * 5e-6)
    assert inside < across / 3


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096))
def test_tiles_never_beat_the_share_of_the_peak(m, n, k):
    seconds = matmul_seconds(BASE, "bf16", m, n, k).seconds
    assert seconds >= 2 * m * n * k / (989.4e12 * 0.75)


def test_a_last_wave_that_is_hardly_filled_costs():
    """132 multiprocessors: 132 tiles of 128 x 256 fill one wave, a few more begin another."""
    full = matmul_seconds(BASE, "bf16", 128 * 132, 256, 8192).seconds
    over = matmul_seconds(BASE, "bf16", 128 * 140, 256, 8192).seconds
    assert over / full > 1.3 > 140 / 132


def test_coefficients_replace_what_is_assumed_and_are_named():
    fitted = changed(BASE, coefficients=Coefficients(matmul_share=0.6, memory_share=0.5, source="a fit"))
    slow, quick = (matmul_seconds(c, "bf16", 16384, 8192, 8192) for c in (fitted, BASE))
    assert slow.seconds / quick.seconds == pytest.approx(0.75 / 0.6, rel=0.01)
    assert "a fit" in slow.source
    assert copy_seconds(fitted, 1e9).seconds == pytest.approx(1e9 / (3350e9 * 0.5))
