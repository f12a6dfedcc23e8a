"""`lightning-dcp plan`: where lengths come from, what is compared, what is told."""

import json
import re

import numpy as np
import pytest
import yaml

from lightning_dcp.commands.comparison import Setting, compare
from lightning_dcp.commands.data_module import batches_of, build_data_module
from lightning_dcp.commands.lengths import LengthSource, draw_batches
from lightning_dcp.commands.plan import plan
from lightning_dcp.commands.sweep import Cell, Sweep, default_limits, sweep_settings
from lightning_dcp.data import PythonLibraryDataModule, TokenDataset
from lightning_dcp.errors import BatchError, ConfigurationError, DataError, PlanError
from lightning_dcp.schedule import CostModel, StepPlan, preset, save_cost_model, simulate
from lightning_dcp.schedule.distributions import draw_lengths
from tests.commands.modules import LENGTHS

COST = preset("h100")
SMALL = {"ranks": 4, "max_seqlen_per_dp_cp_rank": 2048, "batch_size": 32, "batches": 3}


def source(**options):
    defaults = {"lengths": None, "data": None, "field": None, "batch_size": None, "default_batch_size": 4}
    return LengthSource(**(defaults | {"batches": 2, "seed": 0, "longest": None} | options))


# ------------------------------------------------------------------------ lengths


def test_lengths_come_from_text_json_lines_arrays_and_distributions(tmp_path):
    lengths = [5, 17, 300, 4]
    (tmp_path / "a.txt").write_text("\n".join(map(str, lengths)))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"tokens": [0] * n}) for n in lengths))
    np.save(tmp_path / "a.npy", np.array(lengths))
    for name, field in (("a.txt", None), ("a.jsonl", "tokens"), ("a.npy", None)):
        read = source(lengths=str(tmp_path / name), field=field).read()
        assert read.batches == (tuple(lengths),)
        assert read.longest == 300
    drawn = source(lengths="rl", batch_size=3).read()
    assert drawn.batches == (tuple(draw_lengths("rl", 6, 0)[:3]), tuple(draw_lengths("rl", 6, 0)[3:]))


def test_samples_are_cut_at_the_longest_allowed(tmp_path):
    (tmp_path / "a.txt").write_text("5\n17\n300\n4")
    assert source(lengths=str(tmp_path / "a.txt"), longest=16).read().batches == ((5, 16, 16, 4),)


def test_batches_are_drawn_without_repeats_before_all_were_drawn():
    pool = list(range(1, 12))
    drawn = draw_batches(pool, 3, 7, seed=1)
    assert len(drawn) == 7
    assert all(len(batch) == 3 for batch in drawn)
    for first in (0, 3, 6):  # three whole batches an epoch, two samples left out
        seen = [n for batch in drawn[first : first + 3] for n in batch]
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(pool)
    assert drawn == draw_batches(pool, 3, 7, seed=1)
    assert drawn != draw_batches(pool, 3, 7, seed=2)


def test_fewer_lengths_than_a_batch_holds_are_one_batch():
    assert draw_batches([3, 1, 2], 8, 5, seed=0) == ((3, 1, 2),)


def write_module(path, class_path, **arguments):
    path.write_text(yaml.safe_dump({"class_path": class_path, "init_args": arguments}))
    return str(path)


def test_a_data_modules_own_batches_are_planned_without_reading_a_sample(tmp_path, monkeypatch):
    options = {"batch_size": 6, "max_length": 900, "limit": 60}
    module = PythonLibraryDataModule(**options)
    module.setup("fit")
    expected = [batch.lengths for batch in module.train_dataloader()][:4]
    path = write_module(tmp_path / "data.yaml", "PythonLibraryDataModule", **options)
    monkeypatch.setattr(TokenDataset, "__getitem__", lambda *_: pytest.fail("a sample was read"))
    read = source(data=path, batches=4).read()
    assert read.batches == tuple(map(tuple, expected))


def test_batches_of_a_loader_that_knows_no_lengths_are_read(tmp_path):
    path = write_module(tmp_path / "data.yaml", "tests.commands.modules.PaddedModule", batch_size=3)
    assert source(data=path, batches=2).read().batches == ((5, 9, 2), (7, 40, 3))
    assert source(data=path, batches=9).read().batches == ((5, 9, 2), (7, 40, 3), (8, 1))
    two = source(data=path, batch_size=4, batches=2).read().batches
    assert sorted(n for batch in two for n in batch) == sorted(LENGTHS)


