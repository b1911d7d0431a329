"""Measuring: a tiny real bench on this CPU, and benches that fail."""

import sys

import pytest

from fullstride.cluster import measuring
from fullstride.cluster.cluster import Cluster, Figure, MatmulPoint
from fullstride.cluster.diskbench import disk_rates
from fullstride.cluster.measuring import measure_cluster
from fullstride.cluster.probe import cpu_cluster
from fullstride.cluster.rates import collective_seconds, copy_seconds, matmul_seconds
from fullstride.cluster.readings import Readings, merge
from fullstride.files import from_json, to_json


def test_readings_fill_their_places_and_leave_the_rest():
    base = cpu_cluster(2)
    point = MatmulPoint(dtype="fp32", m=1, n=2, k=3, seconds=1.0)
    figures = {
        "device.launch_seconds": Figure(value=1e-6, source="measured"),
        "link.latency": Figure(value=2e-6, source="measured"),
    }
    merged = merge(base, Readings(matmuls=(point,), figures=figures, versions={"torch": "9"}))
    assert merged.matmuls == (point,) and merged.device.launch_seconds.value == 1e-6
    assert merged.groups[0].link.latency.value == 2e-6 and merged.groups[0].link.bandwidth == base.groups[0].link.bandwidth
    assert merged.versions["torch"] == "9" and merged.versions["python"]
    assert merge(merged, Readings()) == merged


def test_the_disk_is_timed(tmp_path):
    rates = {name: (value, note) for name, value, note in disk_rates(str(tmp_path), 2**25)}
    value, note = rates["write"]
    assert value > 0 and ("direct I/O" in note)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no_crash(tmp_path):
    assert [(name, value) for name, value, _ in disk_rates(str(tmp_path / "none"), 2**25)] == [("write", None)]


@pytest.mark.parametrize(
    ("program", "words"),
    [("import time; time.sleep(60)", "not done after 1 s"), ("raise ValueError('no torch')", "ValueError: no torch")],
)
def test_a_bench_that_fails_is_a_warning(tmp_path, monkeypatch, program, words):
    (tmp_path / "a_bench.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(measuring, "BENCH_MODULE", "a_bench")
    lines = []
    cluster = cpu_cluster(1)
    assert measure_cluster(cluster, timeout_seconds=1.0 if "sleep" in program else 30.0, warn=lines.append) == cluster
    assert len(lines) == 1 and words in lines[0] and lines[0].startswith("device could not be measured")


@pytest.mark.multi
@pytest.mark.slow
def test_a_small_real_bench_with_two_ranks(tmp_path, monkeypatch):
    monkeypatch.setitem(measuring.SECONDS, ("cpu", True), (1.0, 2.0))
    lines = []
    base = cpu_cluster(2)
    cluster = measure_cluster(base, disk_folder=str(tmp_path), warn=lines.append)
    assert not [line for line in lines if "could not" in line], lines
    assert cluster.matmuls and all(point.seconds > 0 for point in cluster.matmuls)
    assert cluster.device.memory_bandwidth.source == "measured" and cluster.host.disk_write.value > 0
    assert {point.ranks for point in cluster.collectives} == {2}
    assert "all_reduce" in {point.op for point in cluster.collectives}
    assert cluster.groups[0].link.latency.source == "measured"
    point = cluster.matmuls[0]
    assert matmul_seconds(cluster, point.dtype, point.m, point.n, point.k).seconds == pytest.approx(point.seconds)
    assert copy_seconds(cluster, 1e6).confidence == collective_seconds(cluster, "all_reduce", 1e6, 2).confidence == "modelled"
    assert from_json(to_json(cluster), Cluster, "memory") == cluster
    assert sys.modules.get("fullstride.cluster.linkbench") is None
