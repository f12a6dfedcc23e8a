"""Which scheduler plans a run, with which options; and that every one of them trains as one process does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch

from lightning_dcp import (
    ConfigurationError,
    DCPStrategy,
    DynamicScheduler,
    SchedulerCallback,
    StaticScheduler,
    StepPlan,
    checks,
    module_checks,
)
from lightning_dcp.schedule import CostModel, preset, save_cost_model
from lightning_dcp.schedule.megatron import MegatronScheduler
from lightning_dcp.schedule.plan import Pack
from tests.support.ranks import RankPool
from tests.support.training import TinyModule, assert_same, fit, loader, trainer

ROOT = Path(__file__).parents[1]
LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30)
COST = CostModel(1e-5, 2e-9)


class Mine:
    """A scheduler of the user's own: everything over the whole plane."""

    def __init__(self, ranks: int) -> None:
        self.plain = StaticScheduler(ranks, 64, ranks)

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        return self.plain.schedule(lengths)


def my_scheduler(ranks: int) -> Mine:
    return Mine(ranks)


def no_scheduler(ranks: int) -> str:
    return "nothing"


def built(strategy: DCPStrategy, ranks: int = 4) -> Any:
    """The scheduler that a run on a plane of this many ranks would use."""
    return strategy.scheduler_choice.build(ranks)


# ------------------------------------------------------------- which one


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, DynamicScheduler),
        ({"dynamic_context_parallel": False}, StaticScheduler),
        ({"scheduler": "dynamic"}, DynamicScheduler),
        ({"scheduler": "static"}, StaticScheduler),
        ({"scheduler": "static", "dynamic_context_parallel": False}, StaticScheduler),
        ({"scheduler": "megatron"}, MegatronScheduler),
        ({"scheduler": Mine(4)}, Mine),
        ({"scheduler": Mine}, Mine),
        ({"scheduler": my_scheduler}, Mine),
        ({"scheduler": lambda ranks: DynamicScheduler(ranks, 9)}, DynamicScheduler),
    ],
)
def test_the_scheduler_is_the_one_asked_for(options: dict[str, Any], kind: type) -> None:
    scheduler = built(DCPStrategy(**options))
    assert type(scheduler) is kind
    assert scheduler.schedule((5, 3, 9)).lengths == (5, 3, 9)


def test_options_reach_the_dynamic_scheduler() -> None:
    options = {
        "layout": "contiguous",
        "min_context_parallel_size": 2,
        "max_context_parallel_size": 4,
        "microbatch_multiple": 2,
        "ranks_per_node": 4,
    }
    strategy = DCPStrategy(
        max_seqlen_per_dp_cp_rank=99,
        cost_model=COST,
        schedule_mode="lockstep",
        rank_speeds=[1.0, 0.5] * 4,
        **options,  # type: ignore[arg-type]
    )
    scheduler = built(strategy, 8)
    assert {name: getattr(scheduler, name) for name in options} == options
    assert (scheduler.ranks, scheduler.max_seqlen_per_dp_cp_rank, scheduler.mode) == (8, 99, "lockstep")
    assert tuple(scheduler.rank_speeds) == (1.0, 0.5) * 4
    assert (scheduler.cost.linear, scheduler.cost.attention) == (COST.linear, COST.attention)


def test_options_reach_the_static_and_megatrons_scheduler() -> None:
    strategy = DCPStrategy(
        2,
        dynamic_context_parallel=False,
        max_seqlen_per_dp_cp_rank=99,
        layout="contiguous",
        schedule_mode="lockstep",
        microbatch_multiple=2,
    )
    expected = StaticScheduler(8, 99, 2, "contiguous", "lockstep", microbatch_multiple=2)
    assert built(strategy, 8) == expected
    megatron = DCPStrategy(scheduler="megatron", max_seqlen_per_dp_cp_rank=99, layout="contiguous")
    assert built(megatron, 8) == MegatronScheduler(8, 99, "contiguous")


