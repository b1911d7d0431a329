"""A run directory of our own as one row of a validation."""

import json

from msgspec.structs import replace
from tests.cli.values import make_measurement, make_plan

from fullstride.cli.main import main
from fullstride.cluster.catalogue import assumed_cluster
from fullstride.files import write_json
from fullstride.measure.measurement import MemoryUse
from fullstride.model.source import load_spec
from fullstride.plan.plan import ModelRef
from fullstride.plan.toml import write_plan


def lay(path, seconds, same=True):
    path.mkdir()
    plan = make_plan(model=ModelRef(source="llama3-1b"))
    write_plan(plan, path / "plan.toml")
    write_json(path / "model.json", load_spec("llama3-1b"))
    write_json(path / "cluster.json", assumed_cluster("h100-sxm", 2))
    memory = MemoryUse(peak_allocated_bytes=30 * 2**30, peak_reserved_bytes=0, static_bytes=20 * 2**30)
    hashed = plan.plan_hash if same else "another"
    write_json(path / "measurement.json", replace(make_measurement(seconds), plan_hash=hashed, memory=memory))
    return str(path)


def test_a_measured_run_is_predicted(tmp_path, capsys):
    run = lay(tmp_path / "run", 0.05)
    assert main(["validate", run, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["files"]["run"]["time"]["n"] == 1
    assert {"time", "static_memory", "peak_memory"} <= set(data["all"])
    assert data["files"]["run"]["naive_time"]["mean_abs_pct"] < 1e-6  # one run, one constant
    assert main(["validate", run + "/measurement.json", "--json"]) == 0


def test_a_measurement_of_another_plan_is_left_out(tmp_path, capsys):
    assert main(["validate", lay(tmp_path / "run", 0.05, same=False), "--json"]) == 0
    file = json.loads(capsys.readouterr().out)["data"]["files"]["run"]
    assert "time" not in file and list(file["skipped"]) == ["the measurement is of another plan than the one beside it"]
