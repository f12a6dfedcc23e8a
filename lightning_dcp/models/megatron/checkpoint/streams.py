"""Random states of a rank: torch's, numpy's, Python's, and those that Megatron-Core switches to."""

from __future__ import annotations

import random
import warnings
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

States = dict[str, Any]


def random_states(device: torch.device) -> States:
    """This rank's random states, as tensors and numbers."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    kind, keys, position, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    states = {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "megatron": {
            k: v.clone() for k, v in get_cuda_rng_tracker().get_states().items() if isinstance(v, torch.Tensor)
        },
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def gathered(states: States, control: dist.ProcessGroup) -> list[States]:
    """Those of all ranks, on rank 0; elsewhere an empty list. Collective over the world."""
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(states, every, dst=0, group=control)
    return every or []


def own_states(every: list[States] | None) -> States | None:
    """This rank's part of a checkpoint's random states; None, with a warning, if there is none."""
    world = dist.get_world_size()
    if every is not None and len(every) == world:
        return every[dist.get_rank()]
    found = "no random states" if every is None else f"the random states of {len(every)} rank(s), and {world} run now"
    if dist.get_rank() == 0:
        warnings.warn(
            f"the checkpoint holds {found}: random numbers of the resumed run are other ones than those of a run that was "
            "not interrupted",
            stacklevel=2,
        )
    return None


def restore(states: States, device: torch.device) -> None:
    """Go on with a rank's random states; one that the checkpoint lacks stays as it is, with a warning."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    missing = {"python", "numpy", "torch", "megatron", *(["cuda"] if device.type == "cuda" else [])} - states.keys()
    if missing and dist.get_rank() == 0:
        warnings.warn(f"the checkpoint lacks random states of {', '.join(sorted(missing))}", stacklevel=2)
    if "python" in states:
        version, keys, gauss = states["python"]
        random.setstate((version, tuple(keys), gauss))
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "megatron" in states:
        tracker = get_cuda_rng_tracker()
        tracker.set_states(tracker.get_states() | states["megatron"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