def test_no_more_batches_are_read_than_needed(tmp_path):
    module = build_data_module(
        write_module(tmp_path / "data.yaml", "tests.commands.modules.PaddedModule", batch_size=3)
    )
    assert [len(batch) for batch in batches_of(module, 1)] == [3]
    assert [len(batch) for batch in batches_of(module, 1, batch_size=4)] == [3, 3]


def test_a_runs_whole_configuration_names_its_data_module(tmp_path):
    described = {"class_path": "PythonLibraryDataModule", "init_args": {"batch_size": 5}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"trainer": {"devices": 4}, "data": described}))
    assert build_data_module(str(tmp_path / "run.yaml")).batch_size == 5


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trainer: {}", "no class_path"),
        ("[1, 2", "cannot be read"),
        ("data: {class_path: lightning_dcp.data.Nothing}", "no attribute 'Nothing'"),
        ("data: {class_path: PythonLibraryDataModule, init_args: {batchsize: 3}}", "'batchsize' is not accepted"),
        ("data: {class_path: PythonLibraryDataModule, init_args: {batch_size: 0}}", "not a whole number"),
    ],
)
def test_a_bad_description_of_a_data_module_is_told(text, found, tmp_path):
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(found)):
        build_data_module(str(tmp_path / "data.yaml"))


def test_several_loaders_no_batches_and_unknown_batches_are_refused(tmp_path):
    def read(name, **arguments):
        return source(data=write_module(tmp_path / "data.yaml", f"tests.commands.modules.{name}", **arguments)).read()

    with pytest.raises(DataError, match="gave a dict, not one loader"):
        read("SeveralLoaders")
    with pytest.raises(DataError, match="makes no batches"):
        read("PaddedModule", samples=0)
    with pytest.raises(BatchError, match="unknown batch format"):
        batches_of(_module_with([["not", "a", "batch"]]), 1)


def _module_with(batches):
    module = PythonLibraryDataModule(limit=20)
    module.train_dataloader = lambda: iter(batches)
    return module


# --------------------------------------------------------------------- comparison


def test_both_ways_are_planned_for_every_batch_and_timed_by_the_cost_model(capsys):
    comparison = plan("megatron-mock", **SMALL)
    lengths = draw_lengths("megatron-mock", 96, 0)
    assert [batch.static.lengths for batch in comparison.batches] == [tuple(lengths[i : i + 32]) for i in (0, 32, 64)]
    for batch in comparison.batches:
        assert batch.dynamic.lengths == batch.static.lengths
        assert {pack.cp_size for pack in batch.static.packs()} == {comparison.context_parallel_size}
        assert batch.speedup == simulate(batch.static, COST).step_s / simulate(batch.dynamic, COST).step_s
        for summary in (batch.static_summary, batch.dynamic_summary):
            assert summary.predicted_step_s >= summary.lower_bound_s > 0
    steps = [
        sum(getattr(b, f"{way}_summary").predicted_step_s for b in comparison.batches) for way in ("static", "dynamic")
    ]
    assert comparison.speedup == pytest.approx(steps[0] / steps[1])
    ordered = sorted(batch.speedup for batch in comparison.batches)
    assert comparison.batches[comparison.median].speedup == ordered[1]
    printed = capsys.readouterr().out
    assert f"{comparison.speedup:.2f}x" in printed
    for row in ("predicted step time", "share of lower bound", "busy share", "padding", "packs", "planning time"):
        assert row in printed
    assert "3 batches of 32 samples" in printed


def test_the_static_size_is_the_smallest_that_holds_the_longest_sample():
    cut = {"ranks": 8, "max_seqlen_per_dp_cp_rank": 2048, "batches": 2}
    assert plan("megatron-mock", longest=2048, **cut).context_parallel_size == 1
    assert plan("megatron-mock", longest=2049, **cut).context_parallel_size == 2
    assert plan("megatron-mock", longest=4097, **cut).context_parallel_size == 4
    assert plan("megatron-mock", longest=4097, context_parallel_size=8, **cut).context_parallel_size == 8


def test_options_of_the_dynamic_scheduler_reach_its_plans():
    given = {"min_context_parallel_size": 2, "max_context_parallel_size": 4}
    comparison = plan("megatron-mock", **(SMALL | {"ranks": 8}), **given)
    assert {p.cp_size for batch in comparison.batches for p in batch.dynamic.packs()} <= {2, 4}


def test_lock_step_is_for_both_ways():
    comparison = plan("megatron-mock", mode="lockstep", microbatch_multiple=2, **SMALL)
    for batch in comparison.batches:
        for made in (batch.static, batch.dynamic):
            assert made.mode == "lockstep"
            assert len(made.microbatches) % 2 == 0
            made.validate()


