"""The page of a tuning run, for every way it can come out."""

import math
import re

import msgspec
import pytest
from tests.tune import samples_ladder as samples

from fullstride.plan.toml import plan_text
from fullstride.report.document import Chart, Code, Heading, Stats, Table
from fullstride.report.html import html_of
from fullstride.report.terminal import text_of
from fullstride.tune.page import best_measurement, ladder_document, state_of, waterfall
from fullstride.tune.page_predictions import peak_rows, predictions

STATES = {
    "won": "won",
    "stands": "stands",
    "interrupted": "unconfirmed",
    "no_baseline": "nothing runs",
    "another_runs": "other runs",
}
WAYS = tuple(STATES)


def page(ladder, **more):
    return ladder_document(ladder, cluster=samples.cluster(), spec_name="llama3-1b", run_dir="runs/a", **more)


def of_type(document, block_type):
    return [block for block in document.blocks if isinstance(block, block_type)]


def titled(document, title):
    return next(block for block in document.blocks if getattr(block, "title", "") == title)


@pytest.mark.parametrize("way", WAYS)
def test_every_outcome_has_a_page_in_every_writer(way):
    document = page(getattr(samples, way)(), train_command="fullstride train best.toml")
    assert "llama3-1b" in html_of(document)
    for width in (60, 120):
        text = text_of(document, width)
        assert document.title in " ".join(text.split())
        assert ("fullstride train best.toml" in text) == (way != "no_baseline"), "only a plan that ran is offered"


@pytest.mark.parametrize(("way", "state"), list(STATES.items()))
def test_the_state_is_judged_by_what_was_measured(way, state):
    assert state_of(getattr(samples, way)()) == state


def test_only_a_better_final_measurement_is_called_a_gain():
    won = samples.won()
    for verdict in ("no difference", "undetermined", "void", "worse"):
        ladder = msgspec.structs.replace(won, final=msgspec.structs.replace(won.final, verdict=verdict))
        assert state_of(ladder) == "unconfirmed"
        assert not re.search(r"\d times as fast", page(ladder).title)
    stale = msgspec.structs.replace(won, best_plan=samples.COMPILED)
    assert state_of(stale) == "unconfirmed", "the final measurement is of another plan"
    assert page(won).title == "llama3-1b trains 1.34 times as fast"
    assert "1.338 to 1.346" in page(won).subtitle
    assert page(samples.stands()).title == "llama3-1b: the baseline stands"


def test_before_and_after_stand_beside_each_other():
    stats = {stat.label: stat for stat in of_type(page(samples.won()), Stats)[0].items}
    assert stats["Tokens per second"].value == "109 k"
    assert stats["Tokens per second"].note == "81.4 k before"
    assert (stats["Step time"].value, stats["Step time"].note) == ("1.20 s", "1.61 s before")
    assert stats["Peak memory"].note == "71.0 GiB before"
    assert (stats["Changes kept"].value, stats["Changes kept"].note) == ("2", "1 undone, 1 failed, 1 not tried")


def test_the_waterfall_sums_to_what_was_measured():
    chart = waterfall(samples.won())
    (trace,) = chart.traces
    assert trace.x == ("baseline", "compile", "chunked loss", "drift at the end", "best plan")
    assert trace.y[0] == pytest.approx(1610)
    assert trace.y[1] == pytest.approx(1610 / 1.237 - 1610)
    assert sum(trace.y[:-1]) == pytest.approx(trace.y[-1]) == pytest.approx(1200)


def test_an_interrupted_run_shows_its_rungs_without_a_claim():
    document = page(samples.interrupted())
    trace = titled(document, "Step time, rung by rung").traces[0]
    assert trace.x == ("baseline", "compile", "chunked loss", "best plan")
    assert sum(trace.y[:-1]) == pytest.approx(trace.y[-1])
    assert "1.33" in document.subtitle, "the product of the kept rungs"
    assert any(getattr(block, "tone", "") == "warn" for block in document.blocks)


def test_nothing_kept_means_no_waterfall():
    assert waterfall(samples.stands()) is None
    assert waterfall(samples.no_baseline()) is None
    assert waterfall(samples.another_runs()) is None


def test_every_lever_has_its_verdict_and_reason():
    table = titled(page(samples.won()), "Every lever")
    assert [row.cells[:2] for row in table.rows] == [
        ("compile", "kept"),
        ("chunked loss", "kept"),
        ("micro-batch", "failed"),
        ("data workers", "undone"),
        ("recompute", "not tried"),
    ]
    assert all(row.cells[5] for row in table.rows)
    assert "out of memory" in table.rows[2].cells[5]
    assert "wanted 7.8 GiB" in table.rows[2].cells[5]
    assert table.rows[0].cells[4] == "1.237 (1.232 to 1.242)"


def test_attribution_adds_up_before_and_after():
    chart = titled(page(samples.won()), "Where a step goes")
    assert chart.traces[0].x == ("baseline", "best plan")
    assert sum(trace.y[0] for trace in chart.traces) == pytest.approx(1610)


