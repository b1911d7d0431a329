"""The verb `validate`: its JSON, its table of rows, refusals."""

import csv
import json

from tests.plan.validation.test_validation import ROW

from fullstride.cli.main import main

STATISTICS = {"n", "mean_abs_pct", "median_abs_pct", "p90_abs_pct", "worst_abs_pct", "bias_pct"}


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_json_has_errors_by_file_and_in_all(tmp_path, capsys):
    first = write(tmp_path / "a.csv", ROW, {**ROW, "step_time_s": "2.1"}, {**ROW, "heads": "", "layers": ""})
    second = write(tmp_path / "b.csv", {**ROW, "gpu": "H100-80GB-SXM"})
    assert main(["validate", first, second, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    data = printed["data"]
    assert set(data) == {"files", "all"} and set(data["files"]) == {"a.csv", "b.csv"}
    file = data["files"]["a.csv"]
    assert set(file) == {"time", "naive_time", "eligible", "coverage_pct", "skipped"}
    assert set(file["time"]) == STATISTICS and file["time"]["n"] == 2
    assert file["eligible"] == 2 and file["coverage_pct"] == 100.0 and file["skipped"] == {"no layers published": 1}
    assert data["all"]["time"]["n"] == 3 and set(data["all"]) == {"time", "naive_time"}


def test_rows_carry_prediction_and_terms_and_nothing_is_written_over(tmp_path, capsys):
    target = tmp_path / "rows.csv"
    source = write(tmp_path / "a.csv", ROW, {**ROW, "layers": ""})
    assert main(["validate", source, "--rows", str(target)]) == 0
    out = capsys.readouterr().out
    assert "step time" in out and "llm-foundry" not in out.splitlines()[0]
    rows = list(csv.DictReader(target.read_text().splitlines()))
    assert len(rows) == 2 and rows[1]["skipped"] == "no layers published"
    terms = sum(float(value) for name, value in rows[0].items() if name.endswith(" s") and value)
    assert abs(terms / float(rows[0]["predicted_s"]) - 1) < 1e-3
    assert float(rows[0]["matrix products s"]) > 0
    assert main(["validate", source, "--rows", str(target)]) == 3
    assert "is there already" in capsys.readouterr().err


def test_refusals(tmp_path, capsys):
    assert main(["validate", str(tmp_path / "none.csv")]) == 3
    assert "no such file" in capsys.readouterr().err
    assert main(["validate"]) == 2
