"""The command line from training to prediction, with two ranks and little of everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = [
    "--trainer.devices=2",
    "--trainer.enable_progress_bar=false",
    "--data.init_args.max_length=200",
    "--data.init_args.limit=40",
    "--data.init_args.batch_size=4",
]


def run(directory: Path, command: str, *arguments: str) -> str:
    full = [sys.executable, "-m", "lightning_dcp", command, "--config", str(ROOT / "configs/demo_cpu.yaml"), *SMALL]
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*full, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_fit_validate_and_predict(tmp_path: Path) -> None:
    printed = run(
        tmp_path, "fit", "--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=1"
    )
    folder = tmp_path / "runs/demo/version_0"
    for words in ("packs by context-parallel size", "busy share", "validation loss", "runs/demo/version_0"):
        assert words in printed
    assert {"metrics.csv", "config.yaml", "checkpoints"} <= {path.name for path in folder.iterdir()}
    checkpoint = next((folder / "checkpoints").glob("*.ckpt"))
    assert "val_loss" in run(tmp_path, "validate", f"--ckpt_path={checkpoint}")
    run(tmp_path, "predict", f"--ckpt_path={checkpoint}", "--return_predictions=false")
