"""The panel's sentences and small tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
    "wait": "senders that came late",
    "outside": "time outside of computing and exchange",
}
Row = tuple[str, str, str, str]


def main_cause(reasons: Sequence[StepReason]) -> str:
    """What most of the slowest steps have in common; nothing without timed steps."""
    if not reasons:
        return ""
    cause, times = Counter(reason.cause for reason in reasons).most_common(1)[0]
    of_these = [reason for reason in reasons if reason.cause == cause]
    why = f"mostly because of {CAUSES[cause]}{_where(of_these)}"
    if len(reasons) == 1:
        return f"One step was slow, {why}."
    if times == len(reasons):
        return f"The {len(reasons)} slowest steps were all slow {why}."
    return f"Of the {len(reasons)} slowest steps, {times} {'was' if times == 1 else 'were'} slow {why}."


def _where(reasons: Sequence[StepReason]) -> str:
    """The link or the rank that these steps have in common, if there is one."""
    links, ranks = {reason.link for reason in reasons}, {reason.rank for reason in reasons}
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
        ("steadiness", f"{summary.steadiness:.1%}"),
        ("tokens/s", throughput(summary.throughput)),
        ("busy", percent(summary.busy_share)),
        ("transfer", percent(summary.transfer_share)),
        ("wait", percent(summary.wait_share)),
        ("peak memory", memory(summary.memory_bytes)),
        ("alarms / actions", f"{summary.alarms} / {summary.actions}"),
    ]


def comparison_rows(comparison: Comparison) -> list[Row]:
    """Name, first, second and their quotient, where that means something."""
    first, second = comparison.first, comparison.second
    rows: list[Row] = [
        ("steps", f"{first.steps:,}", f"{second.steps:,}", ""),
        ("ranks", f"{first.ranks:,}", f"{second.ranks:,}", ""),
        ("p50", seconds(first.p50_s), seconds(second.p50_s), times(first.p50_s, second.p50_s)),
        ("p99", seconds(first.p99_s), seconds(second.p99_s), times(first.p99_s, second.p99_s)),
        ("p99 / p50", f"{first.ratio:.2f}x", f"{second.ratio:.2f}x", times(first.ratio, second.ratio)),
        (
            "effective throughput, tokens/s",
            throughput(first.throughput),
            throughput(second.throughput),
            times(first.throughput, second.throughput),
        ),
        (
            "steadiness",
            f"{first.steadiness:.1%}",
            f"{second.steadiness:.1%}",
            times(first.steadiness, second.steadiness),
        ),
    ]
    for name, one, other in (
        ("busy share of the ranks", first.busy_share, second.busy_share),
        ("transfer share", first.transfer_share, second.transfer_share),
        ("wait share", first.wait_share, second.wait_share),
    ):
        rows.append((name, percent(one), percent(other), times(one, other)))
    rows.append(
        (
            "peak memory",
            memory(first.memory_bytes),
            memory(second.memory_bytes),
            times(first.memory_bytes, second.memory_bytes),
        )
    )
    rows.append(("alarms", f"{first.alarms:,}", f"{second.alarms:,}", ""))
    return rows


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
