"""Whether a Megatron-Core model goes with the trainer's precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lightning_dcp.errors import Problem
from lightning_dcp.models.megatron.model import MegatronModel, megatron_models


def precision_problems(module: nn.Module, precision: str | int, device: torch.device) -> list[Problem]:
    """What is wrong with the dtypes of a module's Megatron-Core models, once the precision plugin has converted them.

    Args:
        module: the LightningModule.
        precision: the trainer's.
        device: where the run is.
    """
    models = megatron_models(module)
    mixed = str(precision).endswith("-mixed")
    problems = []
    if models and mixed and device.type == "cpu":
        found = "CPU ranks, and layers of Megatron-Core whose autocast is CUDA's alone"
        problems.append(Problem(f"precision={precision!r}", found, "use bf16-true or 32-true"))
    for name, model in models.items():
        problems += _stage_problems(name, model, precision)
    return problems


def _stage_problems(name: str, model: MegatronModel, precision: str | int) -> Iterator[Problem]:
    """What stages hand on must be of the dtype that the next one makes room for."""
    wanted = model.config.pipeline_dtype
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), wanted)
    if model.config.pipeline_model_parallel_size > 1 and weights != wanted:
        found = f"pipeline_dtype={wanted} in the config of {name!r}, whose weights are {weights}"
        remedy = f"set params_dtype and pipeline_dtype to {weights}"
        yield Problem(f"precision={precision!r}", found, remedy)