def test_a_function_that_makes_no_scheduler_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no_scheduler, called with 4 rank\(s\)\n +found: str"):
        built(DCPStrategy(scheduler=no_scheduler))  # type: ignore[arg-type]


# ---------------------------------------------------------- contradictions

STATIC = {"dynamic_context_parallel": False}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"scheduler": "dynamik"}, ["scheduler='dynamik'", "use one of ['dynamic', 'static', 'megatron']"]),
    ({"scheduler": 3}, ["scheduler=3", "an object with schedule(lengths)"]),
    (STATIC | {"scheduler": "dynamic"}, ["dynamic_context_parallel=False with scheduler='dynamic'"]),
    (STATIC | {"scheduler": "megatron"}, ["dynamic_context_parallel=False with scheduler='megatron'"]),
    (STATIC | {"scheduler": Mine(4)}, ["dynamic_context_parallel=False with scheduler=Mine"]),
    (STATIC | {"max_context_parallel_size": 2}, ["max_context_parallel_size=2", "the static scheduler", "'dynamic'"]),
    ({"scheduler": "static", "rank_speeds": [1.0]}, ["rank_speeds=(1.0,)", "the static scheduler"]),
    ({"scheduler": "megatron", "schedule_mode": "lockstep"}, ["schedule_mode='lockstep'", "the megatron scheduler"]),
    ({"scheduler": "megatron", "min_context_parallel_size": 2}, ["min_context_parallel_size=2", "no such option"]),
    ({"scheduler": Mine(4), "layout": "contiguous"}, ["layout='contiguous'", "Mine, which decides alone"]),
    ({"scheduler": my_scheduler, "ranks_per_node": 2}, ["ranks_per_node=2", "my_scheduler, which decides alone"]),
    ({"microbatch_multiple": 2}, ["microbatch_multiple=2", "schedule_mode='free'", "use schedule_mode='lockstep'"]),
    ({"schedule_mode": "fast"}, ["schedule_mode='fast'", "use one of ['free', 'lockstep']"]),
    ({"min_context_parallel_size": 0}, ["min_context_parallel_size=0", "not a positive whole number"]),
    ({"max_context_parallel_size": True}, ["max_context_parallel_size=True", "not a positive whole number"]),
    ({"microbatch_multiple": 1.5}, ["microbatch_multiple=1.5", "not a positive whole number"]),
    ({"ranks_per_node": -1}, ["ranks_per_node=-1", "not a positive whole number"]),
    ({"rank_speeds": [1.0, 0.0]}, ["rank_speeds=[1.0, 0.0]", "not finite numbers above 0"]),
    ({"rank_speeds": [1.0, float("nan")]}, ["rank_speeds=[1.0, nan]"]),
    ({"cost_model": "h1000"}, ["'h1000'", "cannot be read", "calibrate"]),
    ({"cost_model": 3.5}, ["cost_model=3.5", "a float"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words[0] for _, words in REFUSED])
