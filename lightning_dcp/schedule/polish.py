"""The last few percent of balance: samples moved or swapped between the slowest block and the least busy ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_dcp.schedule.workload import Workload

PARTNERS = 8
"""How many of the least busy blocks are looked at for each change."""
LEAST_GAIN = 1e-5
"""Part of a block's mean work that a change must save."""


def polish(
    load: Workload,
    c: int,
    ends: Sequence[float],
    held: list[list[int]],
    speeds: Sequence[float],
    *,
    good: float,
    changes: int,
    one_pack: bool = False,
) -> list[float]:
    """Move or swap samples between blocks of one size until no change makes the slowest block faster.

    Args:
        load: the batch.
        c: size of the blocks.
        ends: when each block is done, with what comes before these samples.
        held: samples of each block; changed in place.
        speeds: speed of each block.
        good: seconds of a step that need no further change.
        changes: most changes made.
        one_pack: whether a block must stay within one pack's tokens, and must not become empty.

    Returns:
        When each block is done now.
    """
    overhead, capacity = load.cost.pack_overhead, c * load.limit
    seconds = np.array([*load.share(c), 0.0])  # sample -1 is none: a move rather than a swap
    tokens = np.array([*load.padded(c), 0])
    speed = np.array(speeds)
    done = np.array(ends)
    counts = np.array([int(tokens[own].sum()) for own in held])
    work = np.array([math.fsum(seconds[own].tolist()) for own in held])

    def duration(block: Any, work: Any, counts: Any) -> Any:
        """Seconds of so much work and so many tokens on a block (or on several)."""
        return (work + overhead * -(-counts // capacity)) / speed[block]

    before = done - duration(slice(None), work, counts)
    least_gain = LEAST_GAIN * math.fsum(work.tolist()) / len(held)
    for _ in range(changes):
        slow = int(done.argmax())
        if done[slow] <= good or not held[slow]:
            break
        least = np.argsort(done, kind="stable")[:PARTNERS].tolist()
        pairs = [(block, sample) for block in least if block != slow for sample in (*held[block], -1)]
        if not pairs:
            break
        at, theirs = np.array([block for block, _ in pairs]), np.array([sample for _, sample in pairs])
        mine = np.array(held[slow])[:, None]
        moved, moved_tokens = seconds[mine] - seconds[theirs], tokens[mine] - tokens[theirs]
        own_counts, other_counts = counts[slow] - moved_tokens, counts[at] + moved_tokens
        own_end = before[slow] + duration(slow, work[slow] - moved, own_counts)
        other_end = before[at] + duration(at, work[at] + moved, other_counts)
        later = np.maximum(own_end, other_end)
        if one_pack:
            later = np.where((own_counts > capacity) | (other_counts > capacity) | (own_counts == 0), np.inf, later)
        i, j = divmod(int(later.argmin()), len(pairs))
        if later[i, j] > done[slow] - least_gain:
            break
        other, back = pairs[j]
        held[other].append(held[slow].pop(i))
        if back >= 0:
            held[other].remove(back)
            held[slow].append(back)
        work[slow], work[other] = work[slow] - moved[i, j], work[other] + moved[i, j]
        counts[slow], counts[other] = own_counts[i, j], other_counts[i, j]
        done[slow], done[other] = own_end[i, j], other_end[i, j]
    return done.tolist()
