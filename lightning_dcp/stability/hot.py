"""Which samples and which kinds of segments were computed where slow steps took their time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from lightning_dcp.segments import PLAIN
from lightning_dcp.stability.record import PackTime, StepRecord

SLOW_FROM = 1.1
"""A step of less than so many times the typical one is not slow: what it took longer is noise."""
Name = TypeVar("Name", bound=Hashable)


def critical_rank(record: StepRecord) -> int | None:
    """The rank that the step's end waited for: the one that computed and received for longest. None: no rank is known."""
    if not record.ranks:
        return None
    return max(record.ranks, key=lambda time: (time.busy_s + time.transfer_s, -time.rank)).rank


def late_start(packs: Iterable[PackTime]) -> tuple[int, float] | None:
    """The rank that began its packs last, and its seconds after the first; None with packs of fewer than two ranks."""
    begun: dict[int, float] = {}
    for pack in packs:
        begun[pack.rank] = min(begun.get(pack.rank, math.inf), pack.start_s)
    if len(begun) < 2:
        return None
    rank = max(begun, key=lambda rank: (begun[rank], -rank))
    return rank, begun[rank] - min(begun.values())


def excess_seconds(record: StepRecord, typical_s: float) -> float:
    """Seconds that a slow step took beyond the typical ones; 0 for steps that are not slow."""
    return record.seconds - typical_s if record.seconds >= SLOW_FROM * typical_s else 0.0


def by_sample(packs: Iterable[PackTime], seconds: float) -> dict[Hashable, float]:
    """Seconds, shared among the samples of packs.

    A pack gets its share of the time that all took (of the tokens, where times are not known), a sample its share of the
    pack's tokens (an equal one, where the pack does not tell them).

    Args:
        packs: of one rank.
        seconds: what is shared.
    """
    weights: dict[Hashable, float] = defaultdict(float)
    for pack, share in _shares(list(packs)):
        tokens = pack.sample_tokens or (1,) * len(pack.sample_ids)
        _add(weights, dict(zip(map(_name, pack.sample_ids), tokens, strict=True)), share)
    return _scaled(weights, seconds)


def _name(sample: Any) -> Hashable:
    """A sample's id, as text if it is a list or something else that cannot be counted by."""
    try:
        hash(sample)
    except TypeError:
        return repr(sample)
    name: Hashable = sample
    return name


def by_kind(packs: Iterable[PackTime], seconds: float) -> dict[str, float]:
    """Seconds, shared among the kinds of segments of one rank's packs, as :func:`by_sample` shares them."""
    weights: dict[str, float] = defaultdict(float)
    for pack, share in _shares(list(packs)):
        _add(weights, kinds_of(pack), share)
    return _scaled(weights, seconds)


def kinds_of(pack: PackTime) -> dict[str, int]:
    """Tokens of each kind on the pack's rank; those that no segment names are plain text."""
    rest = pack.tokens - sum(pack.tokens_by_kind.values())
    plain = pack.tokens_by_kind.get(PLAIN, 0) + rest
    return dict(pack.tokens_by_kind) | ({PLAIN: plain} if plain > 0 else {})


def _shares(packs: Sequence[PackTime]) -> list[tuple[PackTime, float]]:
    times = [pack.end_s - pack.start_s for pack in packs]
    return list(zip(packs, times if sum(times) > 0 else [float(pack.tokens) for pack in packs], strict=True))


def _add(weights: dict[Any, float], tokens: Mapping[Any, int], share: float) -> None:
    total = sum(tokens.values())
    for name, count in tokens.items():
        weights[name] += share * count / total if total else 0.0


def _scaled(weights: Mapping[Name, float], seconds: float) -> dict[Name, float]:
    total = math.fsum(weights.values())
    return {name: seconds * weight / total for name, weight in weights.items()} if total > 0 else {}