def test_what_contradicts_itself_is_refused_at_once(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DCPStrategy(**options)
    for word in words:
        assert word in str(caught.value)
    assert len(caught.value.problems) == 1


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DCPStrategy(
            0,
            cost_model="nowhere.yaml",
            schedule_mode="fast",  # type: ignore[arg-type]
            min_context_parallel_size=0,
            rank_speeds=[-1.0],
        )
    assert len(caught.value.problems) == 5


def test_only_the_flag_has_to_change_for_the_static_baseline() -> None:
    options: dict[str, Any] = {"context_parallel_size": 2, "cost_model": COST, "schedule_mode": "lockstep"}
    assert type(built(DCPStrategy(**options))) is DynamicScheduler
    assert type(built(DCPStrategy(dynamic_context_parallel=False, **options))) is StaticScheduler


@pytest.mark.parametrize(
    ("devices", "options", "words"),
    [
        (6, {"min_context_parallel_size": 4}, ["min_context_parallel_size=4", "plane of 6 rank", "1, 2, 3, 6"]),
        (6, {"max_context_parallel_size": 8}, ["max_context_parallel_size=8", "plane of 6 rank"]),
        (4, {"rank_speeds": [1.0, 0.5]}, ["rank_speeds of 2 rank(s)", "plane of 4 rank(s)"]),
        (4, {"min_context_parallel_size": 4, "max_context_parallel_size": 2}, ["min_context_parallel_size=4"]),
    ],
)
def test_sizes_that_do_not_fit_the_plane_are_refused_when_the_trainer_is_made(
    devices: int, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        L.Trainer(accelerator="cpu", devices=devices, strategy=DCPStrategy(**options), logger=False)
    for word in words:
        assert word in str(caught.value)


def test_two_schedulers_for_one_run_are_refused() -> None:
    callback = SchedulerCallback(Mine(4))
    for scheduler in ("static", Mine(4)):
        with pytest.raises(ConfigurationError, match="two schedulers for one run"):
            checks.choice_in_force(DCPStrategy(scheduler=scheduler).scheduler_choice, callback)  # type: ignore[arg-type]
    choice = DCPStrategy(scheduler="static").scheduler_choice
    assert checks.choice_in_force(choice, SchedulerCallback()) is choice


def test_a_callbacks_scheduler_decides_alone() -> None:
    callback = SchedulerCallback(my_scheduler)
    in_force = checks.choice_in_force(DCPStrategy(cost_model=COST).scheduler_choice, callback)
    assert type(in_force.build(4)) is Mine
    for options, word in (
        ({"rank_speeds": [1.0]}, "rank_speeds"),
        ({"dynamic_context_parallel": False}, "dynamic_context_parallel=False"),
    ):
        with pytest.raises(ConfigurationError, match=word):
            checks.choice_in_force(DCPStrategy(**options).scheduler_choice, callback)  # type: ignore[arg-type]


def both() -> None:
    run = trainer(strategy={"scheduler": "static"}, callbacks=[SchedulerCallback(Mine)])
    run.fit(TinyModule(), loader((5, 3), 2))


def test_two_schedulers_are_refused_before_training(ranks: RankPool) -> None:
    ok, text = ranks.run_all(both, 1)[0]
    assert not ok
    assert "DCPStrategy(scheduler=...) and SchedulerCallback(Mine)" in text


# ------------------------------------------------------ cost model and nodes


def test_a_cost_model_is_a_value_a_preset_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    save_cost_model(COST, path)
    assert DCPStrategy().cost_model == preset("h100")
    assert DCPStrategy(cost_model=COST).cost_model is COST
    assert DCPStrategy(cost_model="a100").cost_model == preset("a100")
    assert DCPStrategy(cost_model=path).cost_model == DCPStrategy(cost_model=str(path)).cost_model == COST
    assert built(DCPStrategy(cost_model=path)).cost == COST


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        (1, {}, None),
        (2, {}, 4),
        (2, {"tensor_model_parallel_size": 2}, 2),
        (2, {"ranks_per_node": 2}, 2),
        (2, {"cost_model": CostModel(1e-5, 2e-9, ranks_per_node=1)}, 1),
        (2, {"cost_model": CostModel(1e-5, 2e-9, ranks_per_node=1), "ranks_per_node": 2}, 2),
        (1, {"ranks_per_node": 2}, 2),
    ],
)
def test_ranks_of_a_node_are_known_with_several_nodes(nodes: int, options: dict[str, Any], expected: int) -> None:
    strategy = DCPStrategy(**options)
    strategy.num_nodes = nodes
    strategy.parallel_devices = [torch.device("cpu")] * 4
    scheduler: Any = strategy._new_scheduler(strategy._choice)
    assert scheduler.ranks == nodes * 4 // strategy.tensor_model_parallel_size
    assert scheduler.cost.ranks_per_node == expected


