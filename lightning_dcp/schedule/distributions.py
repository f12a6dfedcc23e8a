"""Sample lengths to plan with: named distributions to draw from, and files of real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.errors import ConfigurationError, DataError, Problem, raise_problems

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Distribution:
    """A way to draw lengths.

    Attributes:
        about: what it resembles and its formula, in a line.
        shortest: tokens of the shortest sample; shorter draws become this long.
        longest: tokens of the longest sample; longer draws become this long. ``None``: no end.
        draw: real numbers before rounding and clipping, shape ``[count]``.
    """

    about: str
    shortest: int
    longest: int | None
    draw: Callable[[np.random.Generator, int], FloatArray]


def _megatron_mock(random: np.random.Generator, count: int) -> FloatArray:
    mean, sigma = 1024, 1.5
    return random.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)


RL_LIMIT = 28 * 1024


def _rl(random: np.random.Generator, count: int) -> FloatArray:
    lengths = random.lognormal(math.log(3000), 0.8, count)
    return np.where(random.random(count) < 0.1, RL_LIMIT, lengths)


def _longalign(random: np.random.Generator, count: int) -> FloatArray:
    return np.exp(random.uniform(math.log(8192), math.log(65536), count))


def _llama3_sft(random: np.random.Generator, count: int) -> FloatArray:
    short = random.lognormal(math.log(800), 0.7, count)
    long = random.normal(37_000, 12_000, count)
    return np.where(random.random(count) < 0.0011, long, short)


DISTRIBUTIONS: dict[str, Distribution] = {
    "megatron-mock": Distribution(
        "Megatron-LM's mock data: lognormal, mean 1,024, sigma 1.5, 128 to 8,192 tokens", 128, 8192, _megatron_mock
    ),
    "rl": Distribution(
        "roll-outs: lognormal, median 3,000, sigma 0.8; a tenth of them stopped at the limit of 28,672 tokens",
        128,
        RL_LIMIT,
        _rl,
    ),
    "longalign": Distribution("long documents: log-uniform, 8K to 64K tokens", 8192, 65536, _longalign),
    "llama3-sft": Distribution(
        "chats with a few long documents: lognormal, median 800, sigma 0.7; 0.11 % normal, mean 37K, sd 12K",
        1,
        None,
        _llama3_sft,
    ),
}
"""Named length distributions."""


def draw_lengths(name: str, count: int, seed: int, *, longest: int | None = None) -> list[int]:
    """Draw lengths; the same arguments always give the same ones.

    Args:
        name: a key of :data:`DISTRIBUTIONS`.
        count: how many.
        seed: of the random numbers, 0 or more.
        longest: longer samples are cut to this many tokens, as a data loader that truncates would.

    Raises:
        ConfigurationError: an unknown name, a count or ``longest`` below 1, a negative seed; all at once.
    """
    raise_problems(_draw_problems(name, count, seed, longest))
    distribution = DISTRIBUTIONS[name]
    drawn = np.rint(distribution.draw(np.random.default_rng(seed), count)).astype(np.int64)
    clipped = np.clip(drawn, distribution.shortest, distribution.longest)
    return clip_lengths(clipped, longest)


def clip_lengths(lengths: Sequence[int] | IntArray, longest: int | None) -> list[int]:
    """Lengths of at most ``longest`` tokens, as plain integers; ``None``: as they are."""
    return np.minimum(lengths, np.iinfo(np.int64).max if longest is None else longest).tolist()


def _draw_problems(name: str, count: int, seed: int, longest: int | None) -> list[Problem]:
    problems = []
    if name not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        problems.append(Problem(f"lengths from {name!r}", "no such distribution", f"use one of {known}, or a file"))
    if count < 1:
        problems.append(Problem(f"{count} lengths", "fewer than one", "draw at least one"))
    if seed < 0:
        problems.append(Problem(f"seed={seed}", "a negative number", "give 0 or more"))
    if longest is not None and longest < 1:
        problems.append(Problem(f"longest={longest}", "samples without a token", "give at least 1"))
    return problems


# ------------------------------------------------------------------------- files


def read_lengths(path: str | Path, field: str | None = None) -> list[int]:
    """Lengths from a file, in its order; blank lines are skipped.

    * ``.npy``: a one-dimensional array of integers.
    * ``.jsonl`` or ``.ndjson``: JSON objects, one a line; ``field`` names the length, or a list (such as the token ids)
      whose number of items is the length.
    * anything else: one whole number a line; with a ``field``, read as ``.jsonl``.

    Raises:
        ConfigurationError: the file cannot be read, or JSON lines without a ``field`` to take.
        DataError: no lengths, or one that is not a whole number of at least 1; names the line or the index.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson") and field is None:
        remedy = "name the field that holds the length, or the list of tokens"
        raise ConfigurationError([Problem(f"lengths from {str(path)!r}", "JSON lines and no field", remedy)])
    try:
        lengths = _of_array(path) if kind == ".npy" else [_of_line(*line, field) for line in _lines(path)]
    except (OSError, UnicodeDecodeError) as error:
        found = f"cannot be read: {error}"
        raise ConfigurationError([Problem(f"lengths from {str(path)!r}", found, "give a file of lengths")]) from None
    if not lengths:
        raise DataError(f"{path}: holds no lengths")
    return lengths


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Where each line that is not blank lies, and its text."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", line.strip()


def _of_line(where: str, line: str, field: str | None) -> int:
    if field is not None:
        return _checked(where, _field_of(where, line, field))
    try:
        return _checked(where, int(line))
    except ValueError:
        raise DataError(f"{where}: {line[:80]!r} is not a whole number") from None


def _field_of(where: str, line: str, field: str) -> Any:
    """The length in a JSON object, or the number of items of the list there."""
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(item, dict) or field not in item:
        found = f"the fields are {sorted(item)}" if isinstance(item, dict) else f"the line is a {type(item).__name__}"
        raise DataError(f"{where}: no field {field!r}; {found}")
    value = item[field]
    return len(value) if isinstance(value, list) else value


def _of_array(path: Path) -> list[int]:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: not an array of numbers ({error})") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
        shape = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise DataError(f"{path}: must be a one-dimensional array of integers, not {shape}")
    values = array.tolist()
    for index in np.flatnonzero(array < 1)[:1].tolist():
        _checked(f"{path}[{index}]", values[index])
    return values


def _checked(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{where}: {value!r} is not a whole number")
    if value < 1:
        raise DataError(f"{where}: a length of {value}; every sample needs at least one token")
    return value
