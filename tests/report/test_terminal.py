"""The terminal: every block in wide and narrow windows, no colour into a pipe, no markup from users."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.report.samples_report import HOSTILE, document

from fullstride.report.document import Chart, Code, Document, Stat, Stats, Trace
from fullstride.report.progress import ProgressView
from fullstride.report.terminal import print_document, text_of
from fullstride.report.textcharts import chart_lines


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120, 250])
@pytest.mark.parametrize("word", ["forward", HOSTILE, "模型" * 20, ""], ids=["plain", "hostile", "wide letters", "empty"])
def test_every_block_fits(width, word):
    whole = document(word)
    text = text_of(Document(title=word, blocks=tuple(b for b in whole.blocks if not isinstance(b, Code))), width)
    assert "\x1b" not in text
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_markup_of_users_is_text():
    text = text_of(Document(title="a [bold]b[/bold] [/x]", blocks=(Stats(items=(Stat(label="[i]", value="[red]1[/]"),)),)))
    assert "a [bold]b[/bold] [/x]" in text
    assert "[red]1[/]" in text


def test_code_is_never_wrapped():
    command = "fullstride train " + "x" * 300
    assert command in text_of(Document(title="t", blocks=(Code(text=command),)), 60)


def test_colour_only_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    bright, dull = io.StringIO(), io.StringIO()
    print_document(document(), Console(file=bright, force_terminal=True, color_system="standard", width=80))
    print_document(document(), Console(file=dull, width=80))
    assert "\x1b[" in bright.getvalue()
    assert "\x1b" not in dull.getvalue()


def test_an_encoding_without_our_letters_is_no_error():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_document(document(), Console(file=out, width=80))
    out.flush()
    assert b"forward" in raw.getvalue()


def test_bars_are_in_proportion():
    trace = Trace(name="t", x=("a", "b"), y=(10.0, 5.0))
    long, short = (line.plain for line in chart_lines(Chart(title="c", form="bar", traces=(trace,)), 60))
    assert long.count("█") == pytest.approx(2 * short.count("█"), abs=1)
    assert long.endswith(" 10")


def test_a_waterfall_hangs_each_bar_from_the_last():
    trace = Trace(name="t", x=("base", "one", "best"), y=(100.0, -40.0, 60.0))
    base, one, best = (line.plain for line in chart_lines(Chart(title="c", form="waterfall", traces=(trace,)), 80))
    assert one.rindex("▒") == base.rindex("█")
    assert best.rindex("█") + 1 == one.index("▒")
    assert "\N{MINUS SIGN}40" in one


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def told(console, clock):
    with ProgressView("tune tiny", budget_seconds=100, num_trials=3, console=console, clock=clock) as view:
        view.phase("measure the baseline")
        clock.now += 10
        view.step(0.5, done=3, of=10)
        clock.now += 31
        view.step(0.25, done=9, of=10, label="round 2")
        view.trial("compile [x]", "off -> block", 1.25)
        view.step(float("nan"))
        view.verdict("compile [x]", "kept", "1.21 times", tone="good")
        clock.now += 80
        view.trial("ddp", "zero 3 -> ddp")
        view.note("the end", tone="warn")


def test_progress_into_a_pipe_is_plain_lines():
    out = io.StringIO()
    told(Console(file=out, width=80), FakeClock())
    lines = out.getvalue().splitlines()
    assert lines[0] == "tune tiny"
    assert "  measure the baseline [1 min 40 s left]" in lines or any("measure the baseline [" in line for line in lines)
    assert any("round 2, step 250 ms, 9 of 10" in line for line in lines)
    assert not any("step 500 ms" in line for line in lines), "not every step into a log"
    assert any(line.split()[:3] == ["kept", "compile", "[x]"] for line in lines)
    assert any("time is up" in line for line in lines)
    assert "\x1b" not in out.getvalue()


def test_progress_on_a_terminal_is_live():
    out = io.StringIO()
    told(Console(file=out, width=60, force_terminal=True, color_system="standard"), FakeClock())
    assert "compile [x]" in out.getvalue()
    assert "\x1b[" in out.getvalue()
