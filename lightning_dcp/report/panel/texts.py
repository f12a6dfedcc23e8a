"""The panel's sentences and small tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lightning_dcp.report.panel.comparison import Comparison
from lightning_dcp.report.panel.draw.axes import byte_unit
from lightning_dcp.report.panel.reasons import Cause, StepReason
from lightning_dcp.report.panel.shards import ShardBudgets
from lightning_dcp.report.panel.summary import RunSummary
from lightning_dcp.report.plan_table import seconds

UNKNOWN = "-"
CAUSES: dict[Cause, str] = {
    "work": "more work in the batch",
    "compute": "slow computing",
    "transfer": "slow transfers",
    "start": "ranks that began late",
    "wait": "senders that came late",
    "outside": "time outside of computing and exchange",
}
Row = tuple[str, str, str, str, str]


def main_cause(reasons: Sequence[StepReason]) -> str:
    """Why the slowest steps were slow, each cause with its number of steps; nothing without timed steps."""
    if not reasons:
        return ""
    (most, times), *others = Counter(reason.cause for reason in reasons).most_common()
    why = f"mostly because of {_cause(most, reasons)}"
    if len(reasons) == 1:
        return f"One step was slow, {why}."
    if not others:
        return f"The {len(reasons)} slowest steps were all slow {why}."
    more = "".join(f", {number} because of {_cause(cause, reasons)}" for cause, number in others)
    return f"Of the {len(reasons)} slowest steps, {times} {'was' if times == 1 else 'were'} slow {why}{more}."


def _cause(cause: Cause, reasons: Sequence[StepReason]) -> str:
    return CAUSES[cause] + _where([reason for reason in reasons if reason.cause == cause])


def _where(reasons: Sequence[StepReason]) -> str:
    """The link or the rank that these steps have in common, if there is one."""
    links, ranks = {reason.link for reason in reasons}, {reason.rank for reason in reasons}
    late = {reason.late_rank for reason in reasons}
    if reasons[0].cause in ("start", "wait") and len(late) == 1 and (rank := late.pop()) is not None:
        return f" (rank {rank})"
    if reasons[0].cause == "transfer" and len(links) == 1 and (link := links.pop()):
        return f" over link {link[0]}->{link[1]}"
    return f" on rank {ranks.pop()}" if reasons[0].cause == "compute" and len(ranks) == 1 else ""


def numbers(summary: RunSummary) -> list[tuple[str, str]]:
    """Names and values of the head's numbers."""
    return [
        ("steps", f"{summary.steps:,}"),
        ("ranks", f"{summary.ranks:,}" if summary.ranks else UNKNOWN),
        ("p50", seconds(summary.p50_s)),
        ("p99", seconds(summary.p99_s)),
        ("p99 / p50", f"{summary.ratio:.2f}x"),
        ("steadiness", percent(summary.steadiness)),
        ("tokens/s", throughput(summary.throughput)),
        ("busy", percent(summary.busy_share)),
        ("transfer", percent(summary.transfer_share)),
        ("wait", percent(summary.wait_share)),
        ("peak memory", memory(summary.memory_bytes)),
        ("alarms / actions", f"{summary.alarms} / {summary.actions}"),
    ]


def comparison_rows(comparison: Comparison) -> list[Row]:
    """Name, first, second, their quotient where that means something, and which direction is better."""
    first, second = comparison.first, comparison.second
    counts: tuple[tuple[str, int, int, str], ...] = (
        ("steps", first.steps, second.steps, ""),
        ("ranks", first.ranks, second.ranks, ""),
        ("alarms", first.alarms, second.alarms, "lower"),
    )
    values: tuple[tuple[str, float | None, float | None, Callable[[Any], str], str], ...] = (
        ("p50", first.p50_s, second.p50_s, seconds, "lower"),
        ("p99", first.p99_s, second.p99_s, seconds, "lower"),
        ("p99 / p50", first.ratio, second.ratio, "{:.2f}x".format, "lower"),
        ("effective throughput, tokens/s", first.throughput, second.throughput, throughput, "higher"),
        ("steadiness", first.steadiness, second.steadiness, percent, "higher"),
        ("busy share of the ranks", first.busy_share, second.busy_share, percent, "higher"),
        ("transfer share", first.transfer_share, second.transfer_share, percent, "lower"),
        ("wait share", first.wait_share, second.wait_share, percent, "lower"),
        ("peak memory", first.memory_bytes, second.memory_bytes, memory, "lower"),
    )
    told = [(name, f"{one:,}", f"{other:,}", "", better) for name, one, other, better in counts]
    rows = [(name, of(one), of(other), times(one, other), better) for name, one, other, of, better in values]
    return [*told[:2], *rows, told[2]]


def shard_words(shards: ShardBudgets) -> str:
    """How many shards kept their budgets, in a sentence or two."""
    head = f"{shards.shards:,} shards of {shards.steps:,} step{'' if shards.steps == 1 else 's'} whose packs were kept."
    said = [
        f"{over:,} held more than {name}" if over else f"none held more than {name}"
        for over, limit, name in (
            (shards.over_tokens, shards.max_tokens, f"max_tokens ({shards.max_tokens or 0:,})"),
            (shards.over_dense, shards.dense_limit, f"dense_limit ({shards.dense_limit or 0:,} dense tokens)"),
        )
        if limit
    ]
    if not said:
        return f"{head} The record names no budget."
    tail = ", ".join(said)
    return f"{head} {tail[0].upper()}{tail[1:]}."


def percent(share: float | None) -> str:
    """A share, or that it is unknown."""
    return UNKNOWN if share is None else f"{share:.1%}"


def throughput(value: float) -> str:
    """Tokens a second."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def memory(value: float | None) -> str:
    """Bytes in a binary unit."""
    if not value:
        return UNKNOWN
    unit = byte_unit(value)
    return f"{value * unit.factor:,.1f} {unit.name}"


def ratio(value: float | None) -> str:
    """A link's time over the expected one, where that is known."""
    return UNKNOWN if value is None else "<0.01x" if value < 0.005 else f"{value:.2f}x"


def times(first: float | None, second: float | None) -> str:
    """A quotient, where there is one."""
    return f"{first / second:.2f}x" if first is not None and second else ""
