"""Timelines, looked at as the shapes they are made of."""

import sys
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.report.figure import colours, folder_problems, ink_on, picture_problems
from lightning_dcp.report.plan_table import seconds
from lightning_dcp.report.timeline import Panel, draw_timeline, timeline_figure
from lightning_dcp.schedule import CostModel, DynamicScheduler, Pack, StaticScheduler, StepPlan, preset, simulate
from lightning_dcp.schedule.distributions import draw_lengths

pytest.importorskip("matplotlib")

COST = CostModel(linear=1.0, attention=0.0, pack_overhead=10.0)
PLAN = StepPlan(
    4, 100, (150, 50, 30, 101), ((Pack(0, 2, (0,)), Pack(2, 1, (1,)), Pack(3, 1, (2,))), (Pack(2, 2, (3,)),))
)
WHOLE = StepPlan(4, 100, (150, 50, 30, 101), ((Pack(0, 4, (0, 1, 2, 3)),),))


def panels_of(*plans, cost=COST, bound=80.0):
    return [Panel(f"plan {i}", plan, simulate(plan, cost), bound) for i, plan in enumerate(plans)]


def figure_of(*plans, **options):
    return timeline_figure(panels_of(*plans, **options), title="a title")


def bars_of(axes):
    """Left, top, right, bottom of each pack."""
    collection = next(c for c in axes.collections if type(c).__name__ == "PatchCollection")
    return [tuple(path.get_extents().extents.tolist()) for path in collection.get_paths()]


def test_every_pack_is_a_bar_over_its_ranks_and_its_time():
    axes = figure_of(PLAN, WHOLE).axes[0]
    assert bars_of(axes) == [
        (0, -0.5, 85, 1.5),
        (0, 1.5, 60, 2.5),
        (0, 2.5, 40, 3.5),
        (60, 1.5, 120.5, 3.5),
    ]


def test_idle_time_is_a_hatched_area_over_the_whole_step_behind_the_packs():
    axes = figure_of(PLAN).axes[0]
    (idle,) = axes.patches
    assert idle.get_hatch()
    assert (idle.get_x(), idle.get_y(), idle.get_width(), idle.get_height()) == (0, -0.5, 120.5, 4)
    assert idle.get_zorder() < next(iter(axes.collections)).get_zorder()


def test_packs_of_one_cp_size_have_one_colour_and_the_legend_names_it():
    figure = figure_of(PLAN, WHOLE)
    fill = [
        [tuple(c) for c in axes.collections[0].get_facecolor().tolist()] for axes in figure.axes
    ]  # CP 2, 1, 1, 2 and CP 4
    assert fill[0][0] == fill[0][3] != fill[0][1] == fill[0][2]
    assert fill[1][0] not in fill[0]
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["CP 1", "CP 2", "CP 4", "idle", "lower bound, 80.00 s", "end of the step"]
    shown = [tuple(handle.get_facecolor()) for handle in legend.get_patches()[:3]]
    assert shown == [fill[0][1], fill[0][0], fill[1][0]]


def test_both_panels_share_the_time_axis_and_show_bound_and_step_time():
    figure = figure_of(PLAN, WHOLE)
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xlim()[1] > 120.5
    for axes, step in ((first, 120.5), (second, 331 / 4 + 10)):
        assert any(set(line.get_xdata()) == {80.0} and line.get_linestyle() == "--" for line in axes.lines)
        assert any(set(line.get_xdata()) == {step} for line in axes.lines)
        assert any(text.get_text().strip() == seconds(step) for text in axes.texts)
    assert "lower bound: 66% of it" in first.get_title(loc="left")
    assert figure.get_suptitle() == "a title"


def test_steps_below_a_second_are_shown_in_milliseconds():
    fast = CostModel(linear=1e-3, attention=0.0)
    axes = figure_of(PLAN, cost=fast, bound=0.08).axes[0]
    assert bars_of(axes)[0] == pytest.approx((0, -0.5, 75, 1.5))
    assert axes.get_xlabel().endswith("ms")


def test_large_bars_tell_their_tokens_and_small_ones_have_no_text():
    texts = [text.get_text() for text in figure_of(PLAN, WHOLE).axes[0].texts]
    assert "150 tokens\n1 sample" in texts
    crowd = StepPlan(64, 100, (100,) * 64, (tuple(Pack(r, 1, (r,)) for r in range(64)),))
    assert len(figure_of(crowd).axes[0].texts) == 1  # the step time


@pytest.mark.parametrize("ranks", [4, 8, 64, 256])
def test_pictures_of_every_plane_are_written(ranks, tmp_path):
    lengths = draw_lengths("megatron-mock", 4 * ranks, 0)
    cost = preset("h100")
    plans = [s.schedule(lengths) for s in (StaticScheduler(ranks, 2048, 4), DynamicScheduler(ranks, 2048, cost=cost))]
    path = tmp_path / "plan.png"
    draw_timeline(path, panels_of(*plans, cost=cost, bound=0.1), title="t")
    written = path.read_bytes()
    assert written.startswith(b"\x89PNG")
    width, height = (int.from_bytes(written[i : i + 4], "big") for i in (16, 20))
    assert width == 1800
    assert 700 <= height <= 1700
    axes = figure_of(*plans, cost=cost, bound=0.1).axes[0]
    assert 4 <= len(axes.get_yticks()) <= 16


def test_the_same_plan_as_svg_is_well_formed(tmp_path):
    draw_timeline(tmp_path / "plan.svg", panels_of(PLAN), title="t")
    assert ElementTree.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_colours_grow_lighter_with_the_size_so_that_grey_and_colour_blind_eyes_tell_them_apart(count):
    from matplotlib.colors import to_rgb

    sizes = [2**i for i in range(count)]
    light = [
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), to_rgb(v), strict=True)) for v in colours(sizes).values()
    ]
    assert all(b - a > 0.04 for a, b in pairwise(light))
    assert ink_on(colours([1])[1]) == "white"
    assert ink_on("#ffffff") == "black"


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-dcp\[report\]'"):
        draw_timeline(tmp_path / "plan.png", panels_of(PLAN), title="t")
    monkeypatch.setattr("lightning_dcp.report.figure.find_spec", lambda name: None)
    assert [problem.remedy for problem in picture_problems(tmp_path / "plan.png")] == [
        "pip install 'lightning-dcp[report]'"
    ]


def test_files_that_cannot_be_written_are_found_before_any_work(tmp_path):
    assert picture_problems(tmp_path / "plan.png") == []
    assert [p.found for p in picture_problems(tmp_path / "plan.gif")] == ["an unknown kind of picture"]
    assert [p.found for p in folder_problems(tmp_path / "none/plan.json", "--json")] == [
        f"no folder {tmp_path / 'none'}"
    ]
    assert [p.found for p in folder_problems(tmp_path, "--json")] == ["a folder"]
