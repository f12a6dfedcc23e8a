"""What was measured on, in words."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch
from lightning.pytorch import LightningModule

from lightning_dcp.strategy import DCPStrategy


def describe_machine(strategy: DCPStrategy) -> str:
    """The processor or accelerator, and how many ranks share it."""
    ranks = f"{strategy.topology.world_size} rank(s)"
    if strategy.root_device.type == "cuda":
        return f"{torch.cuda.get_device_name(strategy.root_device)}, {ranks}, torch {torch.__version__}"
    cores = torch.get_num_threads()
    return f"{_processor()}, {ranks} of {cores} thread(s), torch {torch.__version__}"


def describe_model(model: LightningModule) -> str:
    """The module's class, its parts' classes, and its size."""
    parts = ", ".join(type(part).__name__ for part in model.children() if any(True for _ in part.parameters()))
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}({parts}), {count:,} parameters"


def _processor() -> str:
    """The processor's name and how many of them the system has."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = names[0].strip() if names else platform.processor() or platform.machine()
    return f"{len(names)} x {name}" if names else name