def test_ranks_of_a_node_make_groups_beyond_it_dearer():
    cut = {"ranks": 8, "max_seqlen_per_dp_cp_rank": 2048, "batches": 2, "context_parallel_size": 8}
    near, far = (plan("megatron-mock", ranks_per_node=n, **cut) for n in (8, 2))
    assert far.static.predicted_step_s > near.static.predicted_step_s


def test_the_bound_allows_the_static_size_as_well():
    """A static plan at a size that the dynamic scheduler may not use must not beat the bound."""
    setting = Setting(4, 100, CostModel(linear=0.1, attention=0.0, hop_latency=50.0), min_context_parallel_size=4)
    comparison = compare(setting, [[100, 100, 100, 100]], 1)
    assert comparison.batches[0].static_summary.share_of_lower_bound <= 1.0
    assert comparison.speedup < 1


def test_megatrons_scheduler_is_compared_in_the_mode_asked_for():
    lengths = [1024] * 4 + [4096]
    for mode in ("free", "lockstep"):
        comparison = compare(Setting(4, 1024, COST, "megatron", mode), [lengths], 4)
        assert comparison.batches[0].dynamic.mode == mode
        assert list(comparison.to_dict())[-1] == "megatron"


def test_a_plan_of_megatrons_that_lock_step_forbids_is_refused_by_name():
    lengths = [500] * 8 + [2000, 3000]  # its third round leaves two ranks without work
    assert compare(Setting(4, 1024, COST, "megatron"), [lengths], 4).speedup > 0
    with pytest.raises(PlanError, match="Megatron-Core's plan cannot run with --mode lockstep: micro-batch 2"):
        compare(Setting(4, 1024, COST, "megatron", "lockstep"), [lengths], 4)


def test_a_cost_model_from_a_file_is_used(tmp_path):
    save_cost_model(CostModel(linear=1.0, attention=0.0), tmp_path / "cost.yaml")
    comparison = plan("megatron-mock", cost_model=str(tmp_path / "cost.yaml"), **SMALL)
    tokens = comparison.static.tokens
    assert comparison.dynamic.lower_bound_s == pytest.approx(tokens / 4)


# ------------------------------------------------------------------------ refusals


def test_all_wrong_options_are_told_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        plan(
            ranks=6,
            max_seqlen_per_dp_cp_rank=0,
            context_parallel_size=4,
            batch_size=0,
            batches=0,
            longest=0,
            seed=-1,
            field="n",
            min_context_parallel_size=5,
            microbatch_multiple=2,
            json=str(tmp_path / "no/plan.json"),
            plot=str(tmp_path / "plan.bmp"),
            sweep_limits=[0],
        )
    asked = [problem.asked.split()[0] for problem in error.value.problems]
    assert asked == [
        "lengths",
        "--field",
        "--batch-size",
        "--batches",
        "--longest",
        "--seed",
        "--max-seqlen-per-dp-cp-rank",
        "--microbatch-multiple",
        "min_context_parallel_size=5",
        "--context-parallel-size",
        "--sweep-limits",
        "--json",
        "--plot",
    ]


def test_lengths_and_data_are_not_taken_together():
    with pytest.raises(ConfigurationError, match="both of --lengths and --data"):
        plan("rl", data="run.yaml")


def test_options_that_megatrons_scheduler_does_not_have_are_refused():
    with pytest.raises(ConfigurationError) as error:
        plan("rl", scheduler="megatron", min_context_parallel_size=2, max_context_parallel_size=4)
    assert [problem.asked for problem in error.value.problems] == [
        "--min-context-parallel-size 2",
        "--max-context-parallel-size 4",
    ]


def test_samples_that_do_not_fit_are_counted_with_the_remedy(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(["100", "900", "401", "400"]))
    small = {"ranks": 4, "max_seqlen_per_dp_cp_rank": 100}
    with pytest.raises(ConfigurationError, match=r"2 of 4 samples longer than the 400 tokens") as error:
        plan(str(tmp_path / "a.txt"), **small)
    assert "--longest 400" in str(error.value)
    assert "(to 225), or use more ranks" in str(error.value)
    with pytest.raises(ConfigurationError, match="raise --max-context-parallel-size"):
        plan(str(tmp_path / "a.txt"), max_context_parallel_size=2, **small)
    with pytest.raises(ConfigurationError, match="raise --context-parallel-size"):
        plan(str(tmp_path / "a.txt"), context_parallel_size=2, longest=400, **small)
    assert plan(str(tmp_path / "a.txt"), longest=400, **small).speedup > 0


