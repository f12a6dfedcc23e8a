"""What is measured: steps whose every rank does the same, over lengths, CP sizes and kinds of packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dcp.errors import Problem
from lightning_dcp.schedule.plan import Pack, StepPlan, divisors

_PIECES = (4, 16)
"""Into how many samples a pack's tokens are cut, beside the pack of one sample."""
_SHORTEST_PIECE = 8
_POINTS_IN_A_ROW = 2
"""For how many lengths of each CP size two packs in a row are measured: they tell a pack's overhead from a step's."""


@dataclass(frozen=True)
class GridPoint:
    """A step in which every group of the plane runs the same packs, so that the machine is as busy as in training.

    Attributes:
        cp_size: ranks of each group.
        samples: tokens of each sample of one pack.
        packs: such packs that each group runs in a row.
    """

    cp_size: int
    samples: tuple[int, ...]
    packs: int = 1

    def lengths(self, ranks: int) -> tuple[int, ...]:
        """Tokens of each sample of the step's batch, on a plane of this many ranks."""
        return self.samples * (self.packs * (ranks // self.cp_size))

    def plan(self, ranks: int, max_seqlen_per_dp_cp_rank: int, layout: str) -> StepPlan:
        """The step's plan.

        Raises:
            PlanError: a pack that does not fit.
        """
        groups, count = ranks // self.cp_size, len(self.samples)
        rounds = [
            tuple(
                Pack(
                    group * self.cp_size,
                    self.cp_size,
                    tuple(range((number * groups + group) * count, (number * groups + group + 1) * count)),
                    layout,
                )
                for group in range(groups)
            )
            for number in range(self.packs)
        ]
        plan = StepPlan(ranks, max_seqlen_per_dp_cp_rank, self.lengths(ranks), tuple(rounds))
        plan.validate()
        return plan

    def __str__(self) -> str:
        count = len(self.samples)
        text = f"{count} x {self.samples[0]}" if count > 1 else f"{self.samples[0]}"
        return text if self.packs == 1 else f"{text}, {self.packs} packs"


def default_lengths(ranks: int, max_seqlen_per_dp_cp_rank: int) -> tuple[int, ...]:
    """Powers of two times a sixteenth of a rank's limit, up to that limit; then what fills groups of every size."""
    parts = [max(1, max_seqlen_per_dp_cp_rank // share) for share in (16, 8, 4, 2)]
    return tuple(sorted({*parts, *(c * max_seqlen_per_dp_cp_rank for c in divisors(ranks))}))


def grid(lengths: Sequence[int], ranks: int, max_seqlen_per_dp_cp_rank: int) -> tuple[GridPoint, ...]:
    """The points for these total lengths of packs, at every CP size on which they fit.

    One sample, 4 and 16 short ones with as many tokens together (which tells the cost of tokens from that of
    attention), and, for the shortest lengths, two packs in a row. The first point has CP size 1.

    Args:
        lengths: tokens of a pack; see :func:`length_problems`.
        ranks: size of the plane.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold.
    """
    points: list[GridPoint] = []
    for cp_size in divisors(ranks):
        fitting = [n for n in sorted(set(lengths)) if cp_size <= n <= cp_size * max_seqlen_per_dp_cp_rank]
        for number, tokens in enumerate(fitting):
            points.append(GridPoint(cp_size, (tokens,)))
            if number < _POINTS_IN_A_ROW:
                points.append(GridPoint(cp_size, (tokens,), packs=2))
            shorter = [(tokens // pieces, pieces) for pieces in _PIECES]
            points += [GridPoint(cp_size, (n,) * pieces) for n, pieces in shorter if n >= _SHORTEST_PIECE * cp_size]
    return tuple(points)


def by_lengths(
    points: Sequence[GridPoint], ranks: int, max_seqlen_per_dp_cp_rank: int, layout: str
) -> dict[tuple[int, ...], tuple[GridPoint, StepPlan]]:
    """Each point with its plan, by the lengths of its batch, which is all that a scheduler is told.

    Where two points have the same batch, the samples of the second are a token shorter.
    """
    found: dict[tuple[int, ...], tuple[GridPoint, StepPlan]] = {}
    for point in points:
        while (lengths := point.lengths(ranks)) in found:
            point = replace(point, samples=tuple(n - 1 for n in point.samples))
        if min(point.samples) >= 1:
            found[lengths] = point, point.plan(ranks, max_seqlen_per_dp_cp_rank, layout)
    return found


@dataclass(frozen=True)
class PlannedSteps:
    """A scheduler that knows a plan for certain batches only.

    Attributes:
        plans: the plan of each batch, by its lengths.
    """

    plans: Mapping[tuple[int, ...], StepPlan]

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """The plan that was made for these lengths."""
        return self.plans[tuple(lengths)]


def length_problems(lengths: Sequence[int], ranks: int, max_seqlen_per_dp_cp_rank: int) -> list[Problem]:
    """What is wrong with the lengths that a user asks to measure."""
    most = ranks * max_seqlen_per_dp_cp_rank
    plane = f"a plane of {ranks} rank(s) with max_seqlen_per_dp_cp_rank={max_seqlen_per_dp_cp_rank}"
    found = []
    wrong = [n for n in lengths if not isinstance(n, int) or isinstance(n, bool) or n < 1]
    if wrong:
        found.append(Problem(f"lengths {wrong}", "not positive whole numbers", "give tokens of a pack, such as 512"))
    long = [n for n in lengths if n not in wrong and n > most]
    if long:
        found.append(Problem(f"lengths {long}", f"{plane}, which holds {most} tokens", f"give lengths up to {most}"))
    if not wrong and len(set(lengths)) < 2:
        remedy = "give two different lengths or more: one cannot tell a pack's overhead from its tokens' cost"
        found.append(Problem(f"lengths {list(lengths)}", f"{len(set(lengths))} different length(s)", remedy))
    elif not wrong and min(lengths, default=0) > max_seqlen_per_dp_cp_rank:
        remedy = f"add a length of at most {max_seqlen_per_dp_cp_rank}, so that one rank alone can be measured"
        found.append(Problem(f"lengths {list(lengths)}", f"{plane}: none fits on one rank", remedy))
    return found