# -------------------------------------------------------------------- in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["dynamic, sizes 1, 2, 4 on a plane of 4", "layout zigzag, mode free"]),
        ({"schedule_mode": "lockstep"}, ["dynamic, sizes 1, 2, 4", "mode lockstep"]),
        ({"max_context_parallel_size": 2}, ["dynamic, sizes 1, 2 on", "64 tokens a rank, 128 a sample"]),
        ({"scheduler": "static", "context_parallel_size": 2}, ["static, sizes 2 on a plane of 4", "mode free"]),
        ({"scheduler": "megatron"}, ["by Megatron-Core's scheduler, sizes 1, 2, 4", "layout zigzag; attention"]),
        ({"scheduler": my_scheduler}, ["by my_scheduler, sizes 1, 2, 4", "layout and mode its own"]),
    ],
)
def test_scheduler_and_mode_are_named(options: dict[str, Any], words: list[str]) -> None:
    strategy = DCPStrategy(max_seqlen_per_dp_cp_rank=64, **options)
    strategy.parallel_devices = [torch.device("cpu")] * 4
    strategy._regions = module_checks.Regions({})
    for word in words:
        assert word in strategy.describe()


# ----------------------------------------------------- from the command line

COMMANDS = """
import json, sys
import lightning.pytorch as L
from lightning.pytorch.cli import LightningCLI
import lightning_dcp.data, lightning_dcp.lm
from lightning_dcp import DCPStrategy
from lightning_dcp.schedule import load_cost_model

PREFIX = "--trainer.strategy.init_args."

def strategy(*options):
    args = ["--config", "configs/demo_cpu.yaml", *(PREFIX + option for option in ("cost_model=cpu", *options))]
    cli = LightningCLI(
        L.LightningModule, L.LightningDataModule, subclass_mode_model=True, subclass_mode_data=True,
        save_config_callback=None, run=False, args=args,
    )
    return cli.trainer.strategy

own = {"class_path": "lightning_dcp.StaticScheduler",
       "init_args": {"ranks": 4, "max_seqlen_per_dp_cp_rank": 64, "context_parallel_size": 2}}
value = {"class_path": "lightning_dcp.schedule.CostModel", "init_args": {"linear": 1.0, "attention": 0.25}}
options = ["schedule_mode=lockstep", "microbatch_multiple=2", "min_context_parallel_size=2", "ranks_per_node=2",
           "max_context_parallel_size=4", "rank_speeds=[1,0.5,1,1]", "plan_ahead=false", "scheduler=dynamic"]
many = strategy(*options)
choice = many.scheduler_choice
print(json.dumps({
    "file": strategy(f"cost_model={sys.argv[1]}").cost_model.linear,
    "preset": strategy("cost_model=h200").cost_model == load_cost_model("h200"),
    "value": strategy(f"cost_model={json.dumps(value)}").cost_model.attention,
    "megatron": strategy("scheduler=megatron").scheduler_choice.kind,
    "own": repr(strategy(f"scheduler={json.dumps(own)}").scheduler_choice.scheduler),
    "many": [choice.scheduler, choice.schedule_mode, choice.microbatch_multiple, choice.min_context_parallel_size,
             choice.max_context_parallel_size, choice.ranks_per_node, choice.rank_speeds, many.plan_ahead],
}))
from lightning_dcp.cli import main
main(["fit", "--trainer.strategy.help", "lightning_dcp.DCPStrategy"])
"""


