"""Ranks that end with their run (notebooks): a fit says where its model goes, and nobody evaluates or saves another one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_dcp import ConfigurationError, MegatronGPT
from lightning_dcp.errors import CheckpointError
from lightning_dcp.models.megatron import processes
from tests.megatron import runs

ROOT = Path(__file__).parents[2]


def check(fn: str, *, method: str = "fork", fitted: bool = False, path: str | None = None, rank: int = 0) -> list[str]:
    """What is warned of at set-up of a run of a module with a Megatron-Core model."""
    strategy = SimpleNamespace(_start_method=method, global_rank=rank, launcher=SimpleNamespace(_already_fit=fitted))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=_Name(fn)), ckpt_path=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        processes.check_processes(nn.Identity(), strategy, trainer)
    return [str(warning.message) for warning in caught]


class _Name(str):
    """As Lightning's names of runs, which are text with a value."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str(self)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "megatron_models", lambda module: {"model": module})


@pytest.mark.usefixtures("megatron")
def test_a_fit_says_where_the_model_goes() -> None:
    [said] = check("fit")
    assert "start_method='fork'" in said and "ModelCheckpoint" in said and 'ckpt_path="best"' in said
    assert check("fit", rank=1) == check("fit", method="popen") == []


@pytest.mark.usefixtures("megatron")
def test_another_model_is_not_evaluated_in_its_place() -> None:
    for fn in ("validate", "test", "predict"):
        with pytest.raises(ConfigurationError, match=rf"trainer\.{fn} after trainer\.fit, without ckpt_path"):
            check(fn, fitted=True)
        assert check(fn, fitted=True, path="x.ckpt") == check(fn) == check(fn, method="popen", fitted=True) == []


def test_other_modules_come_back() -> None:
    assert check("fit") == check("validate", fitted=True) == []


def test_no_empty_checkpoint_is_written() -> None:
    with pytest.raises(CheckpointError, match="no model in this process"):
        MegatronGPT(runs.DENSE).on_save_checkpoint({})


SCRIPT = """
import warnings
import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_dcp import DCPStrategy
from tests.megatron import runs
from tests.support.training import loader

quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", devices=1, strategy=DCPStrategy(start_method="fork"), max_steps=1, precision="64-true",
                    callbacks=[ModelCheckpoint(dirpath="kept")], **quiet)
model, data = runs.SmallGPT(runs.DENSE), loader((5, 3), 2, "packed")
trainer.fit(model, data)
for path in (None, "best"):
    try:
        print("loss", trainer.validate(model, data, ckpt_path=path, verbose=False)[0]["val_loss"])
    except Exception as error:
        print("refused", " ".join(str(error).split()))
try:
    trainer.save_checkpoint("empty.ckpt")
except Exception as error:
    print("refused", error)
"""


def test_a_notebooks_run(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fresh, kept, saved = done.stdout.splitlines()[-3:]
    assert "trainer.validate after trainer.fit, without ckpt_path" in fresh
    assert kept.startswith("loss ")
    assert saved.startswith("refused asked: a checkpoint of a MegatronGPT")
    assert not (tmp_path / "empty.ckpt").exists()
    assert "which end with this fit" in done.stderr
    assert "Overwriting old incomplete" not in done.stderr
