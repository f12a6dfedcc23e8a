"""What ``lightning-dcp bench plan`` plans: workloads of random batches, at several sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_dcp.commands.lengths import Lengths, draw_batches
from lightning_dcp.errors import ConfigurationError, Problem, raise_problems
from lightning_dcp.schedule.distributions import DISTRIBUTIONS, clip_lengths, draw_lengths, read_lengths

LONGEST = 128 * 1024
"""Longer samples are cut to this many tokens; and to what the plane holds."""


@dataclass(frozen=True, order=True)
class Size:
    """How large a batch is, and what it is planned for.

    Attributes:
        ranks: size of the plane.
        samples: samples of a batch.
        max_seqlen_per_dp_cp_rank: most tokens a rank may hold of one micro-batch.
    """

    ranks: int
    samples: int
    max_seqlen_per_dp_cp_rank: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that is planned."""
        return min(LONGEST, self.ranks * self.max_seqlen_per_dp_cp_rank)

    def __str__(self) -> str:
        return f"{self.ranks}x{self.samples}@{self.max_seqlen_per_dp_cp_rank}"


def parse_sizes(texts: Sequence[str], option: str) -> tuple[Size, ...]:
    """Sizes from ``RANKSxSAMPLES`` or ``RANKSxSAMPLES@LIMIT``, such as ``8x64@4096``; the limit is 8192 by default.

    Raises:
        ConfigurationError: all that are not of this form, or have a 0.
    """
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:@([1-9]\d*))?", text.strip()) for text in texts]
    remedy = "write RANKSxSAMPLES or RANKSxSAMPLES@MAX_SEQLEN_PER_DP_CP_RANK, such as 8x64@4096"
    raise_problems(
        [
            Problem(f"{option} {text!r}", "not a size", remedy)
            for text, match in zip(texts, found, strict=True)
            if match is None
        ]
    )
    return tuple(Size(int(m[1]), int(m[2]), int(m[3] or 8192)) for m in found if m is not None)


FILE_SIZES = parse_sizes(["8x64", "8x128", "8x256", "32x256", "32x512", "64x512", "64x1024"], "sizes")
SIZES = {"megatron-mock": parse_sizes(["8x32@2048", "8x128@2048"], "sizes")}
"""Where the default is not right: Megatron-LM's own benchmark has a limit of 2048."""
DEFAULT_SIZES = parse_sizes(["8x64", "32x256", "64x512"], "sizes")


@dataclass(frozen=True)
class Workload:
    """Lengths to draw batches from.

    Attributes:
        name: of the workload.
        sizes: at which it is planned.
        pool: the lengths of a file; ``None``: the distribution of this name.
    """

    name: str
    sizes: tuple[Size, ...]
    pool: tuple[int, ...] | None = None

    def batches(self, size: Size, draws: int, seed: int) -> tuple[Lengths, ...]:
        """Random batches; the same arguments always give the same.

        From a file each sample is drawn once before any is drawn again; only a batch larger than the file repeats some.
        """
        if self.pool is None:
            seeds = range(seed, seed + draws)
            return tuple(tuple(draw_lengths(self.name, size.samples, s, longest=size.longest)) for s in seeds)
        pool = clip_lengths(self.pool, size.longest)
        if len(pool) > size.samples:
            return draw_batches(pool, size.samples, draws, seed)
        random = np.random.default_rng(seed)
        return tuple(tuple(random.choice(pool, size.samples).tolist()) for _ in range(draws))


def find_workloads(
    names: Sequence[str] | None, files: Sequence[str] | None, sizes: Sequence[str] | None
) -> tuple[Workload, ...]:
    """The workloads asked for.

    Args:
        names: of distributions and of ``files``; ``None``: all of them.
        files: ``NAME=PATH`` or ``NAME=PATH:FIELD`` (JSON lines), files of lengths.
        sizes: for all workloads, as :func:`parse_sizes` reads them; ``None``: each workload's own.

    Raises:
        ConfigurationError: unknown names, sizes that are none, files that cannot be read; all of a kind at once.
        DataError: a file with what is no length.
    """
    given = None if sizes is None else parse_sizes(sizes, "--sizes")
    pools = dict(_read(text) for text in files or [])
    known = [*pools, *DISTRIBUTIONS]
    wanted = known if names is None else list(dict.fromkeys(names))
    problems = [
        Problem(f"workload {name!r}", "neither a distribution nor a file's name", f"use some of {', '.join(known)}")
        for name in wanted
        if name not in known
    ]
    problems += [
        Problem(f"--files {name}=...", "the name of a distribution", "choose another name")
        for name in pools
        if name in DISTRIBUTIONS
    ]
    raise_problems(problems)
    return tuple(
        Workload(name, given or (FILE_SIZES if name in pools else SIZES.get(name, DEFAULT_SIZES)), pools.get(name))
        for name in wanted
    )


def _read(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and lengths of one ``NAME=PATH`` or ``NAME=PATH:FIELD``."""
    name, equals, path = text.partition("=")
    if not (equals and name and path):
        remedy = "write NAME=PATH, or NAME=PATH:FIELD for JSON lines"
        raise ConfigurationError([Problem(f"--files {text!r}", "no name and path", remedy)])
    field = None
    if not Path(path).exists() and ":" in path:
        path, _, field = path.rpartition(":")
    return name, tuple(read_lengths(path, field))
