"""The record of a step, out of what its ranks told: the same on every rank, as all have the same to go by."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.rank_times import LinkSummary, PackSpan, RankSummary
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.segments import SampleSegments
from lightning_dcp.stability.expected import HopExpectation, Parts, work_parts
from lightning_dcp.stability.record import Interval, LinkTime, PackTime, RankTime, StepRecord

Link = tuple[int, int]


def assemble(
    step: int,
    plan: StepPlan,
    told: Sequence[RankSummary],
    expectation: HopExpectation,
    layouts: Sequence[PackLayout | None] = (),
    segments: Sequence[SampleSegments] | None = None,
) -> StepRecord:
    """Join the summaries of all ranks of the world.

    A place of the plane has several ranks with tensor parallelism and pipelines; the slowest speaks for it.

    Args:
        step: number of the batch in the run.
        plan: of the batch.
        told: by all ranks, in any order that is the same on all of them.
        expectation: of hops; it sees those of this step, too.
        layouts: of each pack, in the plan's order; None where its name says it, and empty where that holds for all.
        segments: of each sample of the batch; None: plain samples.
    """
    start, end = min(rank.start_s for rank in told), max(rank.end_s for rank in told)
    links = _links(told)
    expectation.see(links)
    places, works = _slowest_of_places(told), work_parts(plan, layouts, segments)
    return StepRecord(
        step,
        end - start,
        sum(plan.lengths),
        _predicted(plan),
        tuple(_rank_time(rank, parts) for rank, parts in zip(places, works, strict=True)),
        _link_times(links, expectation),
        _packs(places, start),
        probes=_link_times(_slowest(probe for rank in told for probe in rank.probes), expectation),
    )


def _predicted(plan: StepPlan) -> float | None:
    seconds = plan.extra.get("predicted_step_s")
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else None


def _slowest_of_places(told: Sequence[RankSummary]) -> list[RankSummary]:
    places: dict[int, RankSummary] = {}
    for rank in told:
        if rank.place not in places or rank.busy_s > places[rank.place].busy_s:
            places[rank.place] = rank
    return [places[place] for place in sorted(places)]


def _rank_time(rank: RankSummary, parts: Parts) -> RankTime:
    expected = math.fsum(parts)
    times = rank.busy_s, rank.wait_s, rank.transfer_s
    return RankTime(rank.place, *times, expected, rank.memory_bytes, parts, rank.queued_s)


def _links(told: Sequence[RankSummary]) -> list[LinkSummary]:
    """All links, as their receivers saw them.

    Where both directions of a hop end together, a slow link holds up its sender's incoming hop and its receiver's outgoing
    one, too. Only the link itself is slow at both ends: the quicker end is right.
    """
    received = _slowest(link for rank in told for link in rank.links)
    sent = {(link.source, link.target): link for link in _slowest(link for rank in told for link in rank.sent)}
    return [_quicker(link, sent.get((link.source, link.target))) for link in received]


def _quicker(one: LinkSummary, other: LinkSummary | None) -> LinkSummary:
    return one if other is None else min(one, other, key=lambda link: (link.typical_s, link.transfer_s))


def _slowest(links: Iterable[LinkSummary]) -> list[LinkSummary]:
    """One summary of each link, by source and target; of several, as tensor-parallel ranks give them, the slowest."""
    every: dict[Link, list[LinkSummary]] = defaultdict(list)
    for link in links:
        every[link.source, link.target].append(link)
    worst: Callable[[LinkSummary], tuple[float, float]] = lambda link: (link.typical_s, link.transfer_s)  # noqa: E731
    return [max(every[key], key=worst) for key in sorted(every)]


def _link_times(links: Sequence[LinkSummary], expectation: HopExpectation) -> tuple[LinkTime, ...]:
    return tuple(
        LinkTime(
            link.source,
            link.target,
            link.hops,
            link.num_bytes,
            link.transfer_s,
            link.typical_s,
            expectation.seconds(link.source, link.target, link.num_bytes / link.hops),
        )
        for link in links
    )


def _packs(places: Sequence[RankSummary], start: float) -> tuple[PackTime, ...]:
    found = [_pack_time(rank.place, span, start) for rank in places for span in rank.packs]
    return tuple(sorted(found, key=lambda pack: (pack.number, pack.rank)))


def _pack_time(place: int, span: PackSpan, start: float) -> PackTime:
    share = span.share
    return PackTime(
        share.number,
        place,
        share.first_rank,
        share.cp_size,
        span.start_s - start,
        span.end_s - start,
        share.tokens,
        share.dense_tokens,
        share.sample_ids,
        tuple(Interval(kind, a - start, b - start) for kind, a, b in span.spans),
        dict(share.tokens_by_kind),
        share.sample_tokens,
    )
