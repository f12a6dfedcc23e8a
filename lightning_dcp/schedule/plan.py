"""The plan of one step: packs of samples, on aligned groups of ranks, in rounds called micro-batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import numpy as np

from lightning_dcp.errors import PlanError, SampleTooLongError
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment

Mode = Literal["free", "lockstep"]


@dataclass(frozen=True)
class Pack:
    """Samples that one CP group handles together as one THD sequence.

    Attributes:
        first_rank: the group's first rank in the plane.
        cp_size: ranks of the group, c; the group is ``first_rank .. first_rank + c - 1``.
        samples: indices into the batch, ascending: a pack keeps the batch's order.
        layout: how the tokens lie on the ranks of the group.
    """

    first_rank: int
    cp_size: int
    samples: tuple[int, ...]
    layout: str = "zigzag"

    @property
    def ranks(self) -> range:
        """The ranks of the plane that this pack runs on."""
        return range(self.first_rank, self.first_rank + self.cp_size)

    def tokens(self, lengths: Sequence[int]) -> int:
        """Tokens of all its samples."""
        return sum(lengths[s] for s in self.samples)

    def padded_lengths(self, lengths: Sequence[int], alignment: Alignment) -> tuple[int, ...]:
        """Tokens of each of its samples with padding."""
        return alignment.padded_lengths([lengths[s] for s in self.samples], self.cp_size)


MicroBatch = tuple[Pack, ...]
"""One round of packs, at most one a rank."""


_ENTRIES = ("ranks", "max_seqlen_per_dp_cp_rank", "mode", "lengths", "microbatches")
"""What decides a plan, as named in JSON."""


@dataclass(frozen=True)
class StepPlan:
    """What every rank of a plane does with one batch.

    Attributes:
        ranks: size of the plane, R.
        max_seqlen_per_dp_cp_rank: most tokens that a rank may hold of one micro-batch.
        lengths: tokens of each sample of the batch.
        microbatches: the rounds, in the order in which every rank runs its packs.
        mode: ``free`` (no barrier between micro-batches) or ``lockstep`` (no rank without a pack).
        extra: what is only reported, such as ``cost_model``, ``predicted_step_s``, ``lower_bound_s``.
        alignment: the padding that samples and packs get; ``lengths`` are without.
    """

    ranks: int
    max_seqlen_per_dp_cp_rank: int
    lengths: tuple[int, ...]
    microbatches: tuple[MicroBatch, ...]
    mode: Mode = "free"
    extra: dict[str, Any] = field(default_factory=dict, compare=False)
    alignment: Alignment = NO_ALIGNMENT

    def packs(self) -> Iterator[Pack]:
        """All packs, in order of execution."""
        for microbatch in self.microbatches:
            yield from microbatch

    def packs_of(self, rank: int) -> list[Pack]:
        """The packs that one rank of the plane takes part in, in order."""
        return [pack for pack in self.packs() if rank in pack.ranks]

    def validate(self) -> None:
        """Raise :class:`PlanError` unless the plan keeps all its rules.

        Each sample exactly once; groups aligned, of a size that divides the plane; at most one pack a rank in a
        micro-batch; no rank over its token limit, padding included; a known mode; in lock-step no rank without a pack.
        """
        if self.mode not in get_args(Mode):
            raise PlanError(f"unknown mode {self.mode!r}: use one of {list(get_args(Mode))}")
        for pack in self.packs():
            self._check_pack(pack)
        for number, microbatch in enumerate(self.microbatches):
            self._check_round(number, microbatch)
        seen = sorted(s for pack in self.packs() for s in pack.samples)
        if seen != list(range(len(self.lengths))):
            wrong = {s for s in range(len(self.lengths)) if seen.count(s) != 1}
            wrong |= set(seen) - set(range(len(self.lengths)))
            raise PlanError(f"every sample must be planned exactly once; not so for sample(s) {sorted(wrong)}")

    def _check_pack(self, pack: Pack) -> None:
        c = pack.cp_size
        if c < 1 or self.ranks % c:
            raise PlanError(f"{pack}: cp_size {c} does not divide the plane of {self.ranks} ranks")
        if pack.first_rank % c or not 0 <= pack.first_rank <= self.ranks - c:
            raise PlanError(f"{pack}: a group of {c} must start at a multiple of {c} below {self.ranks}")
        if not pack.samples or list(pack.samples) != sorted(set(pack.samples)):
            raise PlanError(f"{pack}: samples must be given, each once and ascending")
        if pack.samples[0] < 0 or pack.samples[-1] >= len(self.lengths):
            raise PlanError(f"{pack}: the batch has samples 0..{len(self.lengths) - 1}")
        tokens = sum(pack.padded_lengths(self.lengths, self.alignment))
        if tokens > c * self.max_seqlen_per_dp_cp_rank:
            padding = f", {self.padding(pack)} of them padding ({self.alignment})," if self.alignment else ""
            raise PlanError(
                f"{pack}: {tokens} tokens{padding} on {c} rank(s) exceed "
                f"max_seqlen_per_dp_cp_rank={self.max_seqlen_per_dp_cp_rank}"
            )

    def padding(self, pack: Pack) -> int:
        """Tokens of padding that one of its packs gets."""
        return sum(pack.padded_lengths(self.lengths, self.alignment)) - pack.tokens(self.lengths)

    def _check_round(self, number: int, microbatch: MicroBatch) -> None:
        busy = [rank for pack in microbatch for rank in pack.ranks]
        if len(busy) != len(set(busy)):
            raise PlanError(f"micro-batch {number}: a rank has more than one pack: {microbatch}")
        if self.mode == "lockstep" and len(busy) < self.ranks:
            idle = sorted(set(range(self.ranks)) - set(busy))
            raise PlanError(f"micro-batch {number}: rank(s) {idle} have no pack, which lock-step forbids")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-able values; :meth:`from_json` reads it back."""
        rounds = [
            [
                {"first_rank": p.first_rank, "cp_size": p.cp_size, "samples": list(p.samples), "layout": p.layout}
                for p in microbatch
            ]
            for microbatch in self.microbatches
        ]
        decisive: dict[str, Any] = {
            "ranks": self.ranks,
            "max_seqlen_per_dp_cp_rank": self.max_seqlen_per_dp_cp_rank,
            "mode": self.mode,
            "lengths": list(self.lengths),
            "microbatches": rounds,
        }
        if self.alignment:
            decisive["alignment"] = self.alignment.to_json()
        return decisive | {key: value for key, value in self.extra.items() if key not in decisive}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepPlan:
        """Read what :meth:`to_json` wrote, and validate it.

        Raises:
            PlanError: entries are missing, or the plan breaks a rule.
        """
        missing = [name for name in _ENTRIES if name not in data]
        if missing:
            raise PlanError(f"a plan needs {', '.join(_ENTRIES)}; not found: {', '.join(missing)}")
        rounds = tuple(
            tuple(Pack(p["first_rank"], p["cp_size"], tuple(p["samples"]), p["layout"]) for p in microbatch)
            for microbatch in data["microbatches"]
        )
        extra = {key: value for key, value in data.items() if key not in (*_ENTRIES, "alignment")}
        alignment = Alignment.from_json(data["alignment"]) if "alignment" in data else NO_ALIGNMENT
        limit = data["max_seqlen_per_dp_cp_rank"]
        plan = cls(data["ranks"], limit, tuple(data["lengths"]), rounds, data["mode"], extra, alignment)
        plan.validate()
        return plan

    def digest(self) -> int:
        """A 63-bit hash of everything that decides who does what; equal on ranks that hold the same plan."""
        text = json.dumps(replace(self, extra={}).to_json(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Scheduler(Protocol):
    """Turns the lengths of a batch into a plan; must depend on nothing but them and its own settings."""

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a batch; ``lengths`` in tokens, one a sample."""
        ...


def in_rounds(packs: Sequence[Pack], ranks: int) -> tuple[MicroBatch, ...]:
    """Arrange packs, given in order of execution, into the fewest rounds that keep each rank's order."""
    rounds: list[list[Pack]] = []
    next_round = [0] * ranks
    for pack in packs:
        own = max(next_round[rank] for rank in pack.ranks)
        if own == len(rounds):
            rounds.append([])
        rounds[own].append(pack)
        for rank in pack.ranks:
            next_round[rank] = own + 1
    return tuple(tuple(sorted(microbatch, key=lambda p: p.first_rank)) for microbatch in rounds)


@lru_cache
def divisors(ranks: int) -> tuple[int, ...]:
    """The CP sizes that a plane of this many ranks offers, ascending."""
    return tuple(c for c in range(1, ranks + 1) if ranks % c == 0)


def check_lengths(lengths: Sequence[int], largest_group: int, max_seqlen_per_dp_cp_rank: int) -> list[int]:
    """The lengths as plain integers.

    Raises:
        PlanError: an empty batch, or a sample whose length is not a whole number of at least one token.
        SampleTooLongError: a sample that does not fit on the largest group.
    """
    try:
        tokens = np.asarray(lengths)
    except ValueError:  # lists of unlike lengths
        tokens = np.asarray(None)
    if tokens.ndim == 1 and tokens.size == 0:
        raise PlanError("an empty batch cannot be planned")
    is_array = isinstance(lengths, np.ndarray)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not (is_array or bool not in set(map(type, lengths))):
        raise PlanError(f"{_odd_length(lengths)}: lengths are whole numbers of tokens, one a sample")
    if (short := tokens < 1).any():
        sample = int(short.argmax())
        raise PlanError(f"sample {sample} has {tokens[sample]} tokens: every sample needs at least one")
    if (long := tokens > largest_group * max_seqlen_per_dp_cp_rank).any():
        sample = int(long.argmax())
        raise SampleTooLongError(sample, int(tokens[sample]), largest_group, max_seqlen_per_dp_cp_rank)
    return tokens.tolist()


def _odd_length(lengths: Any) -> str:
    """The first length that is none, in words."""
    if isinstance(lengths, np.ndarray) and lengths.ndim == 1:
        lengths = lengths.tolist()
    one_by_one = lengths if isinstance(lengths, Sequence) and not isinstance(lengths, str) else ()
    for sample, length in enumerate(one_by_one):
        if isinstance(length, bool) or not isinstance(length, int | np.integer):
            return f"sample {sample} has length {length!r:.80}"
    return f"found {lengths!r:.80}"
