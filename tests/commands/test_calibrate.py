"""``lightning-dcp calibrate`` and ``lightning-dcp bench prediction``, from arguments to files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import yaml

from lightning_dcp.calibration.build import build_run
from lightning_dcp.calibration.measure import measure_steps
from lightning_dcp.commands.bench_prediction import bench_prediction
from lightning_dcp.commands.calibrate import calibrate
from lightning_dcp.errors import ConfigurationError
from lightning_dcp.schedule import load_cost_model, simulate
from lightning_dcp.schedule.plan import Pack, StepPlan

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs/demo_cpu.yaml")
DECODER = {"hidden_size": 32, "num_layers": 1, "num_kv_heads": 2}
SMALL = {
    "trainer": {
        "devices": 2,
        "strategy": {
            "class_path": "lightning_dcp.DCPStrategy",
            # what a user's configuration may well say: options of planning, and a file that is yet to be written
            "init_args": {
                "max_seqlen_per_dp_cp_rank": 128,
                "cost_model": "not_there_yet.yaml",
                "schedule_mode": "lockstep",
                "layout": "contiguous",
            },
        },
    },
    "model": {
        "class_path": "lightning_dcp.lm.LanguageModel",
        "init_args": {"model": {"class_path": "lightning_dcp.Decoder", "init_args": DECODER}},
    },
    "data": {
        "class_path": "lightning_dcp.data.PythonLibraryDataModule",
        "init_args": {"max_length": 200, "limit": 40, "batch_size": 4},
    },
}


@pytest.fixture(autouse=True)
def _no_seed_is_left_behind(monkeypatch):
    """Building a run seeds, and says so to processes that start later."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.fixture
