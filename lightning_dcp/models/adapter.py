"""How a kind of model is called as a region. This one is for plain modules; others add what theirs need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_dcp.errors import Problem, RegionError
from lightning_dcp.models.call import RegionCall
from lightning_dcp.models.compiled import uncompiled
from lightning_dcp.models.mixing import mixing_layers
from lightning_dcp.models.positions import ADVICE, positions_argument
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment


class ModelAdapter:
    """A plain module: everything per-token goes in cut and comes out whole.

    Args:
        module: the region's module, compiled or not.

    Attributes:
        positions: the argument of its forward that takes positions.
        all_ones: whether its forward wants a mask of ones instead of none.
        first_position: the position of a sample's first token.
        dry_runs: whether calling it with made-up tokens tells what cannot run over a CP group.
        alignment: the padding that its back end needs.
    """

    all_ones = False
    first_position = 0
    dry_runs = True
    alignment: Alignment = NO_ALIGNMENT

    def __init__(self, module: nn.Module) -> None:
        self.module = uncompiled(module)
        positions = positions_argument(module)
        if positions is None:
            raise RegionError(
                f"{type(self.module).__name__}.forward has no argument for positions. A shard does not start at position 0, so "
                f"the model must be told where each token lies: {ADVICE}."
            )
        self.positions = positions

    @property
    def fuses_loss(self) -> bool:
        """Whether the module's loss is computed without logits."""
        return False

    def mixing(self) -> dict[str, nn.Module]:
        """Layers that mix tokens by other means than attention, by path."""
        return mixing_layers(self.module)

    def problems(self, name: str) -> Iterator[Problem]:
        """What else stands against running the module as the region of this name; known before it is on its device."""
        yield from ()

    def problems_on_device(
        self, name: str, forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[Problem]:
        """What only calling the module tells, once it is on its device.

        Args:
            name: of the region.
            forward_context: the precision plugin's context for a forward.
        """
        yield from ()

    def serving(self) -> AbstractContextManager[Any]:
        """Entered around each forward and backward: sends the model's attention our way."""
        return nullcontext()

    def call(self, call: RegionCall) -> Any:
        """Run one call; what its caller gets."""
        return call.gathered(call.run(all_ones=self.all_ones))
