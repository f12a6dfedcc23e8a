"""The schedulers that Megatron-Core ships, as schedulers of this package."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_dcp.errors import PlanError, Problem, raise_problems
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.plan import MicroBatch, Pack, StepPlan, check_lengths, in_rounds

DEFAULT_DYNAMIC = "DefaultDynamicCPScheduler"
BALANCED = "BalancedCPScheduler"
_MODULES = {
    DEFAULT_DYNAMIC: "megatron.core.datasets.data_schedule",
    BALANCED: "megatron.core.pipeline_parallel.hybrid_cp_schedule",
}
"""Where each is found; the first that the installed Megatron-Core has is used."""

Round = Sequence[Sequence[int]]
"""What Megatron-Core calls a group: for each rank of the plane, its samples in order, before the next barrier."""


def available_megatron_scheduler() -> str | None:
    """The scheduler of the installed Megatron-Core, by its class name; ``None`` if it has none.

    ``DefaultDynamicCPScheduler`` comes with builds of its dev branch, ``BalancedCPScheduler`` with releases 0.16 to
    0.19. Imports Megatron-Core, which takes seconds the first time.
    """
    return next((name for name in _MODULES if _find(name) is not None), None)


def megatron_problems(ranks: int) -> list[Problem]:
    """What stands against Megatron-Core's schedulers on a plane of this many ranks; does not import Megatron-Core."""
    if ranks >= 1 and ranks & (ranks - 1) == 0:
        return []
    found = f"a DPxCP plane of {ranks} ranks; it plans well-formed groups for powers of two only"
    return [Problem("Megatron-Core's scheduler", found, _REMEDY)]


@dataclass(frozen=True)
class MegatronScheduler:
    """Plans by the scheduler of the installed Megatron-Core, checked and turned into plans that run here.

    It weighs a sample by length^2 / cp_size, knows no other cost, and works in rounds: its ranks meet at a barrier
    after each. A round is taken over as it is, but for three things:

    * ``BalancedCPScheduler`` hands over samples that run one by one. Here those of the same ranks are packed, in its
      order, up to the token limit; ranks with more than fit run several packs after each other.
    * A rank whose samples of one round belong to groups of different sizes runs them as packs after each other.
    * Groups that do not start at a multiple of their size (rare) change places with others of their round. All ranks
      are alike, so this costs nothing.

    The plan is for lock-step if that leaves every rank with a pack in every micro-batch, and for free-running ranks
    otherwise. With ``DefaultDynamicCPScheduler`` it is for lock-step.

    Attributes:
        ranks: size of the plane, a power of two: for others Megatron-Core plans groups that cannot be formed.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
        layout: layout of every pack.
        alignment: the padding that samples and packs get, which counts as tokens; Megatron-Core's scheduler knows only the
            limit that it leaves.

    Raises:
        ConfigurationError: another plane, a limit below the alignment, or a Megatron-Core without a scheduler; all at once.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    layout: str = "zigzag"
    alignment: Alignment = NO_ALIGNMENT

    def __post_init__(self) -> None:
        problems = megatron_problems(self.ranks) + self.alignment.problems(self.max_seqlen_per_dp_cp_rank)
        if available_megatron_scheduler() is None:
            found = "an installed Megatron-Core with neither of " + ", ".join(f"{m}.{n}" for n, m in _MODULES.items())
            problems.append(Problem("Megatron-Core's scheduler", found, _REMEDY))
        raise_problems(problems)

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch.

        Raises:
            PlanError: an empty batch or sample; or Megatron-Core's scheduler fails, or hands over what cannot run:
                samples left out or planned twice, groups that cannot be formed, too many tokens.
            SampleTooLongError: a sample over ``ranks * max_seqlen_per_dp_cp_rank`` tokens.
        """
        lengths = check_lengths(lengths, self.ranks, self._limit)
        rounds = [in_rounds(packs, self.ranks) for packs in self.rounds(lengths)]
        as_given = tuple(microbatch for part in rounds for microbatch in part)
        closed_up = in_rounds([pack for microbatch in as_given for pack in microbatch], self.ranks)
        limit, all_lengths = self.max_seqlen_per_dp_cp_rank, tuple(lengths)
        for microbatches in (as_given, closed_up):
            if all(sum(pack.cp_size for pack in microbatch) == self.ranks for microbatch in microbatches):
                return StepPlan(self.ranks, limit, all_lengths, microbatches, "lockstep", alignment=self.alignment)
        return StepPlan(self.ranks, limit, all_lengths, closed_up, "free", alignment=self.alignment)

    @property
    def _limit(self) -> int:
        return self.alignment.limit(self.max_seqlen_per_dp_cp_rank)

    def rounds(self, lengths: Sequence[int]) -> list[list[Pack]]:
        """The packs of each of Megatron-Core's rounds; Megatron-Core itself has a barrier after each.

        Raises:
            PlanError: as :meth:`schedule`.
            SampleTooLongError: as :meth:`schedule`.
        """
        check_lengths(lengths, self.ranks, self._limit)
        name = available_megatron_scheduler() or BALANCED
        rounds = self._ask(name, lengths)
        try:
            packs = [self._packs(number, samples, lengths) for number, samples in enumerate(rounds)]
            self._check([pack for part in packs for pack in part], lengths)
        except PlanError as error:
            raise PlanError(f"Megatron-Core's {name} handed over a plan that cannot run: {error}; {_REMEDY}") from None
        return packs

    def _ask(self, name: str, lengths: Sequence[int]) -> Sequence[Round]:
        """Megatron-Core's answer, one round after the other."""
        scheduler, limit = _find(name), self._limit
        samples = [(sample, int(length)) for sample, length in enumerate(lengths)]
        try:
            if name == DEFAULT_DYNAMIC:
                return scheduler(limit, 1, self.ranks, None).get_groups_and_subsamples(samples)
            return scheduler(limit, _Plane(self.ranks)).get_groups_and_subsamples(samples, None)[1]
        except Exception as error:
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            raise PlanError(
                f"Megatron-Core's {name} failed on {len(lengths)} sample(s) for {self.ranks} ranks ({told}); {_REMEDY}"
            ) from error

    def _packs(self, number: int, samples: Round, lengths: Sequence[int]) -> list[Pack]:
        """The packs of one round."""
        if len(samples) != self.ranks:
            raise PlanError(f"round {number} is for {len(samples)} ranks of {self.ranks}")
        ranks_of: dict[int, list[int]] = {}
        for rank, own in enumerate(samples):
            for sample in own:
                ranks_of.setdefault(sample, []).append(rank)
        unknown = sorted(set(ranks_of) - set(range(len(lengths))))
        if unknown:
            raise PlanError(f"round {number} has sample(s) {unknown[:10]}, of a batch of {len(lengths)}")
        shares: dict[tuple[int, ...], list[int]] = {}
        for sample, own_ranks in ranks_of.items():
            shares.setdefault(tuple(own_ranks), []).append(sample)
        for ranks in shares:
            if ranks != tuple(range(ranks[0], ranks[0] + len(ranks))):
                raise PlanError(f"round {number} has a group of ranks {list(ranks)}, which are not consecutive")
        blocks = _aligned([(ranks[0], len(ranks)) for ranks in shares])
        return [
            Pack(first, c, tuple(sorted(pack)), self.layout)
            for (first, c), share in zip(blocks, shares.values(), strict=True)
            for pack in _in_order(share, self._padded(lengths, c), c * self._limit)
        ]

    def _padded(self, lengths: Sequence[int], c: int) -> Sequence[int]:
        return [self.alignment.padded(int(length), c) for length in lengths] if self.alignment else lengths

    def _check(self, packs: Sequence[Pack], lengths: Sequence[int]) -> None:
        """Every rule that holds whatever the mode: samples, groups, limit."""
        microbatches: tuple[MicroBatch, ...] = tuple((pack,) for pack in packs)
        limit, own = self.max_seqlen_per_dp_cp_rank, self.alignment
        StepPlan(self.ranks, limit, tuple(lengths), microbatches, alignment=own).validate()


