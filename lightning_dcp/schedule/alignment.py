"""Padding that a back end needs: which multiples samples and packs must be of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.errors import PlanError, Problem

Tokens = TypeVar("Tokens", int, NDArray[np.int64])


@dataclass(frozen=True)
class Alignment:
    """Which multiples the tokens of samples and packs must be of; the rest is padding behind each sample.

    Without any, as by default, nothing is padded: chunks of a sample need not be of equal size.

    Attributes:
        sample: each sample is a multiple of this, on any number of ranks.
        cut: on c > 1 ranks each sample is a multiple of this times c, too; 0 for no such rule.
        rank: the tokens of each rank are a multiple of this: on c ranks a pack is one of this times c. What is missing
            lies behind its last sample. 1 for no such rule.
    """

    sample: int = 1
    cut: int = 0
    rank: int = 1

    def __post_init__(self) -> None:
        values = self.sample, self.cut, self.rank
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
        if not whole or min(self.sample, self.rank) < 1 or self.cut < 0:
            raise PlanError(
                f"{values} are no multiples: sample and rank are whole numbers of 1 or more, cut of 0 or more"
            )

    @classmethod
    def transformer_engine(cls, parts: int = 1) -> Alignment:
        """Transformer Engine's attention over c > 1 ranks takes samples in 2c equal chunks.

        Args:
            parts: tensor-parallel ranks among which sequence parallelism deals out each rank's tokens; else 1.
        """
        return cls(cut=2 * parts)

    @classmethod
    def fp8(cls, tensor_parallel: int = 1) -> Alignment:
        """Transformer Engine's FP8: each sample to lcm(16, 2 c TP), the pack to 128 x 2 c TP.

        So each part of the tokens that a matrix product sees is a multiple of 128, with sequence parallelism, too. The rule
        is that of verl (``preprocess_thd_engine(use_fp8_padding=True)``), which has no factor of 2 on one rank.

        Args:
            tensor_parallel: tensor-parallel ranks, TP.
        """
        return cls(sample=math.lcm(16, 2 * tensor_parallel), cut=2 * tensor_parallel, rank=128 * 2 * tensor_parallel)

    def __bool__(self) -> bool:
        """Whether anything is ever padded."""
        return (self.sample, self.cut, self.rank) != (1, 0, 1)

    def joined(self, other: Alignment) -> Alignment:
        """The alignment that keeps the rules of both."""
        cut = math.lcm(self.cut or 1, other.cut or 1) if self.cut or other.cut else 0
        return Alignment(math.lcm(self.sample, other.sample), cut, math.lcm(self.rank, other.rank))

    def of_sample(self, c: int) -> int:
        """The multiple of each sample on c ranks."""
        return math.lcm(self.sample, self.cut * c) if self.cut and c > 1 else self.sample

    def of_pack(self, c: int) -> int:
        """The multiple of a pack on c ranks."""
        return math.lcm(self.of_sample(c), self.rank * c if self.rank > 1 else 1)

    def padded(self, tokens: Tokens, c: int) -> Tokens:
        """Tokens of a sample (or of each of an array of them) on c ranks, with its padding."""
        multiple = self.of_sample(c)
        return tokens if multiple == 1 else -(-tokens // multiple) * multiple

    def in_pack(self, tokens: int, c: int) -> int:
        """Tokens of a pack on c ranks whose padded samples have ``tokens`` in all."""
        multiple = self.of_pack(c)
        return -(-tokens // multiple) * multiple

    def padded_lengths(self, lengths: Sequence[int], c: int) -> tuple[int, ...]:
        """Tokens of each sample of a pack on c ranks with its padding; the last has the pack's, too."""
        padded = [self.padded(length, c) for length in lengths]
        if padded:
            tokens = sum(padded)
            padded[-1] += self.in_pack(tokens, c) - tokens
        return tuple(padded)

    def limit(self, max_seqlen_per_dp_cp_rank: int) -> int:
        """The most tokens a rank can hold of packs of any size, below the limit that was asked for.

        A sample fits on c ranks with its padding if it fits on so many tokens a rank without; so do samples whose padded
        lengths fit together, with the padding of the pack.
        """
        multiple = math.lcm(self.sample, self.cut or 1, self.rank)
        return max_seqlen_per_dp_cp_rank // multiple * multiple

    def problems(self, max_seqlen_per_dp_cp_rank: int) -> list[Problem]:
        """What is wrong with a limit of tokens under this alignment."""
        if self.limit(max_seqlen_per_dp_cp_rank):
            return []
        multiple = math.lcm(self.sample, self.cut or 1, self.rank)
        asked = f"max_seqlen_per_dp_cp_rank={max_seqlen_per_dp_cp_rank}"
        return [Problem(asked, f"a back end that needs {self}", f"give a multiple of {multiple} tokens")]

    def __str__(self) -> str:
        """The rules, in words."""
        rules = []
        if self.sample > 1:
            rules.append(f"samples to multiples of {self.sample} tokens")
        if self.cut:
            rules.append(f"cut samples to multiples of {self.cut} x CP size")
        if self.rank > 1:
            rules.append(f"packs to multiples of {self.rank} x CP size")
        return ", ".join(rules) or "no padding"

    def to_json(self) -> dict[str, int]:
        """As JSON-able values; :meth:`from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Alignment:
        """Read what :meth:`to_json` wrote.

        Raises:
            PlanError: other values.
        """
        if not isinstance(values, Mapping) or set(values) != {"sample", "cut", "rank"}:
            raise PlanError(f"an alignment has sample, cut and rank; found {values!r:.80}")
        return cls(**values)


NO_ALIGNMENT = Alignment()
"""Nothing is padded."""
