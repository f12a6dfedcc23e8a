"""Every configuration in `configs/` can be parsed, and describes what it says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from lightning_dcp.data import PythonLibraryDataModule
from lightning_dcp.parallel.layout import zigzag
from lightning_dcp.schedule import CostModel, DynamicScheduler

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs/demo_cpu.yaml"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def parse(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_dcp", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_configurations_are_parsed(config: Path) -> None:
    done = parse("fit", "--config", str(config), "--print_config")
    assert done.returncode == 0, done.stderr
    parsed = yaml.safe_load(done.stdout)
    assert parsed["trainer"]["strategy"]["class_path"] == "lightning_dcp.DCPStrategy"


def test_the_demo_uses_every_cp_size_within_its_limit() -> None:
    """Planned as the run plans it: the demo's batches, its scheduler settings, its four ranks."""
    config = yaml.safe_load(DEMO.read_text())
    strategy, data = config["trainer"]["strategy"]["init_args"], config["data"]["init_args"]
    module = PythonLibraryDataModule(**data)
    module.setup("fit")
    loader = module.train_dataloader()
    cost = CostModel(**strategy["cost_model"]["init_args"])
    scheduler = DynamicScheduler(config["trainer"]["devices"], strategy["max_seqlen_per_dp_cp_rank"], cost)
    lengths = loader.dataset.lengths
    sizes = Counter()
    for _, batch in zip(range(config["trainer"]["max_steps"]), loader.batch_sampler, strict=False):
        plan = scheduler.schedule([lengths[i] for i in batch])
        for pack in plan.packs():
            sizes[pack.cp_size] += 1
            layout = zigzag([plan.lengths[s] for s in pack.samples], pack.cp_size)
            held = [layout.tokens(rank) for rank in range(pack.cp_size)]
            assert max(held) <= strategy["max_seqlen_per_dp_cp_rank"]
    assert set(sizes) == {1, 2, 4}


def test_there_are_configurations() -> None:
    assert [path.name for path in CONFIGS] == [
        "chat_sft_cpu.yaml",
        "demo_cpu.yaml",
        "megatron_cpu.yaml",
        "megatron_moe_gpu.yaml",
        "text_files.yaml",
    ]


def test_an_unknown_option_is_an_error() -> None:
    done = parse("fit", "--config", str(DEMO), "--trainer.strategy.init_args.dynamic_cp=true", "--print_config")
    assert done.returncode != 0
    assert "dynamic_cp" in done.stderr


def test_mistakes_end_with_a_message_and_no_traceback() -> None:
    done = parse("fit", "--config", str(DEMO), "--trainer.strategy.init_args.context_parallel_size=3")
    assert done.returncode != 0
    assert "context_parallel_size=3" in done.stderr
    assert "use one of [1, 2, 4]" in done.stderr
    assert "Traceback" not in done.stderr