def test_the_ledger_stands_at_its_fullest_moment():
    estimate = samples.estimate(samples.BASE, 1.0, 40.0)
    moment, rows = peak_rows(estimate)
    assert moment.name == "backward"
    assert "context" in {row.kind for row in rows}
    late = msgspec.structs.replace(estimate.rows[0], name="late", moments=("checkpoint",), bytes=2**50)
    far = msgspec.structs.replace(estimate.rows[0], name="far", stage=3, bytes=1)
    assert peak_rows(msgspec.structs.replace(estimate, rows=(*estimate.rows, late, far)))[1] == rows


def test_predicted_and_used_memory_add_up():
    ladder = samples.won()
    chart = titled(page(ladder), "Memory, predicted and used")
    predicted = sum(trace.y[0] for trace in chart.traces if trace.x == ("predicted",))
    used = sum(trace.y[0] for trace in chart.traces if trace.x == ("used",))
    _, rows = peak_rows(ladder.trials[1].estimate)
    assert predicted == pytest.approx(sum(row.bytes for row in rows) / 2**30)
    assert used == pytest.approx(best_measurement(ladder).memory.device_used_bytes / 2**30)
    assert len(chart.traces) <= 10, "a colour for each"


def test_errors_of_predictions_are_printed_for_every_trial():
    found = predictions(samples.won())
    assert [one.name for one in found] == ["baseline", "compile", "chunked loss", "data workers"]
    assert found[0].time_error == pytest.approx(1.70 / 1.62 - 1)
    assert found[0].memory_error == pytest.approx(66.4 / 71.0 - 1)
    table = titled(page(samples.won()), "Predicted against measured")
    assert [row.tone for row in table.rows] == ["plain", "plain", "plain", "warn"], "19.7 % is over 15 %"
    assert table.rows[0].cells[3] == "+4.9 %"


def test_memory_that_a_device_does_not_count_is_no_error_of_zero():
    ladder = samples.won()
    memory = msgspec.structs.replace(ladder.baseline.memory, peak_allocated_bytes=0)
    baseline = msgspec.structs.replace(ladder.baseline, memory=memory, mfu_full=None)
    ladder = msgspec.structs.replace(ladder, baseline=baseline, best_plan=samples.BASE, final=None, trials=())
    document = page(ladder)
    table = titled(document, "Predicted against measured")
    assert table.rows[0].cells[5:] == ("unknown", "–")  # noqa: RUF001
    stats = {stat.label: stat for stat in of_type(document, Stats)[0].items}
    assert "not known" in stats["MFU"].note
    assert "Resident memory" in stats


def test_the_plan_and_the_command_are_there_to_copy():
    ladder = samples.won()
    codes = of_type(page(ladder, train_command="fullstride train runs/a/best.toml"), Code)
    assert [code.text for code in codes] == ["fullstride train runs/a/best.toml", plan_text(ladder.best_plan)]


def test_the_machine_says_where_figures_come_from():
    table = titled(page(samples.won()), "one node of 2 H200")
    lines = {row.cells[0]: row.cells[1:] for row in table.rows}
    assert lines["device memory"] == ("4.10 TB/s", "measured: copy of 1 GiB")
    assert lines["between devices: latency"][1] == "assumed"
    assert lines["C++ compiler"][0] == "missing"
    assert "Measured on NVIDIA H200." in text_of(ladder_document(samples.won()))


def test_numbers_that_are_none_do_not_stop_the_page():
    ladder = samples.won()
    nan = samples.interval(math.nan, 0.0)
    sick = msgspec.structs.replace(ladder.baseline, step_seconds=nan, rounds=(), shares=(), health=())
    final = msgspec.structs.replace(ladder.final, base=sick, ratio=nan, verdict="void")
    document = page(msgspec.structs.replace(ladder, baseline=sick, final=final))
    assert "nan" not in text_of(document, 90).lower().replace("finance", "")
    assert not of_type(document, Chart) or html_of(document)


def test_sections_come_in_the_order_a_reader_asks():
    heads = [block.text for block in of_type(page(samples.won()), Heading)]
    assert heads == ["The ladder", "Time", "Memory", "Predictions", "Health", "Machine", "Plan"]
    assert len(of_type(page(samples.won()), Table)) >= 7


def test_a_pipeline_says_where_its_waiting_is_counted():
    ladder = samples.stands()
    layout = msgspec.structs.replace(ladder.baseline_plan.layout, pp=2)
    piped = msgspec.structs.replace(ladder.baseline_plan, layout=layout)
    told = [msgspec.structs.replace(ladder, baseline_plan=plan) for plan in (piped, ladder.baseline_plan)]
    said = "the busiest of 2 pipeline ranks; what it waits for the others is in exposed communication"
    assert [said in html_of(page(each)) for each in told] == [True, False]
