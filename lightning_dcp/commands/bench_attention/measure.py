"""Measures all schemes of one setting, round by round, against one rank that has the whole pack."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from torch import Tensor

from lightning_dcp.attention.choice import Estimate, SchemeChooser
from lightning_dcp.commands.bench_attention.cases import Setting
from lightning_dcp.commands.bench_attention.check import TOLERANCE, sink_error
from lightning_dcp.commands.bench_attention.usage import Usage
from lightning_dcp.commands.bench_attention.work import ONE_RANK, Times
from lightning_dcp.parallel.context import make_context
from lightning_dcp.parallel.groups import CPGroup
from lightning_dcp.parallel.links import Link
from lightning_dcp.schedule.cost import CostModel


class Ranks(Protocol):
    """A CP group that runs settings."""

    size: int

    def __enter__(self) -> Self:
        """Start them."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End them."""

    def link(self) -> Link:
        """A hop between its ranks: the slowest."""

    def prepare(self, setting: Setting) -> None:
        """Make the tensors of a setting."""

    def round(self, order: Sequence[str]) -> dict[str, list[Times]]:
        """Time each scheme once, in this order; by scheme what each rank took."""

    def usage(self, scheme: str) -> list[Usage]:
        """What each rank uses; not timed."""

    def check(self, scheme: str) -> list[tuple[dict[str, float], Tensor | None, Tensor | None]]:
        """For each rank its errors, its part of the sinks' gradient, and the whole that there should be."""


@dataclass(frozen=True)
class Plan:
    """How a setting is measured.

    Attributes:
        schemes: which.
        repeats: timed rounds.
        warmup: untimed runs of each scheme before.
        check: whether results are compared with the reference kernel's.
        cost: from which ``attention="auto"`` would choose the scheme, with the measured or assumed link.
    """

    schemes: tuple[str, ...]
    repeats: int
    warmup: int
    check: bool
    cost: CostModel

    @property
    def runs(self) -> int:
        """Runs of all schemes together."""
        return (len(self.schemes) + 1) * (self.warmup + self.repeats + self.check)


@dataclass(frozen=True)
class Row:
    """One scheme, or :data:`ONE_RANK`, in one setting.

    Attributes:
        setting: what was run.
        scheme: by which scheme.
        rounds: for each round the slowest rank's times; of one rank with the whole pack the median over the processes
            that did so at the same time.
        shares: for each round the share of the ideal: forward and backward of one rank with the whole pack, over c, over
            this scheme's time.
        usage: of each rank.
        errors: against the reference kernel, if it was checked.
        estimate_s: what ``attention="auto"`` expects of this scheme, forward and backward; None of one rank.
        is_picked: whether it would take this scheme.
    """

    setting: Setting
    scheme: str
    rounds: tuple[Times, ...]
    shares: tuple[float, ...]
    usage: tuple[Usage, ...]
    errors: dict[str, float] | None
    estimate_s: float | None = None
    is_picked: bool = False

    @property
    def times(self) -> Times:
        """Medians over the rounds, each for itself."""
        return Times(*(statistics.median(column) for column in zip(*self.rounds, strict=True)))

    @property
    def share(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.shares)

    @property
    def sent_bytes(self) -> int:
        """Of the rank that sends most."""
        return max(usage.sent_bytes for usage in self.usage)

    @property
    def peak_bytes(self) -> int:
        """Of the rank that takes most."""
        return max(usage.peak_bytes for usage in self.usage)

    @property
    def error(self) -> float | None:
        """The largest, not a number if any is not; None if not checked."""
        if self.errors is None:
            return None
        return math.nan if any(map(math.isnan, self.errors.values())) else max(self.errors.values())

    @property
    def is_wrong(self) -> bool:
        """Whether it was checked and found to be wrong."""
        return self.error is not None and not self.error <= TOLERANCE[self.setting.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **self.setting.to_dict(),
            "scheme": self.scheme,
            **self.times._asdict(),
            "share_of_ideal": self.share,
            "sent_bytes": [usage.sent_bytes for usage in self.usage],
            "peak_bytes": [usage.peak_bytes for usage in self.usage],
            "errors": self.errors,
            "auto_estimate_s": self.estimate_s,
            "auto_picks": self.is_picked,
            "rounds": [times._asdict() for times in self.rounds],
            "shares_of_ideal": list(self.shares),
        }


def estimated(setting: Setting, cost: CostModel, link: Link) -> Estimate:
    """What ``attention="auto"`` would make of a setting."""
    group = CPGroup(None, tuple(range(setting.size)))
    context = make_context(group, 0, setting.pack.lengths, layout=setting.layout)
    return SchemeChooser(cost, {setting.size: link}).estimate(setting.shape, setting.kind.mask, context)


def measure(ranks: Ranks, link: Link, setting: Setting, plan: Plan, done: Callable[[int], None]) -> list[Row]:
    """One row for one rank with the whole pack, and one for each scheme.

    The machine's speed may change from minute to minute. So each round runs everything once, in an order that changes
    from round to round, and times are compared inside a round.

    Args:
        ranks: the group.
        link: between its ranks.
        setting: what to run.
        plan: how.
        done: told how many runs are over.
    """
    names = (ONE_RANK, *plan.schemes)
    ranks.prepare(setting)
    usage, checked = {}, {}
    for name in names:
        usage[name] = tuple(ranks.usage(name))
        checked[name] = _errors(name, ranks.check(name)) if plan.check else None
        done(1 + plan.check)
    rounds = []
    for number in range(1 - plan.warmup, plan.repeats):
        first = number % len(names)
        times = {name: _slowest(name, each) for name, each in ranks.round(names[first:] + names[:first]).items()}
        if number >= 0:
            rounds.append(times)
        done(len(names))
    estimate = estimated(setting, plan.cost, link)
    return [
        Row(
            setting,
            name,
            tuple(times[name] for times in rounds),
            tuple(_share(times, name, ranks.size) for times in rounds),
            usage[name],
            checked[name],
            estimate.seconds.get(name),
            name == estimate.scheme,
        )
        for name in names
    ]


def _slowest(name: str, ranks: Sequence[Times]) -> Times:
    """Of ranks that work together the slowest; of ranks that do the same beside each other the median."""
    of_ranks = statistics.median if name == ONE_RANK else max
    return Times(*(of_ranks(column) for column in zip(*ranks, strict=True)))


def _share(times: dict[str, Times], name: str, size: int) -> float:
    return 1.0 if name == ONE_RANK else times[ONE_RANK].both_s / size / times[name].both_s


def _errors(scheme: str, ranks: Sequence[tuple[dict[str, float], Tensor | None, Tensor | None]]) -> dict[str, float]:
    """The largest over the ranks; what is not a number stays so."""
    if scheme == ONE_RANK:
        ranks = ranks[:1]  # each of them had the whole pack
    found = {}
    for name in ranks[0][0]:
        values = [errors[name] for errors, _, _ in ranks]
        found[name] = math.nan if any(map(math.isnan, values)) else max(values)
    _, _, wanted = ranks[0]
    if wanted is not None:
        found["dsinks"] = sink_error([part for _, part, _ in ranks if part is not None], wanted)
    return found
