"""The command line from training to prediction, with two ranks and little of everything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest

from lightning_dcp import cli
from lightning_dcp.errors import DataError, PlanError

ROOT = Path(__file__).parents[1]
SMALL = [
    "--trainer.devices=2",
    "--trainer.enable_progress_bar=false",
    "--data.init_args.max_length=200",
    "--data.init_args.limit=40",
    "--data.init_args.batch_size=4",
]


class FailsAlone(L.Callback):
    """An error that only rank 1 has."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_rank == 1:
            raise DataError("a file that only rank 1 reads is no text at all: " + "x" * 100 + " and so on")


def run(directory: Path, command: str, *arguments: str) -> str:
    done = started(directory, command, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def started(directory: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    full = [sys.executable, "-m", "lightning_dcp", command, "--config", str(ROOT / "configs/demo_cpu.yaml"), *SMALL]
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*full, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


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


REFUSALS = {
    "all ranks": (
        ["--trainer.strategy.init_args.max_seqlen_per_dp_cp_rank=50"],
        "SampleTooLongError: ",
        "raise max_seqlen",
    ),
    "rank 1 alone": (
        ["--trainer.callbacks+=tests.test_cli.FailsAlone"],
        "PeerFailureError: rank 1 failed: DataError: a file that only rank 1 reads",
        "and so on",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_told_once_and_no_error_is_lost(case: str, tmp_path: Path) -> None:
    options, words, end = REFUSALS[case]
    done = started(tmp_path, "fit", "--trainer.max_steps=3", "--trainer.val_check_interval=3", *options)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and "is deprecated" not in done.stderr
    [told] = [line for line in done.stderr.splitlines() if end in line]
    assert told.startswith(words)
    [other] = [line for line in done.stderr.splitlines() if "[rank 1] " in line and "(all of it on rank 0)" in line]
    assert len(other) < 150


def test_ranks_other_than_the_first_say_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: Any) -> None:
        raise PlanError("one line\nand another " + "x" * 200)

    monkeypatch.setattr(cli, "_lightning", fails)
    said = []
    for rank in (0, 3):
        monkeypatch.setattr(cli, "_rank", lambda rank=rank: rank)
        with pytest.raises(SystemExit) as ended:
            cli.main(["fit"])
        said.append(str(ended.value))
    assert said[0] == "PlanError: one line\nand another " + "x" * 200
    assert said[1].startswith("[rank 3] PlanError: one line and another xxx") and "\n" not in said[1]
