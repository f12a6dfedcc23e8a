"""Functions that are differentiable once say so, instead of giving a gradient that counts as a constant."""

from __future__ import annotations

import torch

from lightning_dcp.errors import Problem, raise_problems


def refuse_create_graph() -> None:
    """Called first in a backward: whoever differentiates the gradient again would silently leave its graph out.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradient requires one, which that of a
    plain loss does not.

    Raises:
        ConfigurationError: the backward runs with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        found = "fused logits or a shared vocabulary, whose gradients are differentiable no further"
        remedy = "pass fused=False without tp_group, or drop create_graph=True"
        raise_problems([Problem("gradients of gradients (create_graph=True)", found, remedy)])
