"""How a run's attention is computed, whatever the layers ask for."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.attention.engine import ChooseScheme


@dataclass(frozen=True)
class AttentionOptions:
    """What the user, not the model, decides of attention.

    Attributes:
        scheme: an exchange scheme's name, or what chooses one for each call.
        kernel: a kernel's name; ``auto`` takes the fastest for device and dtype.
    """

    scheme: str | ChooseScheme = "ring"
    kernel: str = "auto"


DEFAULT = AttentionOptions()
"""For whoever says nothing."""
