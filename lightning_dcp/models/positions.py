"""How a model is told where each token lies in its own sample: a shard does not start at position 0."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from lightning_dcp.models.compiled import uncompiled

POSITIONS = "position_ids"
"""The argument's usual name, ``[1, T]``: Hugging Face, Megatron-Core."""

_SHAPES = {POSITIONS: 2, "positions": 2, "input_pos": 1}
"""Names of the argument, the first that a model has, and its dimensions: torchtitan says ``positions``, ``[1, T]``; litgpt
and gpt-fast say ``input_pos``, ``[T]``."""

ADVICE = (
    f"add `{POSITIONS}=None` ([1, T]) to forward and use it for rotary or learned positions (or accept and ignore it if the "
    "model has none)"
)
"""What to do for a model without the argument."""


def positions_argument(module: nn.Module) -> str | None:
    """The argument of a module's forward that takes positions; None if there is none."""
    try:
        parameters = inspect.signature(uncompiled(module).forward).parameters
    except (TypeError, ValueError):  # a forward that is not written in Python
        return None
    return next((name for name in _SHAPES if name in parameters), None)


def shaped_positions(name: str, positions: Tensor) -> Tensor:
    """Positions ``[1, T]`` in the shape that the argument of this name has."""
    return positions.reshape(-1) if _SHAPES[name] == 1 else positions