def small(tmp_path):
    """A configuration of two ranks and a tiny model, and the folder it is in."""
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def run(folder, *arguments, timeout=150):
    command = [sys.executable, "-m", "lightning_dcp", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_two_ranks_are_measured_and_the_file_is_a_cost_model(small, tmp_path):
    options = ("--lengths", "64", "128", "--repeats", "2", "--output", "cost.yaml", "--json", "all.json")
    printed = run(tmp_path, "calibrate", "--config", DEMO, "--config", small, *options)
    for words in ("measured", "fitted", "pack_overhead", "R^2", "Written to cost.yaml"):
        assert printed.count(words) == 1, f"{words}: printed by one rank, once"
    text = (tmp_path / "cost.yaml").read_text()
    assert "LanguageModel(Decoder)" in text
    assert "2 rank(s)" in text
    cost = load_cost_model(tmp_path / "cost.yaml")
    assert cost.linear + cost.attention > 0
    keys_and_values = 2 * 2 * 8 * 4  # two heads of size 8, float32
    assert cost.hop_bytes == 3 * keys_and_values, "in forward, and in backward with their gradients"
    assert [tokens for tokens, _ in cost.efficiency] == [2**n for n in range(8)]
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["cost_model"] == cost.to_dict()
    assert {step["cp_size"] for step in found["steps"]} == {1, 2}
    assert {len(step["samples"]) for step in found["steps"]} >= {1, 4}
    for step in found["steps"]:
        count = 2 // step["cp_size"] * step["packs"]
        size = step["cp_size"]
        lengths = tuple(step["samples"]) * count
        packs = [
            tuple(
                Pack(first, size, tuple(range(at, at + len(step["samples"]))))
                for first, at in zip(range(0, 2, size), range(number, len(lengths), len(step["samples"])), strict=False)
            )
            for number in range(0, len(lengths), len(step["samples"]) * (2 // size))
        ]
        plan = StepPlan(2, 128, lengths, tuple(packs))
        plan.validate()
        assert simulate(plan, cost).step_s == pytest.approx(step["fitted_s"])
        assert 0 < step["measured_s"] < 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_predictions_of_twenty_batches_agree_with_what_is_measured(tmp_path):
    """The demo's model and data on two ranks, with shorter samples."""
    quick = tmp_path / "quick.yaml"
    overrides = {
        "trainer": {"devices": 2, "strategy": DCP},
        "data": {
            "class_path": "lightning_dcp.data.PythonLibraryDataModule",
            "init_args": {"max_length": 1024, "batch_size": 8},
        },
    }
    quick.write_text(yaml.safe_dump(overrides))
    configs = ("--config", DEMO, "--config", quick)
    run(tmp_path, "calibrate", *configs, "--output", "cost.yaml", "--repeats", "3", timeout=280)
    outputs = ("--json", "pairs.json", "--plot", "pairs.png")
    printed = run(tmp_path, "bench", "prediction", *configs, "--cost-model", "cost.yaml", *outputs, timeout=280)
    assert "Correlation" in printed
    found = json.loads((tmp_path / "pairs.json").read_text())
    assert len({tuple(batch["lengths"]) for batch in found["batches"]}) == 20
    assert found["correlation"] >= 0.9
    assert 0.5 < found["mean_ratio"] < 2
    assert (tmp_path / "pairs.png").read_bytes().startswith(b"\x89PNG")


DCP = {"class_path": "lightning_dcp.DCPStrategy", "init_args": {"max_seqlen_per_dp_cp_rank": 512}}


def write(folder, name, **changes):
    path = folder / name
    path.write_text(yaml.safe_dump(SMALL | changes))
    return str(path)


def test_all_bad_arguments_are_told_at_once(small):
    with pytest.raises(ConfigurationError) as error:
        calibrate([str(small)], lengths=[0, 999], repeats=0, output="nowhere/cost.yaml")
    for words in ("not positive whole numbers", "holds 256 tokens", "repeats=0", "no folder nowhere"):
        assert words in str(error.value)
    with pytest.raises(ConfigurationError) as error:
        bench_prediction([str(small)], "h100", batches=1, repeats=0, json="nowhere/all.json")
    for words in ("too few to correlate", "repeats=0", "no folder nowhere"):
        assert words in str(error.value)


def test_files_that_are_not_there_are_named(small):
    with pytest.raises(ConfigurationError, match=r"'gone.yaml'[^$]*no such file"):
        calibrate(["gone.yaml"])
    with pytest.raises(ConfigurationError, match=r"'gone.ckpt'[^$]*no such file"):
        calibrate([str(small)], checkpoint="gone.ckpt")
    with pytest.raises(ConfigurationError, match="no configuration"):
        calibrate([])
    with pytest.raises(ConfigurationError, match="cost model 'gone_cost'"):
        bench_prediction([str(small)], "gone_cost")


def test_a_strategy_without_packs_is_refused(tmp_path):
    path = write(tmp_path, "plain.yaml", trainer={"devices": 1, "accelerator": "cpu"})
    with pytest.raises(ConfigurationError, match="SingleDeviceStrategy, which makes none"):
        build_run([path])


def test_options_that_the_scheduler_would_not_see_are_refused(small):
    with pytest.raises(ConfigurationError, match="context_parallel_size=2"):
        bench_prediction([str(small)], "h100", context_parallel_size=2)
    with pytest.raises(ConfigurationError, match="max_context_parallel_size=1"):
        bench_prediction([str(small)], "h100", scheduler="static", max_context_parallel_size=1)


def test_nothing_but_steps_is_left_of_a_run(tmp_path):
    path = write(
        tmp_path,
        "busy.yaml",
        trainer=SMALL["trainer"]
        | {
            "callbacks": [{"class_path": "lightning_dcp.RunSummary"}],
            "max_steps": 7,
            "limit_train_batches": 3,
            "accumulate_grad_batches": 4,
            "fast_dev_run": True,
        },
    )
    trainer = build_run([path], replaced={"cost_model": None}).trainer
    assert trainer.loggers == []
    assert not any(type(callback).__name__ == "RunSummary" for callback in trainer.callbacks)
    assert (trainer.max_steps, trainer.limit_train_batches, trainer.accumulate_grad_batches) == (-1, 1.0, 1)
    assert trainer.fast_dev_run is False


def test_the_configuration_that_fit_saves_is_accepted(tmp_path):
    path = write(tmp_path, "saved.yaml", ckpt_path=None, weights_only=None, seed_everything=3)
    assert build_run([path], devices=1, replaced={"cost_model": None}).strategy.topology.world_size == 1


def checkpoint_of(module, path, **more):
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.0", **more}, path)
    return str(path)


def test_weights_of_another_model_are_refused_by_name(small, tmp_path):
    from lightning_dcp import Decoder
    from lightning_dcp.lm import LanguageModel

    good = checkpoint_of(LanguageModel(Decoder(**DECODER)), tmp_path / "good.ckpt")
    built = build_run([str(small)], checkpoint=good, replaced={"cost_model": None})
    assert set(built.weights) == set(built.model.state_dict())
    bad = checkpoint_of(LanguageModel(Decoder(**DECODER | {"num_layers": 2})), tmp_path / "bad.ckpt")
    with pytest.raises(ConfigurationError, match=r"model.blocks.1\S+: none in the model"):
        build_run([str(small)], checkpoint=bad, replaced={"cost_model": None})
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        build_run([str(small)], checkpoint=str(tmp_path / "text.ckpt"), replaced={"cost_model": None})


def test_a_checkpoint_with_hyperparameters_needs_no_model_in_the_configuration(tmp_path):
    from lightning_dcp import Decoder
    from lightning_dcp.lm import LanguageModel

    path = tmp_path / "data_only.yaml"
    path.write_text(yaml.safe_dump({name: SMALL[name] for name in ("trainer", "data")}))
    arguments = SMALL["model"]["init_args"] | {"warmup_steps": 3}
    hyper = {"_class_path": "lightning_dcp.lm.LanguageModel", "_instantiator": "lightning...", **arguments}
    module = LanguageModel(Decoder(**DECODER))
    saved = checkpoint_of(module, tmp_path / "model.ckpt", hyper_parameters=hyper)
    built = build_run([str(path)], checkpoint=saved, replaced={"cost_model": None})
    assert built.model.warmup_steps == 3
    assert len(built.model.model.blocks) == 1


@pytest.mark.parametrize("form", ["packed", "padded", "jagged"])
def test_one_rank_alone_is_measured_in_every_format(form, tmp_path, ranks):
    """In a rank's own process: a trainer must not run in this one."""
    data = {"class_path": SMALL["data"]["class_path"], "init_args": SMALL["data"]["init_args"] | {"format": form}}
    strategy = {"class_path": "lightning_dcp.DCPStrategy", "init_args": {"max_seqlen_per_dp_cp_rank": 2048}}
    config = write(tmp_path, "form.yaml", data=data, trainer={"devices": 1, "strategy": strategy})
    cost = ranks.run(calibrate_alone, 1, config, str(tmp_path))[0]
    assert (cost["hop_bytes"], cost["hop_latency"]) == (0.0, 0.0)
    assert cost["linear"] + cost["attention"] > 0


def calibrate_alone(config, folder):
    """Lengths far enough apart that the longer takes longer on any machine, however busy."""
    return calibrate([config], devices=1, lengths=[32, 2048], repeats=3, output=f"{folder}/cost.yaml").to_dict()


def test_steps_run_with_a_checkpoints_weights_on_the_lengths_chosen(small, tmp_path, ranks):
    steps, before, loaded = ranks.run(measure_with_checkpoint, 1, str(small), str(tmp_path))[0]
    assert before == loaded
    assert [(lengths, plan, count) for lengths, plan, count in steps] == [
        ((5, 100), (5, 100), 2),
        ((7,), (7,), 2),
    ]


class Noting(L.Callback):
    """Notes the sum of a weight when training starts."""

    def on_train_start(self, trainer, pl_module):
        self.sum = float(pl_module.model.embedding.weight.detach().sum())


def measure_with_checkpoint(config, folder):
    from lightning_dcp import Decoder
    from lightning_dcp.lm import LanguageModel

    module, noting = LanguageModel(Decoder(**DECODER)), Noting()
    before = float(module.model.embedding.weight.detach().sum())
    saved = checkpoint_of(module, Path(folder) / "model.ckpt")
    run = build_run([config], checkpoint=saved, devices=1, replaced={"cost_model": None})
    times = measure_steps(run, lambda _: [(5, 100), (7,)], repeats=2, callbacks=[noting])
    return [(t.lengths, t.plan.lengths, len(t.seconds)) for t in times], before, noting.sum


@pytest.mark.parametrize(
    ("options", "sizes"), [({}, {1, 2}), ({"scheduler": "static", "context_parallel_size": 2}, {2})]
)
def test_batches_run_by_the_chosen_scheduler_and_all_ranks_hold_the_same_pairs(options, sizes, small, tmp_path, ranks):
    found, other = ranks.run(bench_small, 2, str(small), str(tmp_path), options)
    assert found == other
    assert len(found["batches"]) == 4
    assert {int(size) for batch in found["batches"] for size in batch["packs"]} <= sizes
    assert all(1 <= n <= 200 for batch in found["batches"] for n in batch["lengths"])
    assert found == json.loads((tmp_path / "pairs.json").read_text())


def bench_small(config, folder, options):
    cost = {"linear": 1e-4, "attention": 0.0, "pack_overhead": 0.01}
    (Path(folder) / "given.yaml").write_text(yaml.safe_dump(cost))
    given = str(Path(folder) / "given.yaml")
    pairs = bench_prediction([config], given, batches=4, repeats=1, json=f"{folder}/pairs.json", **options)
    for p in pairs.predictions:
        assert p.predicted == simulate(p.plan, load_cost_model(given)).step_s
        assert p.plan.mode == "lockstep"
    return pairs.to_dict()