_REMEDY = 'use scheduler="dynamic" (DynamicScheduler), which plans any plane'


@dataclass(frozen=True)
class _Plane:
    """All that Megatron-Core's scheduler asks of a process group."""

    ranks: int

    def size(self) -> int:
        return self.ranks


def _find(name: str) -> Any:
    """A scheduler class of the installed Megatron-Core, or ``None``."""
    if (known := sys.modules.get(_MODULES[name])) is not None:
        return getattr(known, name, None)  # without touching the filters of warnings, which all threads share
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core reports each accelerator package that is not installed
        try:
            return getattr(importlib.import_module(_MODULES[name]), name, None)
        except ImportError:
            return None


def _aligned(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Blocks (first_rank, cp_size) of one round, moved if they are disjoint and one is not at a multiple of its size.

    Largest first, sizes that are powers of two come to lie at multiples of themselves.
    """
    ranks = [rank for first, c in blocks for rank in range(first, first + c)]
    if all(first % c == 0 for first, c in blocks) or len(ranks) != len(set(ranks)):
        return list(blocks)
    moved, start = list(blocks), 0
    for i in sorted(range(len(blocks)), key=lambda i: -blocks[i][1]):
        moved[i] = (start, blocks[i][1])
        start += blocks[i][1]
    return moved


def _in_order(samples: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs of at most ``capacity`` tokens; a sample that does not fit starts the next."""
    packs: list[list[int]] = [[]]
    tokens = 0
    for sample in samples:
        if packs[-1] and tokens + lengths[sample] > capacity:
            packs.append([])
            tokens = 0
        packs[-1].append(sample)
        tokens += lengths[sample]
    return packs
