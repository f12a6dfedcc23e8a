"""Megatron-Core's random states, seeded for each call: a pack's dropout follows from the pack, not from what ran before."""

from __future__ import annotations


def seed_states(seed: int) -> None:
    """Seed this rank's generator and the states that Megatron-Core switches to, from a call's seed.

    The ranks of a tensor-parallel group draw the same outside split layers and not the same inside them; those of a CP group
    have other seeds, as they hold other tokens. Nothing of it needs to be in a checkpoint.

    Args:
        seed: the call's, the same on all tensor-parallel ranks.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed)
