"""What a training step sees: whole samples, or one rank's tokens; and how that is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_dcp.errors import BatchError

OutputsMode = Literal["gathered", "sharded", "auto"]


@dataclass
class OutputsChoice:
    """What steps see: whole samples (gathered), or one rank's tokens (sharded).

    Attributes:
        wanted: what the user asked for.
        tolerance: relative, of the gradient; the loss is compared by its own dtype.
        sharded: what is in force; None until a pack on several ranks has been tried both ways.
    """

    wanted: OutputsMode = "gathered"
    tolerance: float = 1e-4
    sharded: bool | None = None

    def __post_init__(self) -> None:
        if self.wanted == "gathered":
            self.sharded = False

    def settle_for_samples(self) -> None:
        """Decide for a mean over samples, which has no parts: nothing needs to be tried."""
        if self.wanted == "auto":
            self.sharded = False
            rank_zero_info("Outputs of training_step's regions are gathered: the loss is a mean over samples")

    def settle(self, verdicts: Sequence[str | None]) -> None:
        """Decide by what the ranks found in one batch: None for no trial, "" for agreement, else why not.

        Raises:
            BatchError: sharded outputs were asked for, and do not agree.
        """
        found = [verdict for verdict in verdicts if verdict is not None]
        if not found:
            return
        reasons = [verdict for verdict in found if verdict]
        self.sharded = not reasons
        if reasons and self.wanted == "sharded":
            raise BatchError(
                f"outputs='sharded': {reasons[0]}. Use batch['shift_labels'] as targets (labels cannot be shifted on a shard), "
                "losses that are means or sums over tokens, and log such values; or use outputs='gathered'"
            )
        chosen = "sharded: loss, logged values and gradient agree" if self.sharded else f"gathered: {reasons[0]}"
        rank_zero_info(f"Outputs of training_step's regions are {chosen}")


def gradient_tolerance(precision: object) -> float:
    """How much gradients may differ, as a share of their norm, at a precision of Lightning's: both ways compute the same
    forward inside regions, so only the rounding of gradients tells them apart.
    """
    exact = {"64-true": 1e-9, "32-true": 1e-4, "32": 1e-4, "64": 1e-9}
    return exact.get(str(precision), 2e-2)


GATHERED = OutputsChoice()
"""For steps that always see whole samples."""
