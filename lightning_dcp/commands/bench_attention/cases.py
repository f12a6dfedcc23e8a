"""What ``lightning-dcp bench attention`` measures: packs, kinds of attention, and one layer's call on a pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_dcp.attention.kernels import Kernel, choose_kernel
from lightning_dcp.attention.shape import AttentionShape, Scores
from lightning_dcp.errors import Problem
from lightning_dcp.parallel.blocks import AttentionMask

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LONGEST, MEDIAN = 8192, 512
"""Of a mixed pack; of a small one the longest is half the pack, and the median in proportion."""
_MIXED = "mixed:"


@dataclass(frozen=True)
class Pack:
    """Samples that one CP group attends together.

    Attributes:
        name: as it was asked for.
        lengths: tokens of each sample.
    """

    name: str
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return f"{self.name}: {len(self.lengths)} sample(s), {sum(self.lengths):,} tokens: {lengths}"


def parse_pack(text: str) -> Pack:
    """A pack from ``8192``, ``512,512,8192`` or ``mixed:16384``.

    Raises:
        ValueError: neither of these.
    """
    if text.startswith(_MIXED):
        return Pack(text, mixed_lengths(int(text.removeprefix(_MIXED))))
    lengths = tuple(int(part) for part in text.split(","))
    if min(lengths) < 1:
        raise ValueError("a sample has at least one token")
    return Pack(text, lengths)


def mixed_lengths(tokens: int) -> tuple[int, ...]:
    """Samples of very unequal lengths, ``tokens`` in all; the same at every call.

    As many are longer than the median as are shorter; apart from one of the longest they lie log-normally around it.

    Raises:
        ValueError: too few tokens.
    """
    longest = min(LONGEST, tokens // 2)
    median = longest * MEDIAN // LONGEST
    if median < 2:
        raise ValueError("too few tokens")
    random = np.random.default_rng(0)
    left = tokens - longest - median
    above, below = [longest], []
    while left > median:
        ratio = math.exp(abs(random.normal()))
        longer = max(median, min(round(median * ratio), longest, left - 1))
        shorter = max(1, min(round(median / ratio), left - longer - 1))
        above.append(longer)
        below.append(shorter)
        left -= longer + shorter
    lengths = [*above, median, *below, *([left] if left else [])]
    return tuple(int(length) for length in random.permutation(lengths))


@dataclass(frozen=True)
class Kind:
    """A kind of attention.

    Attributes:
        name: as it was asked for.
        mask: which tokens see which.
        softcap: of the scores; 0 for none.
        sinks: whether there is a sink for each head.
    """

    name: str
    mask: AttentionMask
    softcap: float = 0.0
    sinks: bool = False


def parse_kind(text: str) -> Kind:
    """A kind from ``causal``, ``bidirectional``, ``window:N``, ``softcap:X``, ``sinks``, or several joined by ``+``.

    A window of N tokens counts the token itself; a bidirectional one reaches as far to the other side.

    Raises:
        ValueError: anything else.
    """
    causal, window, softcap, sinks = True, -1, 0.0, False
    for part in text.split("+"):
        word, _, value = part.partition(":")
        if word == "window" and int(value) > 0:
            window = int(value) - 1
        elif word == "softcap" and 0 < float(value) < math.inf:
            softcap = float(value)
        elif part in ("causal", "bidirectional"):
            causal = part == "causal"
        elif part == "sinks":
            sinks = True
        else:
            raise ValueError(part)
    right = min(window, 0) if causal else window
    return Kind(text, AttentionMask(causal, (window, right)), softcap, sinks)


@dataclass(frozen=True)
class Setting:
    """One attention call on a pack; only the exchange scheme is open.

    Attributes:
        pack: its samples.
        size: ranks of the CP group, c.
        kind: of attention.
        kernel: a kernel's name.
        dtype: its name.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: their width.
        layout: a layout's name.
        device: the kind of device.
    """

    pack: Pack
    size: int
    kind: Kind
    kernel: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    layout: str
    device: str

    @cached_property
    def shape(self) -> AttentionShape:
        """Heads, dtype and device."""
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.head_dim, DTYPES[self.dtype], self.device)

    @property
    def scores(self) -> Scores:
        """Scale and soft-cap."""
        return Scores(1 / math.sqrt(self.head_dim), self.kind.softcap)

    def choose_kernel(self) -> Kernel:
        """The kernel, chosen if ``auto`` was asked for.

        Raises:
            UnsupportedAttentionError: it cannot compute this.
        """
        return choose_kernel(self.shape, self.scores, self.kernel)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"pack": self.pack.name, "kind": self.kind.name}


def parse_all(texts: Sequence[str], option: str, parse: Callable[[str], T], form: str) -> tuple[list[T], list[Problem]]:
    """What all texts say, each once, and what is wrong with the others.

    Args:
        texts: as given.
        option: by which they were given.
        parse: raises ValueError for what it does not know.
        form: what to write.
    """
    parsed, problems = [], []
    for text in dict.fromkeys(texts):
        try:
            parsed.append(parse(text))
        except ValueError:
            problems.append(Problem(f"{option} {text}", "not understood", form))
    if not texts:
        problems.append(Problem(f"{option} []", "nothing to measure", form))
    return parsed, problems


def one_of(allowed: Sequence[str]) -> Callable[[str], str]:
    """Takes only these words."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(text)
        return text

    return parse
