"""Layers of a region, by name."""

from __future__ import annotations

from torch import nn

from lightning_dcp.models.compiled import COMPILED_CHILD


def innermost_layer(error: BaseException, region: nn.Module) -> str:
    """The path of the innermost module whose code an error came through; empty for the region itself, or none of its."""
    paths = {id(module): path for path, module in region.named_modules()}
    traceback, found = error.__traceback__, ""
    while traceback is not None:
        found = paths.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def full_name(region: str, path: str) -> str:
    """The path of a region's layer in the LightningModule, without what ``torch.compile`` puts in between."""
    return ".".join(part for part in (*region.split("."), *path.split(".")) if part and part != COMPILED_CHILD)
