"""Each example runs as its docstring says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

COMMANDS = [
    "supervised.py --reduction samples",
    "dpo.py",
    "dpo.py --loss ipo --beta 0.3",
    "grpo.py",
    "grpo.py --normalization samples --kl_coefficient 0.04",
    "value_head.py",
    "value_head.py --kind critic",
    "value_head.py --kind reward",
    "distillation.py",
    "distillation.py --divergence reverse --temperature 2",
    "distillation.py --top_k 8",
]
QUICK = {"dpo.py"}


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow, id=c) for c in COMMANDS],
)
def test_examples_run(command: str, tmp_path: Path) -> None:
    name, *options = command.split()
    line = [sys.executable, str(EXAMPLES / name), "--devices", "2", "--steps", "3", *options]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^step (\d): .*\bloss (-?\d+\.\d+)", done.stdout, flags=re.MULTILINE)
    assert [step for step, _ in losses] == ["1", "2", "3"]
    assert len({loss for _, loss in losses}) == 3
    assert "CP 1: " in done.stdout and "CP 2: " in done.stdout


@pytest.mark.parametrize("name", ["supervised", "dpo", "grpo", "value_head", "distillation"])
def test_commands_of_the_docstring_are_tested(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    shown = re.findall(rf"python examples/({name}\.py) --devices 2(.*)", text)
    assert shown
    assert {f"{script}{options}" for script, options in shown} <= set(COMMANDS)
