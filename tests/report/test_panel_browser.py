"""The panel in a real browser: no errors, no requests, readable at two widths, in light and dark."""

import re

import pytest

from lightning_dcp.report.panel import panel_of, render
from tests.report.panel_runs import HOSTILE, MadeUp, hostile, tiny
from tests.support.browser import HOW_TO_GET_IT, Browser, find_browser

pytestmark = pytest.mark.skipif(find_browser() is None, reason=HOW_TO_GET_IT)

WIDTHS = (1280, 390)
TEXTS = """
(() => {
  const parts = s => (s.match(/[\\d.]+/g) || []).map(Number);
  const solid = s => { const p = parts(s); return s.startsWith("rgb") && (p.length < 4 || p[3] > 0.5) ? p.slice(0, 3) : null; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const under = element => { for (let e = element; e; e = e.parentElement) {
    const c = solid(getComputedStyle(e).backgroundColor); if (c) return c; } return null; };
  const inside = (box, x, y) => box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
  const shapeUnder = text => { const b = text.getBoundingClientRect(), x = (b.left + b.right) / 2, y = (b.top + b.bottom) / 2;
    const shapes = [...text.ownerSVGElement.querySelectorAll("rect")].filter(r => r.getBBox && solid(getComputedStyle(r).fill)
      && inside(r.getBoundingClientRect(), x, y) && (r.compareDocumentPosition(text) & 4));
    return shapes.length ? solid(getComputedStyle(shapes.at(-1)).fill) : null; };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("title, style, defs")) continue;
    const svg = element.closest("text"), style = getComputedStyle(element);
    const ink = solid(svg ? style.fill : style.color);
    const back = (svg && shapeUnder(svg)) || under(element);
    found.push({text: walker.currentNode.data.trim().slice(0, 40), ratio: ratio(ink, back), size: parseFloat(style.fontSize)});
  }
  return found;
})()
"""
"""Every text of the page: its contrast with what is behind it (WCAG 2.1, relative luminance), and its size in pixels."""
COLLISIONS = """
(() => [...document.querySelectorAll("svg[role=img]")].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const out = texts.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1
    || b.bottom > frame.bottom + 1).map(([t]) => "outside: " + t);
  texts.forEach(([t, a], i) => texts.slice(i + 1).forEach(([u, b]) => {
    if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
      out.push(`${svg.getAttribute("aria-label")}: ${t} / ${u}`);
  }));
  return out;
}))()
"""
"""Labels of figures that lie on one another (boxes of lines have room above and below the letters) or leave their figure."""
SCROLLS = """
[...document.querySelectorAll(".scroll")].map(e => [e.scrollWidth, e.clientWidth, getComputedStyle(e).overflowX, e.tabIndex])
"""


def comparison():
    first = MadeUp(steps=120, slow_steps=(40, 60)).run("logs/version_1/stability")
    meta = {"dynamic_context_parallel": False}
    second = MadeUp(steps=120, seed=3, jitter=0.2, slow_link=None, meta=meta).run("logs/version_0/stability")
    return panel_of(first, second)


RUNS = {
    "tiny": lambda: panel_of(tiny()),
    "comparison": comparison,
    "hostile": lambda: panel_of(hostile()),
    "wide": lambda: panel_of(MadeUp(steps=60, ranks=64, slow_steps=(20, 30), heavy_steps=(7,)).run()),
    "long": lambda: panel_of(
        MadeUp(steps=1700, ranks=2, slow_link=(0, 1), slow_steps=(900, 1000), keep_every=200).run()
    ),
}


@pytest.fixture(scope="module")
def browser():
    started = Browser(find_browser())
    yield started
    started.close()


@pytest.fixture(scope="module", params=RUNS)
def page(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("panel") / "panel.html"
    path.write_text(render(RUNS[request.param]()), encoding="utf-8")
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_is_readable(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.dialogs() == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    texts = browser.run(TEXTS)
    assert len(texts) > 60
    assert [text for text in texts if text["ratio"] < 4.5 or text["size"] < 10] == []
    assert browser.run(COLLISIONS) == []


def test_wide_figures_scroll_in_their_own_boxes(browser, page):
    browser.open(page, width=390)
    boxes = browser.run(SCROLLS)
    assert any(inner > outer for inner, outer, _, _ in boxes)
    assert all(flow == "auto" and tab == 0 and outer <= 390 for _, outer, flow, tab in boxes)


def test_light_and_dark_differ(browser, page):
    grounds = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(map(int, re.findall(r"\d+", colour))))
    assert grounds[0] > 600 > 150 > grounds[1]


def test_hostile_text_is_seen_as_text(browser, tmp_path):
    path = tmp_path / "panel.html"
    path.write_text(render(panel_of(hostile(), hostile())), encoding="utf-8")
    browser.open(path)
    assert browser.run("document.scripts.length + document.images.length + document.querySelectorAll('b').length") == 0
    assert browser.run("document.querySelector('h1').textContent") == f"run {HOSTILE} (dynamic)"
    assert HOSTILE in browser.run("document.querySelector('#hot').innerText")
    assert HOSTILE in browser.run("document.querySelector('#events').innerText")
    assert browser.run("document.querySelectorAll('section').length") == 11
    assert browser.dialogs() == []


def test_the_browser_would_tell(browser, tmp_path):
    """The checks above see what they look for."""
    bad = """<!doctype html><body style="background:#fff"><p style="color:#999">pale</p><p style="width:2000px">wide</p>
    <svg role="img" aria-label="f" width="60" height="40"><text x="4" y="25">aaa</text><text x="6" y="25">bbb</text></svg>
    <img src="http://localhost:9/none.png"><script>console.error("x"); throw new Error("thrown")</script></body>"""
    path = tmp_path / "bad.html"
    path.write_text(bad)
    browser.open(path, width=390)
    assert browser.requests() == ["http://localhost:9/none.png"]
    assert any("thrown" in complaint for complaint in browser.complaints())
    assert browser.run("document.documentElement.scrollWidth") > 390
    assert [text["text"] for text in browser.run(TEXTS) if text["ratio"] < 4.5] == ["pale"]
    assert browser.run(COLLISIONS) == ["f: aaa / bbb"]
