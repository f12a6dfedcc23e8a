"""Planning for free-running ranks: only the time of the whole step counts."""

from __future__ import annotations

from lightning_dcp.schedule.fit import fit_search
from lightning_dcp.schedule.placement import Placement, even_out, place
from lightning_dcp.schedule.workload import Sizes, Workload

ENOUGH = 1.004
"""A step that takes at most so many times the lower bound is not worth another try."""
EVEN, EVEN_OF_FEW = 1.002, 1.0005
"""A step that takes at most so many times the lower bound is not worth moving another sample; with few samples that is
cheap."""
PROMISING = 1.01
"""A placement is worth evening out if it takes at most so many times the best one."""
SHARES_OF_STEP = (1.0, 1.02, 1.05, 0.6, 1.1, 0.35, 1.2)
"""How much of the lower bound one sample may take before it is cut further. Smaller pieces share out more evenly; a bit
more than the bound helps where the next larger size wastes much."""
WORK = 30_000
"""Most samples that all tries together may place: large batches share out evenly anyway."""
FEW = 1024
"""Samples times ranks up to which every pack's overhead is worth weighing (:mod:`lightning_dcp.schedule.fit`)."""
CUTS = 64
"""How often a sample of the slowest rank is cut further."""


def plan_free(load: Workload, bound: float) -> Placement:
    """A placement by which all ranks are done at about the same time.

    1. Each sample gets the smallest size that keeps its own time within the lower bound, or within a share of it.
    2. Largest groups first, longest sample first, each goes to the aligned block that is done earliest.
    3. Samples are moved and swapped between the slowest rank and the least busy ones.
    4. As long as that is not good enough, the longest sample of the slowest rank is cut further.

    Args:
        load: the batch.
        bound: seconds that the step takes at least.
    """
    tries = max(WORK // len(load.lengths), 1)
    even = bound * (EVEN_OF_FEW if len(load.lengths) * load.ranks <= FEW else EVEN)
    tried: dict[bytes, tuple[Placement, Sizes]] = {}
    for share in SHARES_OF_STEP[:tries]:
        sizes = load.smallest_within(bound * share)
        if sizes.tobytes() not in tried:
            tried[sizes.tobytes()] = place(load, sizes), sizes
        if tried[sizes.tobytes()][0].step <= bound * ENOUGH:
            break
    ranked = sorted(tried.values(), key=lambda pair: pair[0].step)
    best, sizes = even_out(load, ranked[0][0], even), ranked[0][1]
    for placed, other in ranked[1 : 1 + tries // 32]:
        if best.step <= bound * ENOUGH:
            break
        evened = even_out(load, placed, even)
        if evened.step < best.step:
            best, sizes = evened, other
    best = _cut_further(load, best, sizes.copy(), bound, even, min(CUTS, tries // 8))
    if len(load.lengths) * load.ranks <= FEW and load.speeds is None and best.step > bound * ENOUGH:
        fitted = [fit_search(load, other, bound, best.step) for _, other in ranked[:3]]
        best = min([best, *filter(None, fitted)], key=lambda placement: placement.step)
    return best


def _cut_further(load: Workload, best: Placement, sizes: Sizes, bound: float, even: float, cuts: int) -> Placement:
    """Cut the longest sample of the slowest rank, again and again; the best placement seen."""
    last = best
    for _ in range(cuts):
        if best.step <= bound * ENOUGH:
            break
        sample = _longest_of_slowest(load, last)
        larger = [c for c in load.sizes if sizes[sample] < c <= load.lengths[sample]]
        if not larger:
            break
        sizes[sample] = larger[0]
        last = place(load, sizes)
        if last.step < best.step * PROMISING:
            last = even_out(load, last, even)
        best = min(best, last, key=lambda placement: placement.step)
    return best


def _longest_of_slowest(load: Workload, placed: Placement) -> int:
    """The sample that takes longest on the rank that is done last."""
    slowest = placed.ends.index(placed.step)
    own = [
        (load.share(c)[sample], -sample)
        for (first, c), samples in placed.blocks.items()
        if first <= slowest < first + c
        for sample in samples
    ]
    return -max(own)[1]
