"""Started by Lightning's own launcher, by torchrun, or from a notebook: the same numbers, and plain words otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankPool
from tests.support.script import LENGTHS
from tests.support.training import fit

ROOT = Path(__file__).parents[1]


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> dict[str, Any]:
    result = ranks.run(fit, 1, LENGTHS, 4, strategy=None, precision="32-true", module={"lr": 0.1})[0]
    weights = {name: p.flatten().tolist()[:5] for name, p in result["weights"].items()}
    return {"loss": result["logged"]["train_loss_step"], "weights": weights}


def check(out: Path, expected: dict[str, Any]) -> None:
    result = json.loads(out.read_text())
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert result["weights"].keys() == expected["weights"].keys()
    for name, values in expected["weights"].items():
        assert result["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("strategy", [pytest.param("dcp", marks=pytest.mark.slow), "object"])
def test_lightnings_own_launcher(tmp_path: Path, expected: dict[str, Any], strategy: str) -> None:
    done = run(sys.executable, "-m", "tests.support.script", strategy, "2", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "out", expected)


@pytest.mark.slow
def test_torchrun(tmp_path: Path, expected: dict[str, Any]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run(*launcher, "-m", "tests.support.script", "dcp", "2", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "out", expected)


def notebook(tmp_path: Path, strategy: str, devices: int) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(f"""
        import json, pathlib, warnings
        import torch
        warnings.simplefilter("ignore")
        import lightning_dcp
        from tests.support.script import train
        assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
        pathlib.Path({str(tmp_path / "out")!r}).write_text(json.dumps(train({strategy!r}, {devices})))
    """)
    return run(sys.executable, "-m", "IPython", "--no-banner", "--colors=NoColor", "-c", code)


@pytest.mark.slow
def test_one_device_in_ipython(tmp_path: Path, expected: dict[str, Any]) -> None:
    done = notebook(tmp_path, "dcp", 1)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(tmp_path / "out", expected)


@pytest.mark.slow
def test_several_devices_in_ipython_are_forked(tmp_path: Path, expected: dict[str, Any]) -> None:
    done = notebook(tmp_path, "dcp_notebook", 2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    check(tmp_path / "out", expected)


def test_several_devices_in_ipython_name_the_way_out(tmp_path: Path) -> None:
    done = notebook(tmp_path, "dcp", 2)
    assert "strategy='dcp_notebook'" in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


def test_a_killed_process_ends_the_run_with_its_name(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run(sys.executable, "-m", "tests.support.script", "object", "3", str(tmp_path / "out"), "kill")
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    assert "PeerFailureError: rank 1 failed: its process" in done.stderr
    assert "local rank 1 ended early (killed by SIGKILL)" in done.stderr
    assert not (tmp_path / "out").exists()
