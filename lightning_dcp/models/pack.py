"""The pack that regions work on while a step runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from lightning_dcp.attention.options import DEFAULT, AttentionOptions
from lightning_dcp.batch.view import BatchView
from lightning_dcp.parallel.context import CPContext, make_context


@dataclass(frozen=True)
class ActivePack:
    """The pack that regions work on while the user's step runs.

    Attributes:
        view: the user's batch, cut down to this pack's samples.
        context: group and layout of the pack.
        max_tokens: the most tokens that a rank may hold.
        seed: of the random numbers drawn inside regions, another one on each rank, as ranks hold different tokens.
        attention: how attention is computed.
        layout: name of the pack's layout, for calls about other sequences than the pack's.
        sharded: whether the step has this rank's tokens in its hands, so that regions neither cut nor gather.
        normalization: what the user's loss is over one batch, for models that compute losses; None if nobody says.
        targets: of the pack's samples, where the loss is a mean over targets; else None.
        whole_batch: whether the pack has all samples of the batch.
        count_batch_targets: counts the targets of the whole batch; gives None if it has no labels.
        batch_tokens: tokens of the whole batch, for losses inside the model that are means over tokens.
        batch_samples: samples of the whole batch.
        samples: which of these the pack's are.
        gradient_scale: factor of a gradient that does not come through the step's loss.
    """

    view: BatchView
    context: CPContext
    max_tokens: int
    seed: int = 0
    attention: AttentionOptions = DEFAULT
    layout: str = "zigzag"
    sharded: bool = False
    normalization: str | None = None
    targets: int | None = None
    whole_batch: bool = False
    count_batch_targets: Callable[[], int | None] = lambda: None
    batch_tokens: int = 1
    batch_samples: int = 1
    samples: tuple[int, ...] = ()
    gradient_scale: float = 1.0

    def context_of(self, lengths: tuple[int, ...]) -> CPContext:
        """The context of a call about sequences of these lengths; one and the same for equal lengths."""
        if lengths not in self._contexts:
            own = self.context
            self._contexts[lengths] = make_context(
                own.group,
                own.rank,
                lengths,
                layout=self.layout,
                device=own.device,
                exchange=own.exchange,
                token_multiple=own.token_multiple,
                alignment=own.alignment,
            )
        return self._contexts[lengths]

    @cached_property
    def _contexts(self) -> dict[tuple[int, ...], CPContext]:
        return {self.context.layout.lengths: self.context}
