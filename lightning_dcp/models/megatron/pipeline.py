"""Micro-batches through the stages of a pipeline, by Megatron-Core's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_dcp.models.megatron.adapter import StageOutput
from lightning_dcp.models.megatron.cpu import use_cpu
from lightning_dcp.models.megatron.model import MegatronModel

Work = TypeVar("Work")


def run_schedule(
    model: MegatronModel, works: Sequence[Work], forward: Callable[[Work], Tensor], *, forward_only: bool
) -> None:
    """Run 1F1B, or the interleaved schedule with several chunks. Collective over the stages.

    Lengths vary from micro-batch to micro-batch: stages tell each other the shapes first
    (``TransformerConfig(variable_seq_lengths=True)``).

    Args:
        model: this rank's chunks.
        works: the micro-batches, as many on every rank.
        forward: runs one on the chunk under way. Before the last stage it ends with :class:`StageOutput`; there it returns the
            loss, scaled: nothing here scales it again.
        forward_only: run no backward.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if model.device_type == "cpu":
        use_cpu()
    chunks = list(model.chunks)

    def step(iterator: Iterator[Work], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        number = next(i for i, own in enumerate(chunks) if own is chunk)
        with model.running(number):
            try:
                return forward(next(iterator)), _as_it_is
            except StageOutput as end:
                return end.hidden, _as_it_is

    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(works) for _ in chunks] if several else iter(works),
        model=chunks if several else chunks[0],
        num_microbatches=len(works),
        seq_length=model.config.tensor_model_parallel_size,  # of no meaning: shapes are told
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _as_it_is(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A loss function with three values: with two, the schedule would divide the loss by the number of micro-batches."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}


class ZeroLoss(torch.autograd.Function):
    """A loss of 0 whose backward goes through a call's whole graph with gradients of zero.

    For packs without targets: their mean over nothing is NaN, but the other ranks meet theirs in the backward.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """0 from the call's output."""
        ctx.shape, ctx.options = output.shape, {"dtype": output.dtype, "device": output.device}
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros(ctx.shape, **ctx.options)
