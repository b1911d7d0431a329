"""Has the machine measured, in processes of its own, and lays what came back into the Cluster. Imports no torch itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fullstride.cluster.children import Finished, end, run_bounded, tree
from fullstride.cluster.cluster import Cluster
from fullstride.cluster.readings import Readings, merge
from fullstride.errors import FullstrideError
from fullstride.files import read_json

BENCH_MODULE = "fullstride.cluster.linkbench"
START_SECONDS = 90.0
"""For interpreter, torch and process group to come up; on top of a part's own time."""
SECONDS: dict[tuple[str, bool], tuple[float, float]] = {
    ("cpu", True): (8.0, 5.0),
    ("cpu", False): (30.0, 20.0),
    ("gpu", True): (15.0, 8.0),
    ("gpu", False): (60.0, 40.0),
}
"""Time budget of the device part and of the links part."""


def measure_cluster(
    cluster: Cluster,
    *,
    quick: bool = True,
    timeout_seconds: float | None = None,
    disk_folder: str | None = None,
    warn: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure this machine and return the cluster with what was found; what fails is left as it was, with a warning.

    Args:
        cluster: as it was probed here; a cluster of several nodes or groups is measured as this machine sees itself.
        quick: about 10 s on CPU and 25 s on GPUs, instead of 50 and 100.
        timeout_seconds: for each part, start included; follows from `quick` if not given.
        disk_folder: on the disk to be measured; the present folder if not given.
        warn: takes one line for each thing that was left out; standard error if not given.
    """
    tell = warn or _to_stderr
    kind = "cpu" if cluster.device.kind == "cpu" else "gpu"
    ranks = cluster.groups[0].num_devices
    device_seconds, link_seconds = SECONDS[kind, quick]
    threads = max(1, cluster.host.num_cores // ranks) if kind == "cpu" else 0
    common = ["--device", "cpu" if kind == "cpu" else "cuda"] + (["--quick"] if quick else [])
    words = [
        "--part",
        "device",
        "--seconds",
        str(device_seconds),
        "--threads",
        str(threads),
        "--disk",
        disk_folder or str(Path.cwd()),
    ]
    plain = [sys.executable, "-m", BENCH_MODULE]
    # Ranks of a CPU host share its memory and cores: the others are kept as busy as they will be, while one is timed.
    companions = ranks - 1 if kind == "cpu" and ranks <= cluster.host.num_cores else 0
    limit = timeout_seconds or device_seconds * 3 + START_SECONDS
    found = _bench(plain, [*common, *words], limit, companions, "device", tell)
    cluster = merge(cluster, found)
    if ranks > 1:
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
            BENCH_MODULE,
        ]
        words = ["--part", "links", "--seconds", str(link_seconds), "--threads", str(threads)]
        limit = timeout_seconds or link_seconds * 3 + START_SECONDS
        cluster = merge(cluster, _bench(launcher, [*common, *words], limit, 0, "links", tell))
    return cluster


def _bench(
    launcher: list[str], words: list[str], limit: float, companions: int, part: str, tell: Callable[[str], None]
) -> Readings:
    """Run one part; an empty reading if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "readings.json"
        others = [
            _companion(launcher, [*words, "--disk", "", "--out", str(Path(folder) / f"other{i}.json")])
            for i in range(companions)
        ]
        try:
            done = run_bounded([*launcher, *words, "--out", str(out)], timeout_seconds=limit)
        finally:
            for other in others:
                end(tree(other.pid), grace_seconds=1.0)
                other.wait()
        try:
            readings = read_json(out, Readings)
        except FullstrideError:
            tell(f"{part} could not be measured: {_why(done, limit)}")
            return Readings()
    for note in readings.notes:
        tell(note)
    return readings


def _companion(launcher: list[str], words: list[str]) -> subprocess.Popen[bytes]:
    none = subprocess.DEVNULL
    return subprocess.Popen([*launcher, *words], stdin=none, stdout=none, stderr=none, start_new_session=True)


def _why(done: Finished, limit: float) -> str:
    if done.code is None:
        return f"it was not done after {limit:.0f} s"
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"it ended with status {done.code}: {(errors or lines or ['no words'])[-1][:300]}"


def _to_stderr(line: str) -> None:
    print(f"fullstride: {line}", file=sys.stderr)
