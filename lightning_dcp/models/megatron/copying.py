"""Copies of a Megatron-Core model, as weight averaging makes them: weights of their own, the same groups."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def copied(model: Model, memo: dict[int, Any]) -> Model:
    """A deep copy that shares process groups and configs, which cannot be copied, and keeps marks on weights.

    Args:
        model: the model.
        memo: of ``copy.deepcopy``.
    """
    for layer in model.modules():
        for value in vars(layer).values():
            if isinstance(value, dist.ProcessGroup) or type(value).__module__.startswith("megatron.core"):
                memo[id(value)] = value
    made = type(model).__new__(type(model))
    memo[id(model)] = made
    vars(made).update(copy.deepcopy(vars(model), memo))
    for own, other in zip(model.parameters(), made.parameters(), strict=True):
        vars(other).update(vars(own))  # torch copies a parameter without what is marked on it
    return made
