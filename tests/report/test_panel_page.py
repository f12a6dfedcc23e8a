"""The panel as a file: complete, alone, safe to open whatever the data says, small for long runs; and the command."""

import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from lightning_dcp.cli import main
from lightning_dcp.report.panel import panel_of, render, write_panel
from lightning_dcp.stability.run_folder import FOLDER, Run, RunFolder
from tests.report.panel_runs import HOSTILE, MadeUp, hostile, tiny

IDS = ("steps", "reasons", "timelines", "links", "ranks", "shards", "hot", "events", "facts", "words")


class Page(HTMLParser):
    """Tags, and text outside of the style."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open, tag
        while self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" not in self._open:
            self.text.append(data)

    def named(self, *names):
        return [(tag, attrs) for tag, attrs in self.tags if tag in names]


@pytest.fixture(scope="module")
def normal():
    return MadeUp(steps=120, slow_steps=(40, 60)).run()


@pytest.fixture(scope="module")
def page(normal):
    return Page(render(panel_of(normal, MadeUp(steps=50, seed=2, slow_link=None).run("logs/version_1"))))


def test_all_sections_are_there_and_the_list_leads_to_them(page):
    ids = [attrs["id"] for _, attrs in page.named("section")]
    assert ids == ["comparison", *IDS]
    assert [attrs["href"] for _, attrs in page.named("a")] == [f"#{name}" for name in ids]
    assert "comparison" not in [a.get("id") for _, a in Page(render(panel_of(tiny()))).named("section")]


def test_headings_go_down_by_one_and_tables_have_captions(page):
    levels = [int(tag[1]) for tag, _ in page.named("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert levels.count(1) == 1
    assert len(page.named("table")) == len(page.named("caption")) == 6


def test_every_figure_is_described(page):
    figures = [attrs for _, attrs in page.named("svg") if attrs.get("role") == "img"]
    assert len(figures) == 11
    assert all(attrs["aria-label"] for attrs in figures)
    others = [attrs for _, attrs in page.named("svg") if attrs.get("role") != "img"]
    assert all(attrs["aria-hidden"] == "true" for attrs in others)


@pytest.mark.parametrize(
    "words",
    [
        "p50 of the last 50 steps",
        "predicted by the plan, scaled",
        "wait for others",
        "In the worst 5 % of steps",
        "That alone is no alarm",
        "lower is better",
        "higher is better",
        "the data had already arrived when the receiver came for it",
        "all-to-all and all-gather go between all ranks of a pack and have none",
        "The runs are of unequal length: 120 and 50 steps.",
    ],
)
def test_what_might_be_misread_is_explained(page, words):
    assert words in "".join(page.text)
    assert "times 1." not in "".join(page.text)  # the factor of the prediction


def test_the_cause_of_a_slow_step_is_its_second_column(page):
    html = render(panel_of(MadeUp(steps=60).run()))
    head = html.split("The slowest steps</caption>")[1].split("</tr>")[0]
    assert re.findall(r">([^<]+)</th>", head)[:2] == ["step", "mostly because of"]


@pytest.mark.parametrize("made", [tiny, hostile, MadeUp(steps=40, slow_link=None).run])
def test_the_file_loads_and_runs_nothing(made):
    html = render(panel_of(made()))
    assert not re.search(r"https?:|//[a-z]", html.split("<main>")[0])
    page = Page(html)
    assert page.named("script", "link", "img", "iframe", "object", "base", "b") == []
    for _, attrs in page.tags:
        assert not [name for name in attrs if name.startswith("on")]
        assert attrs.get("href", "#").startswith("#")
        assert not attrs.keys() & {"src", "srcset", "action", "style"}
    assert "url(" not in html.replace("url(#wait)", "").replace("url(#transfer)", "")


def test_text_and_folders_that_no_file_can_hold_are_shown_with_escapes(tmp_path, capsys):
    made = MadeUp(steps=60, ranks=4, slow_steps=(20, 30), heavy_steps=(7,), ids=("\ud800", "\udc80"))
    made.kinds = ("\udfff", "user", "tool", "system")
    record(tmp_path / "run", made.run())
    main(["report", str(tmp_path / "run"), f"--output={tmp_path / 'panel.html'}"])
    text = (tmp_path / "panel.html").read_text(encoding="utf-8")
    assert "\\ud800" in text and "\\udfff" in text
    run = made.run()
    write_panel(tmp_path / "other.html", panel_of(Run(tmp_path / "\udcff", run.meta, run.steps), None))
    assert "\\udcff" in (tmp_path / "other.html").read_text(encoding="utf-8")


def test_hostile_text_stays_text():
    html = render(panel_of(hostile(), hostile()))
    assert "<script" not in html
    assert "{{ 7 * 7 }}" in html
    text = " ".join(Page(html).text)
    assert text.count(HOSTILE) > 20
    assert "</title></svg><b>bold</b>" in text


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("steps", "One rank: there is no load to compare."),
        ("links", "One rank: nothing is sent."),
        ("timelines", "No step's packs were kept"),
        ("shards", "No packs were kept"),
        ("hot", "No packs were kept"),
        ("events", "No alarm was raised and no action was taken."),
        ("facts", "The record says nothing about it."),
        ("ranks", "Memory was not measured."),
    ],
)
def test_what_there_is_nothing_of_is_said_in_words(section, said):
    assert said in render(panel_of(tiny())).split(f'<section id="{section}">')[1].split("</section>")[0]


def test_a_run_without_timed_ranks_is_shown():
    steps = tuple(replace(step, ranks=(), links=(), packs=()) for step in tiny().steps)
    html = render(panel_of(Run(tiny().path, {}, steps)))
    assert "Ranks were not timed" in html
    assert "nan" not in re.sub(r"<style>.*</style>", "", html, flags=re.S).lower().replace("nano", "")


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 5e4])
def test_any_scale_of_time_can_be_drawn(seconds):
    steps = tuple(replace(step, seconds=seconds, ranks=(), predicted_s=0.0) for step in tiny().steps)
    assert "NaN" not in render(panel_of(Run(tiny().path, {}, steps)))


def test_a_long_run_stays_small(normal):
    """10,000 steps on 16 ranks, packs kept of each, hundreds of hops in those with timelines."""
    some = MadeUp(steps=8, ranks=16, slow_steps=(3, 5), hops_a_pack=300, keep_every=1).run().steps
    thin = [replace(s, packs=tuple(replace(p, intervals=()) for p in s.packs)) for s in some]
    steps = tuple(replace((some if n < 8 else thin)[n % 8], step=n) for n in range(10_000))
    begin = time.perf_counter()
    html = render(panel_of(Run(tiny().path, normal.meta, steps)))
    assert time.perf_counter() - begin < 60
    assert len(html.encode()) < 3e6


# ----------------------------------------------------------------------- the command


def record(path, run):
    folder = RunFolder(path / FOLDER, {k: v for k, v in run.meta.items() if k not in ("format", "starts")})
    for step in run.steps:
        folder.add(step)
    folder.flush()
    return path


def test_the_command_writes_the_panel_of_recorded_runs(tmp_path, capsys):
    (tmp_path / "first").mkdir()
    first = record(tmp_path / "first", MadeUp(steps=30, slow_steps=(10, 15)).run())
    second = record(tmp_path / "second", MadeUp(steps=30, seed=5, slow_link=None).run())
    output = tmp_path / "panel.html"
    main(["report", str(first), "--compare", str(second / FOLDER), "--output", str(output)])
    said = capsys.readouterr().out
    assert "first (dynamic): " in said
    assert "tokens a second of second (dynamic)" in said
    page = Page(output.read_text(encoding="utf-8"))
    assert [attrs["id"] for _, attrs in page.named("section")] == ["comparison", *IDS]
    assert "link 2->3" in "".join(page.text)


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (False, [], "holds no record of a run"),
        (True, [], "holds no step yet"),
        (True, ["--output", "{}/none/panel.html"], "no folder"),
        (True, ["--compare", "{}/other"], "holds no record of a run"),
    ],
)
def test_mistakes_end_with_a_message(tmp_path, make, words, message):
    run = tmp_path / "run"
    run.mkdir()
    if make:
        RunFolder(run / FOLDER, {})
    with pytest.raises(SystemExit, match=message):
        main(["report", str(run), "--output", str(tmp_path / "panel.html"), *(w.format(tmp_path) for w in words)])
    assert not (tmp_path / "panel.html").exists()