def test_too_few_samples_for_lock_step_are_told(tmp_path):
    (tmp_path / "a.txt").write_text("10\n20")
    with pytest.raises(PlanError, match="lock-step"):
        plan(str(tmp_path / "a.txt"), ranks=4, context_parallel_size=1, mode="lockstep")


# -------------------------------------------------------------------- JSON, pictures


def test_the_json_is_the_dynamic_plan_with_the_static_one_and_the_numbers_beside_it(tmp_path):
    comparison = plan("megatron-mock", json=str(tmp_path / "plan.json"), sweep_limits=[2048, 4096], **SMALL)
    values = json.loads((tmp_path / "plan.json").read_text())
    shown = comparison.batches[comparison.median]
    assert StepPlan.from_json(values) == shown.dynamic
    assert StepPlan.from_json(values["static"]) == shown.static
    assert CostModel.from_dict(values["cost_model"]) == COST
    assert values["predicted_step_s"] == simulate(shown.dynamic, COST).step_s
    assert values["lower_bound_s"] == shown.dynamic_summary.lower_bound_s
    assert values["static"]["predicted_step_s"] == simulate(shown.static, COST).step_s
    assert values["summary"]["speedup"] == comparison.speedup
    assert values["summary"]["dynamic"]["predicted_step_s"] == comparison.dynamic.predicted_step_s
    assert values["summary"]["static"]["packs_by_cp_size"].keys() == {"4"}
    assert len(values["sweep"]["cells"]) == 2 * 4


def test_pictures_are_written_where_asked(tmp_path):
    pytest.importorskip("matplotlib")
    plan("megatron-mock", plot=str(tmp_path / "plan.png"), sweep_limits=[2048, 4096], **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan-sweep.png", "plan.png"]


# ---------------------------------------------------------------------------- sweep


def test_a_sweep_plans_every_size_under_every_limit():
    batches = [draw_lengths("megatron-mock", 32, seed, longest=4000) for seed in (0, 1)]
    setting = Setting(4, 2048, COST)
    swept = sweep_settings(setting, batches, [2048, 1024], dynamic="dynamic CP")
    assert list(swept.times()) == ["static CP 1", "static CP 2", "static CP 4", "dynamic CP"]
    assert list(swept.times()["dynamic CP"]) == [1024, 2048]
    assert swept.times()["static CP 1"] == {1024: None, 2048: None}
    assert swept.times()["static CP 2"][1024] is None
    comparison = compare(setting, batches, 2)
    assert swept.times()["static CP 2"][2048] == pytest.approx(comparison.static.predicted_step_s)
    assert swept.times()["dynamic CP"][2048] == pytest.approx(comparison.dynamic.predicted_step_s)
    assert swept.advice().startswith("-: the longest sample does not fit.\nRecommended: dynamic CP at ")


def test_the_smallest_limit_within_a_hundredth_of_the_fastest_is_recommended():
    cells = [Cell(4, 1024, 1.5), Cell(None, 1024, 1.02), Cell(None, 2048, 1.005), Cell(None, 4096, 1.0)]
    swept = Sweep(tuple(cells), "dynamic CP")
    assert swept.recommended == cells[2]
    assert swept.choice == ("dynamic CP", 2048)
    assert "takes 1.49 times as long" in swept.advice()


def test_a_static_setting_as_fast_as_dynamic_is_preferred():
    cells = (Cell(4, 1024, 1.009), Cell(2, 1024, 1.008), Cell(None, 1024, 1.0), Cell(1, 2048, 0.999))
    assert Sweep(cells, "dynamic CP").recommended == cells[1]


def test_a_sweep_in_which_nothing_fits_says_so():
    with pytest.raises(ConfigurationError, match="no limit of 8, 16"):
        sweep_settings(Setting(2, 8, COST), [[100]], [8, 16], dynamic="dynamic CP")


def test_lock_step_that_a_batch_is_too_small_for_has_no_time_and_a_reason():
    swept = sweep_settings(Setting(4, 64, COST, mode="lockstep"), [[50, 60]], [64], dynamic="dynamic CP")
    static = next(cell for cell in swept.cells if cell.context_parallel_size == 1)
    assert static.step_s is None
    assert "lock-step" in static.why_not
    assert "lock-step" in swept.advice()


@pytest.mark.parametrize(("limit", "limits"), [(4096, (2048, 4096, 8192, 16384)), (1, (1, 2, 4))])
def test_limits_around_the_one_given_are_tried(limit, limits):
    assert default_limits(limit) == limits