def test_every_option_can_be_given_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "cost.yaml"
    save_cost_model(COST, path)
    command = [sys.executable, "-W", "ignore", "-c", COMMANDS, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found, shown = done.stdout.split("\n", 1)
    assert json.loads(found) == {
        "file": COST.linear,
        "preset": True,
        "value": 0.25,
        "megatron": "megatron",
        "own": repr(StaticScheduler(4, 64, 2)),
        "many": ["dynamic", "lockstep", 2, 2, 4, 2, [1.0, 0.5, 1.0, 1.0], False],
    }
    for option in ("scheduler", "schedule_mode", "microbatch_multiple", "rank_speeds", "plan_ahead", "cost_model"):
        assert f"--trainer.strategy.{option} " in shown
    assert "calibrate" in shown


# ----------------------------------------------------- all train the same


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> dict[str, Any]:
    """Plain Lightning on one process."""
    return ranks.run(fit, 1, LENGTHS, 6, strategy=None)[0]


class ByHand:
    """Lock-step plans by hand, for batches of six on four ranks: every rank has a pack in every micro-batch."""

    ROUNDS = (
        ((0, 4, (0,)),),
        ((0, 2, (1, 2)), (2, 1, (3,)), (3, 1, (4,))),
        ((0, 4, (5,)),),
    )

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        rounds = [
            tuple(Pack(first, c, tuple(sorted(order[s] for s in samples))) for first, c, samples in microbatch)
            for microbatch in self.ROUNDS
        ]
        return StepPlan(4, 64, tuple(lengths), tuple(rounds), "lockstep")


RUNS: dict[str, dict[str, Any]] = {
    "lock-step": {"schedule_mode": "lockstep"},
    "lock-step, multiple of two": {"schedule_mode": "lockstep", "microbatch_multiple": 2},
    "lock-step by hand": {"scheduler": ByHand()},
    "static in lock-step": {"scheduler": "static", "context_parallel_size": 4, "schedule_mode": "lockstep"},
    "sizes from two": {"min_context_parallel_size": 2},
    "sizes to two": {"max_context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 32},
    "unequal ranks": {"rank_speeds": [1.0, 0.5, 1.0, 0.25]},
    "nodes of two": {"ranks_per_node": 2},
    "megatron": {"scheduler": "megatron"},
    "own": {"scheduler": Mine},
    "without look-ahead": {"plan_ahead": False},
}


class Modes(L.Callback):
    """The mode, the micro-batches and the CP sizes of each plan."""

    def __init__(self) -> None:
        self.plans: list[tuple[str, list[list[int]]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        plan = trainer.strategy.callback.scheduled.plan  # type: ignore[attr-defined]
        self.plans.append((plan.mode, [[pack.cp_size for pack in microbatch] for microbatch in plan.microbatches]))


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_training_is_that_of_one_process(ranks: RankPool, one_process: dict[str, Any], options: dict[str, Any]) -> None:
    strategy = {"max_seqlen_per_dp_cp_rank": 16} | options
    for result in ranks.run(fit, 4, LENGTHS, 6, strategy=strategy):
        assert_same(result, one_process, 1e-9)


def plans_of(options: dict[str, Any]) -> list[tuple[str, list[list[int]]]]:
    modes = Modes()
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 16} | options, callbacks=[modes])
    run.fit(TinyModule(lr=0.1), loader(LENGTHS, 6))
    return modes.plans


def test_in_lock_step_all_ranks_run_the_same_number_of_micro_batches(ranks: RankPool) -> None:
    for multiple in (1, 3):
        plans = ranks.run(plans_of, 4, {"schedule_mode": "lockstep", "microbatch_multiple": multiple})[0]
        assert len(plans) == 3
        for mode, rounds in plans:
            assert mode == "lockstep"
            assert len(rounds) % multiple == 0
            assert all(sum(sizes) == 4 for sizes in rounds)


def test_bounds_on_sizes_hold_in_a_run(ranks: RankPool) -> None:
    options = {"min_context_parallel_size": 2, "max_context_parallel_size": 2, "max_seqlen_per_dp_cp_rank": 32}
    plans = ranks.run(plans_of, 4, options)[0]
    assert {size for _, rounds in plans for sizes in rounds for size in sizes} == {2}
