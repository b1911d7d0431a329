"""Documents for the writers' tests."""

import math

from fullstride.report.document import (
    Bar,
    Chart,
    Code,
    Column,
    Document,
    Heading,
    Matrix,
    Stat,
    Stats,
    Table,
    TableRow,
    Text,
    Timeline,
    Trace,
)

HOSTILE = (
    "</script><script>alert(1)</script> <img src=http://evil.example/x onerror=alert(2)> "
    "\"'& [red]x[/] %{x} \x1b[31m \x00 \ud800 {}"
)


def document(word="forward"):
    """One block of every kind and form, with gaps and numbers that are none; `word` stands wherever a user's text may."""
    nan = math.nan
    one = Trace(name=word, x=(1.0, 2.0, 3.0, 4.0), y=(1.5, None, nan, 1.25), low=(1.4, 0, 0, 1.2), high=(1.6, 0, 0, 1.3))
    two = Trace(name="other", x=(1.0, 2.0, 3.0, 4.0), y=(2.5, 2.0, math.inf, 2.25))
    words = Trace(name=word, x=(word, "after"), y=(3.0, 2.0))
    more = Trace(name="second", x=(word, "after"), y=(0.5, None))
    falls = Trace(name="ms", x=("baseline", word, word, "best"), y=(100.0, -20.0, 5.0, 85.0))
    samples = Trace(name=word, x=(), y=(*(1.0 + place % 7 / 50 for place in range(200)), nan))
    charts = [
        Chart(title=word, form="line", traces=(one, two), x_label="step", y_label="loss", note=word),
        Chart(title="Scatter", form="scatter", traces=(one,)),
        Chart(title="Bars", form="bar", traces=(words, more), y_label=word),
        Chart(title="Lying bars", form="bar", traces=(words,), horizontal=True),
        Chart(title="Stacked", form="stacked", traces=(words, more), horizontal=True),
        Chart(title="Stacked upright", form="stacked", traces=(words, more)),
        Chart(title="Waterfall", form="waterfall", traces=(falls,), horizontal=True),
        Chart(title="Waterfall upright", form="waterfall", traces=(falls,)),
        Chart(title="Boxes", form="box", traces=(samples, Trace(name="few", x=(), y=(1.0, 1.1))), horizontal=True),
        Chart(title="Boxes upright", form="box", traces=(samples,)),
        *[Chart(title=f"Empty {form}", form=form, traces=()) for form in FORMS],
        *[Chart(title=f"Hollow {form}", form=form, traces=(Trace(name="x", x=(), y=()),)) for form in FORMS],
    ]
    bars = (
        Bar(lane=word, name=word, kind="forward", start=0.0, end=0.4),
        Bar(lane=word, name="b", kind="backward", start=0.4, end=1.0),
        Bar(lane="rank 1", name="c", kind=word, start=0.1, end=0.1),
        Bar(lane="rank 1", name="d", kind="comm", start=nan, end=1.0),
    )
    grid = Matrix(title="Links", rows=(word, "1"), columns=("0", word), values=((None, 48.123), (nan, 1e12)), unit="GB/s")
    columns = (Column(name="lever"), Column(name="ratio", align="right"), *[Column(name=name) for name in ("a", "b", word)])
    rows = (TableRow(cells=(word, "1.2", "", word * 3, "z"), tone="good"), TableRow(cells=("short",), tone="quiet"))
    tones = ("plain", "quiet", "good", "warn", "bad")
    return Document(
        title=word,
        subtitle=word,
        blocks=(
            Heading(text=word, level=1),
            Stats(items=tuple(Stat(label=word, value="1.42 x", note=word, tone=tone) for tone in tones)),
            Stats(items=()),
            Heading(text="Two"),
            *[Text(text=f"{word}\nsecond line", tone=tone) for tone in tones],
            Code(text=f"[model]\n# {word}\nsource = 1", title=word, language="toml"),
            Heading(text="Three", level=3),
            Code(text=word),
            Table(title=word, columns=columns, rows=rows, note=word),
            Table(columns=(), rows=()),
            Heading(text="Charts"),
            *charts,
            Timeline(title=word, bars=bars, note=word),
            Timeline(title="Empty", bars=()),
            Heading(text="Matrix"),
            grid,
            Matrix(title="None", rows=(), columns=(), values=()),
        ),
    )


FORMS = ("line", "bar", "scatter", "stacked", "waterfall", "box")
