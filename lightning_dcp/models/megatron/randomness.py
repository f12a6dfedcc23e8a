"""Megatron-Core's random states, seeded for each call: a pack's dropout follows from the pack, not from what ran before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_dcp.parallel.randomness import seeded

_STAGE_APART = 100
"""What Megatron-LM puts between the seeds of two stages."""


def seed_states(seed: int) -> None:
    """Seed this rank's generator and the states that Megatron-Core switches to, from a call's seed.

    The ranks of a tensor-parallel group draw the same outside split layers and not the same inside them; those of a CP group
    have other seeds, as they hold other tokens. Nothing of it needs to be in a checkpoint.

    Args:
        seed: the call's, the same on all tensor-parallel ranks.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)


@contextmanager
def first_states(device_type: str) -> Iterator[None]:
    """Around the making of a model: states for its first weights, from the first rank's stream.

    Weights that ranks share come out the same, parts of split ones and stages do not. Collective over the world; each model
    takes one number from every rank's stream, so that two models have other weights.
    """
    from megatron.core import parallel_state

    drawn = torch.randint(2**31, ())
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, torch.cuda.current_device())
    seed = drawn.to(device)
    dist.broadcast(seed, 0)
    own = int(seed) + _STAGE_APART * parallel_state.get_pipeline_model_parallel_rank()
    with seeded(own, device):
        seed_states(own)
        yield
