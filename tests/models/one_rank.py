"""Regions of a module, found by themselves, with a pack under way on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_dcp.batch.view import view
from lightning_dcp.models.discovery import find_regions
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup


@contextmanager
def in_a_step(model: nn.Module, batch: Any, *, fused: bool = False, **options: Any) -> Iterator[None]:
    """Call a model inside as a step does.

    Args:
        model: a part of the module; its regions are found.
        batch: the pack's.
        fused: compute losses without logits.
        options: of the pack.
    """
    root, seen = nn.ModuleDict({"model": model}), view(batch)
    regions = find_regions(root, None, forward_overridden=False, fused_linear_cross_entropy=fused)
    context = make_context(CPGroup(None, (0,)), 0, seen.lengths)
    regions.install()
    try:
        with regions.active(ActivePack(seen, context, max_tokens=1000, **options)):
            yield
    finally:
        regions.remove()
