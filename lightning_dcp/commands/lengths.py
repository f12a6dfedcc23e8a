"""Batches of sample lengths to plan: drawn from a file or a named distribution, or as a data module makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.distributions import DISTRIBUTIONS, clip_lengths, draw_lengths, read_lengths

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class LengthBatches:
    """Lengths of several batches.

    Attributes:
        batches: tokens of each sample, a tuple a batch.
        source: where they come from, for titles.
    """

    batches: tuple[Lengths, ...]
    source: str

    @property
    def longest(self) -> int:
        """Tokens of the longest sample of all."""
        return max(max(batch) for batch in self.batches)

    @property
    def tokens(self) -> float:
        """Tokens a batch, the mean."""
        return sum(map(sum, self.batches)) / len(self.batches)

    @property
    def samples(self) -> str:
        """Samples a batch: a number, or the fewest and the most."""
        counts = {len(batch) for batch in self.batches}
        return f"{min(counts):,}" if len(counts) == 1 else f"{min(counts):,} to {max(counts):,}"


@dataclass(frozen=True)
class LengthSource:
    """Where lengths come from, and how many of them make a batch.

    Attributes:
        lengths: a file, or the name of a distribution.
        data: instead, the YAML file of a Lightning data module.
        field: of JSON lines, what holds the length (or the list of tokens).
        batch_size: samples a batch over all ranks. ``None``: ``default_batch_size``, or what the data module makes.
        default_batch_size: for lengths from elsewhere than a data module.
        batches: how many batches.
        seed: of the draws.
        longest: samples are cut to this many tokens; ``None``: none is.
    """

    lengths: str | None
    data: str | None
    field: str | None
    batch_size: int | None
    default_batch_size: int
    batches: int
    seed: int
    longest: int | None

    def problems(self) -> list[Problem]:
        """What is wrong, before anything is read."""
        problems = []
        if (self.lengths is None) == (self.data is None):
            found = "neither" if self.lengths is None else "both"
            names = ", ".join(DISTRIBUTIONS)
            remedy = f"give --lengths (a file, or one of {names}) or --data (a data module's YAML), not both"
            problems.append(Problem("lengths to plan", f"{found} of --lengths and --data", remedy))
        if self.field is not None and (self.lengths is None or self.lengths in DISTRIBUTIONS):
            problems.append(
                Problem(f"--field {self.field}", "no file of JSON lines", "use it with --lengths FILE.jsonl")
            )
        for name, value in (("batch-size", self.batch_size), ("batches", self.batches), ("longest", self.longest)):
            if value is not None and value < 1:
                problems.append(Problem(f"--{name} {value}", "a number below 1", "give at least 1"))
        if self.seed < 0:
            problems.append(Problem(f"--seed {self.seed}", "a negative number", "give 0 or more"))
        return problems

    def read(self) -> LengthBatches:
        """All batches.

        Raises:
            ConfigurationError: the file or data module cannot be read.
            DataError: what is in it is not usable.
        """
        if self.data is not None:
            return self._from_data_module(self.data)
        size = self.default_batch_size if self.batch_size is None else self.batch_size
        source = str(self.lengths)
        if source in DISTRIBUTIONS:
            drawn = draw_lengths(source, size * self.batches, self.seed, longest=self.longest)
            return LengthBatches(_chunks(drawn, size), source)
        pool = clip_lengths(read_lengths(source, self.field), self.longest)
        return LengthBatches(draw_batches(pool, size, self.batches, self.seed), source)

    def _from_data_module(self, path: str) -> LengthBatches:
        from lightning_dcp.commands.data_module import batches_of, build_data_module

        count = self.batches
        module = build_data_module(path)
        read = [tuple(clip_lengths(batch, self.longest)) for batch in batches_of(module, count, self.batch_size)]
        if self.batch_size is not None:
            pool = [length for batch in read for length in batch]
            return LengthBatches(draw_batches(pool, self.batch_size, count, self.seed), path)
        return LengthBatches(tuple(read), path)


def draw_batches(pool: Sequence[int], batch_size: int, batches: int, seed: int) -> tuple[Lengths, ...]:
    """Random batches, as a shuffling loader makes them: nothing twice before all were drawn; the rest is left out.

    Args:
        pool: the lengths there are. If they are fewer than a batch holds, all of them are the one batch.
        batch_size: samples a batch.
        batches: how many batches.
        seed: of the shuffles.
    """
    if len(pool) <= batch_size:
        return (tuple(pool),)
    random = np.random.default_rng(seed)
    drawn: list[Lengths] = []
    while len(drawn) < batches:
        shuffled = [pool[i] for i in random.permutation(len(pool))]
        drawn.extend(_chunks(shuffled[: len(pool) // batch_size * batch_size], batch_size))
    return tuple(drawn[:batches])


def _chunks(lengths: Sequence[int], size: int) -> tuple[Lengths, ...]:
    return tuple(tuple(lengths[i : i + size]) for i in range(0, len(lengths), size))


def check_longest(
    batches: Sequence[Lengths], largest_group: int, max_seqlen_per_dp_cp_rank: int, *, group: str, larger: str
) -> None:
    """Refuse samples that no allowed group can hold, naming how many there are and what to do.

    Args:
        batches: lengths.
        largest_group: its ranks.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold.
        group: what the largest group is, for the message.
        larger: how to have larger groups, for the message.

    Raises:
        ConfigurationError: there are such samples.
    """
    room = largest_group * max_seqlen_per_dp_cp_rank
    over = [length for batch in batches for length in batch if length > room]
    if over:
        total = sum(map(len, batches))
        limit = -(-max(over) // largest_group)
        found = (
            f"{len(over):,} of {total:,} samples longer than the {room:,} tokens that {group} of "
            f"{largest_group} rank(s) holds at {max_seqlen_per_dp_cp_rank:,} tokens a rank; the longest has {max(over):,}"
        )
        remedy = f"cut them (--longest {room}), raise --max-seqlen-per-dp-cp-rank (to {limit}), or {larger}"
        raise ConfigurationError([Problem("a plan of these lengths", found, remedy)])
