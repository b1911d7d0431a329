"""The page: well formed, whole by itself, safe whatever the texts are, and drawn by a browser without complaint."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from tests.report.samples_report import HOSTILE, document

from fullstride.report.document import Document, Text
from fullstride.report.html import html_of, script_json

VOID = {"meta", "br", "img", "link", "input", "hr", "path"}


class Page(HTMLParser):
    """Reads a page strictly: every element that opens must close in its turn."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.texts, self.figures = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, attrs = self.open[-1] if self.open else ("", {})
        if tag == "script":
            if attrs.get("class") == "figure":
                self.figures.append(json.loads(data))
        elif tag != "style":
            self.texts.append(data)


@pytest.fixture(scope="module")
def hostile():
    return html_of(document(HOSTILE))


def test_the_page_is_well_formed(hostile):
    page = Page(hostile)
    assert page.tags.count("h1") == 1
    assert page.tags.count("figure") == 24
    assert len(page.figures) == 11, "charts without data are said to have none"
    assert sum("No data." in text for text in page.texts) == 13
    assert "table" in page.tags
    assert "th" in page.tags


def test_nothing_comes_from_elsewhere(hostile):
    page = Page(hostile)
    addresses = [
        (tag, name, value) for tag, name, value in page.attributes if name in {"src", "href", "srcset", "action", "data"}
    ]
    assert addresses, "the contents are links"
    assert all(name == "href" and value.startswith("#") for _, name, value in addresses), addresses
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    style = re.search("<style>(.*?)</style>", hostile, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and "default-src" in (value or ""))
    assert "default-src 'none'" in policy
    assert "http" not in policy


def test_hostile_text_is_shown_and_nothing_more(hostile):
    page = Page(hostile)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert any("<script>alert(1)</script>" in text for text in page.texts), "the text is shown as text"
    assert hostile.count("<script>") == 2, "library and script of the page"
    assert "\x1b" not in hostile
    assert "\x00" not in hostile
    hostile.encode("utf-8")


def test_labels_of_charts_cannot_bring_markup(hostile):
    """Plotly reads tags in labels; only our own line breaks may be there."""
    figures = json.dumps(Page(hostile).figures)
    assert not re.search(r"<(?!br>)[a-z/]", figures)
    assert "&lt;script&gt;" in figures


def test_scripts_cannot_be_ended_by_data():
    text = script_json({"a": "</script><!--\u2028", "b": float("nan")})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><!--\u2028", "b": None}


def test_figures_are_what_plotly_accepts():
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for figure in Page(html_of(document())).figures:
        graph_objects.Figure(figure)  # raises on any unknown attribute or value


def test_the_library_stands_once_and_only_where_it_is_needed():
    words = html_of(Document(title="Only words", blocks=(Text(text="x"),)))
    assert len(words) < 40_000
    charts = html_of(document())
    assert len(re.findall(r"plotly\.js v\d", charts)) == 1


def test_colours_of_figures_are_defined_in_both_schemes(hostile):
    light, dark = re.findall(r":root(?::not\([^)]*\))?\{(.*?)\}", hostile, re.DOTALL)[:2]
    used = set(re.findall(r"var\((--[a-z0-9-]+)", json.dumps(Page(hostile).figures)))
    used |= set(re.findall(r"var\((--[a-z0-9-]+)", re.search("<style>(.*?)</style>", hostile, re.DOTALL)[1])) - {"--v", "--n"}
    assert len(used) > 15
    for name in used:
        assert f"{name}:" in light, name
        assert f"{name}:" in dark, name


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_is_legible(hostile, scheme):
    """WCAG 2.2, 1.4.3: 4.5 for text."""
    colours = dict(re.findall(r"(--[a-z0-9-]+):(#[0-9a-f]{6})", re.findall(r":root[^{]*\{(.*?)\}", hostile, re.DOTALL)[scheme]))
    pairs = [(ink, ground) for ink in ("--ink", "--ink-2") for ground in ("--bg", "--card", "--wash", "--good-wash")]
    pairs += [(f"--{tone}", ground) for tone in ("good", "warn", "bad") for ground in ("--card", f"--{tone}-wash")]
    pairs += [("--accent", "--card"), ("--accent", "--bg")]
    poor = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in pairs}
    assert not {pair: value for pair, value in poor.items() if value < 4.5}


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PROBE = """
window.addEventListener("load", function () { setTimeout(function () {
  var p = document.createElement("output"), e = document.documentElement;
  p.id = "seen";
  p.textContent = JSON.stringify({width: e.scrollWidth, inner: window.innerWidth, errors: window.faults,
    drawn: document.querySelectorAll(".plot .main-svg").length, plots: document.querySelectorAll(".plot").length,
    wide: Array.from(document.querySelectorAll("main *")).filter(function (n) { return !n.closest(".scroll,pre,.plot")
      && n.getBoundingClientRect().right > window.innerWidth + 1; })
      .map(function (n) { return n.tagName + "." + n.className; })});
  document.body.appendChild(p);
}, 300); });
"""


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine to draw the page")
@pytest.mark.parametrize("width", [360, 500, 1280])
def test_a_browser_draws_it_without_complaint(tmp_path, width):
    """The inner page is framed, because a headless window is never narrower than 500 pixels."""
    probe = f"<script>window.faults=[];window.onerror=function(m){{window.faults.push(m)}};{PROBE}</script>"
    page = html_of(document(HOSTILE[:120])).replace("<body>", f"<body>{probe}", 1)
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{page_in_attribute(page)}"></iframe>'
    tell = """<script>setInterval(function () { var s = document.querySelector("iframe").contentDocument.getElementById("seen");
      if (s) document.title = btoa(unescape(encodeURIComponent(s.textContent))); }, 200);</script>"""
    (tmp_path / "outer.html").write_text(
        f"<!doctype html><html><title>x</title><body style='margin:0'>{frame}{tell}</body></html>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--window-size=1400,1000"]
    done = subprocess.run([*command, str(tmp_path / "outer.html")], capture_output=True, text=True, timeout=120, check=False)
    seen = json.loads(base64.b64decode(re.search("<title>([^<]*)</title>", done.stdout)[1]))
    assert seen["errors"] == []
    assert seen["plots"] > 0
    assert seen["drawn"] >= seen["plots"]
    assert seen["wide"] == []
    assert seen["width"] <= seen["inner"]


def page_in_attribute(page):
    return page.replace("&", "&amp;").replace('"', "&quot;")
