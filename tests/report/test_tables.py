"""Tables and sentences of plans, and the picture of a sweep."""

from xml.etree import ElementTree

import pytest

from lightning_dcp.report.plan_table import comparison_table, seconds, verdict
from lightning_dcp.report.sweep import draw_sweep, sweep_table
from lightning_dcp.schedule.summary import summarize
from tests.report.test_timeline import COST, PLAN, WHOLE

TIMES = {
    "static CP 1": {512: None, 1024: None},
    "static CP 2": {512: None, 1024: 2.0},
    "dynamic": {512: 1.1, 1024: 1.0},
}


def rows_of(table):
    return {row[0]: row[1:] for row in zip(*(column.cells for column in table.columns), strict=True)}


def test_a_sweeps_table_marks_the_recommended_setting_and_what_cannot_run():
    rows = rows_of(sweep_table(TIMES, ("dynamic", 1024)))
    assert rows == {
        "static CP 1": ("-", "-"),
        "static CP 2": ("-", "2.00 s"),
        "dynamic": ("1.10 s", "[bold]* 1.00 s[/bold]"),
    }


@pytest.mark.parametrize("worst", [2.0, 90.0])
def test_a_sweep_is_drawn_with_what_can_run(worst, tmp_path):
    pytest.importorskip("matplotlib")
    times = TIMES | {"static CP 2": {512: None, 1024: worst}}
    draw_sweep(tmp_path / "sweep.svg", times, ("dynamic", 1024), title="t")
    assert ElementTree.parse(tmp_path / "sweep.svg").getroot().tag.endswith("svg")
    times["static CP 2"][1024] = None
    draw_sweep(tmp_path / "sweep.png", times, ("dynamic", 1024), title="t")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_both_columns_and_the_ratio():
    static, dynamic = (summarize(plan, COST, lower_bound_s=80.0) for plan in (PLAN, WHOLE))
    table = comparison_table(static, dynamic, names=("static CP 2", "dynamic CP"))
    assert [column.header for column in table.columns[1:]] == ["static CP 2", "dynamic CP", "ratio"]
    rows = rows_of(table)
    assert rows["predicted step time"] == ("120.50 s", "92.75 s", "1.30x")
    assert rows["share of lower bound"] == ("66.4%", "86.3%", "")
    assert rows["packs"] == ("CP 1: 2\nCP 2: 2", "CP 4: 1", "")
    assert rows["padding for 2 x CP backends"] == ("1.51%", "3.93%", "")  # 5 and 13 of 331 tokens
    assert rows["tokens of a rank, most"] == ("100", "83", "")


@pytest.mark.parametrize(
    ("speedup", "said"),
    [
        (1.37, "D would make this step 1.37x faster than S."),
        (1.02, "D gains too little here to be worth it: 1.02x faster than S."),
        (0.8, "D is not worth it here: 1.25x slower than S."),
    ],
)
def test_the_verdict_is_a_plain_sentence(speedup, said):
    assert verdict(speedup, static="S", dynamic="D") == said


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.345, "12.35 s"),
        (0.99951, "1.00 s"),
        (0.5, "500 ms"),
        (0.0456, "45.6 ms"),
        (3.07e-5, "0.031 ms"),
        (0.0, "0 ms"),
    ],
)
def test_times_are_short(value, text):
    assert seconds(value) == text
