"""Differences between releases of Megatron-Core: what this package takes is there, and what is not is named."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import lightning_dcp
from lightning_dcp import ConfigurationError
from lightning_dcp.models.megatron import compat

PACKAGE = Path(lightning_dcp.__file__).parent


def taken() -> set[str]:
    """Full names of all that the package's files import from Megatron-Core."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_installed_release_has_what_is_needed() -> None:
    assert compat.release().startswith(compat.TESTED) or "dev" in compat.release()
    assert compat.release_problems() == []
    compat.load()


def test_whatever_is_imported_is_checked_first() -> None:
    """A release without it is then refused at set-up, not by an ImportError in the middle of a run."""
    listed = {*compat.NEEDED, *compat.NEEDED_WITH_TE}
    modules = {name.rpartition(".")[0] for name in listed}
    assert len(taken()) > 10
    assert {name for name in taken() if name not in listed | modules} == set()


@pytest.fixture
def cut_down(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A release whose GPTModel knows no virtual stages, and whose schedules are gone."""

    class GPTModel:
        def __init__(self, config: Any, pre_process: bool = True, post_process: bool = True) -> None: ...

    gpt = types.ModuleType("megatron.core.models.gpt")
    gpt.GPTModel = GPTModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", gpt)
    schedules = types.ModuleType("megatron.core.pipeline_parallel")
    monkeypatch.setitem(sys.modules, "megatron.core.pipeline_parallel", schedules)
    compat.load.cache_clear()
    return gpt


def test_a_release_without_a_symbol_is_refused_by_name(cut_down: types.ModuleType) -> None:
    with pytest.raises(ConfigurationError) as caught:
        compat.load()
    asked = [problem.asked for problem in caught.value.problems]
    assert asked == [
        "megatron.core.models.gpt.GPTModel(vp_stage=...)",
        "megatron.core.pipeline_parallel.get_forward_backward_func",
    ]
    for problem in caught.value.problems:
        assert f"Megatron-Core {compat.release()}" in problem.found
        assert all(release in problem.remedy for release in compat.TESTED)


def test_what_no_release_has_is_not_found() -> None:
    assert compat.find("megatron.core.nothing.at_all") is None
    assert compat.find("megatron.core.parallel_state.nothing_at_all") is None
    assert compat.find("megatron.core.transformer.TransformerConfig").__name__ == "TransformerConfig"


def test_what_megatron_core_raises_becomes_a_problem() -> None:
    with pytest.raises(ConfigurationError) as caught, compat.refusals("a config"):
        raise AssertionError("layers must be positive")
    [problem] = caught.value.problems
    assert problem.asked == "a config"
    assert "refuses it: layers must be positive" in problem.found


RUN = """
import lightning.pytorch as L
from lightning_dcp import DCPStrategy, MegatronGPT
from tests.megatron import runs
from tests.support.training import loader

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", devices=1, strategy=DCPStrategy(), max_steps=1, precision="64-true", **quiet)
trainer.fit(MegatronGPT({**runs.DENSE, "num_layers": 1}, 24), loader((5, 3), 2, "packed"))
"""


def test_a_run_prints_nothing_about_packages_and_defaults() -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "Context parallelism: dynamic" in printed
    lines = [
        line for line in printed.splitlines() if "megatron" in line.lower() or "DEPRECATED" in line or "Apex" in line
    ]
    assert lines == []
