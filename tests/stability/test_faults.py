"""Planted faults are found on real ranks, named right and dealt with; sound ranks with very unequal batches raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import StepPlan
from lightning_dcp.stability.expected import work_parts
from lightning_dcp.stability.record import StepRecord
from tests.stability.loop import COST, Outcome, Run, events, watched_steps
from tests.support.ranks import RankPool

WRONG = CostModel(linear=COST.linear / 5, attention=3 * COST.attention, pack_overhead=0.0, hop_latency=0.004)
"""A cost model that is wrong in every part: what it takes for equal shares is up to six times as much on one rank."""


def run(ranks: RankPool, what: Run) -> Outcome:
    """Run it, and see to it that all ranks saw and decided the same."""
    outcomes: list[Outcome] = ranks.run(watched_steps, 4, what, timeout=280)
    first = outcomes[0]
    for other in outcomes[1:]:
        assert other.records == first.records and other.digests == first.digests and other.plans == first.plans
    return first


def alarm(records: list[StepRecord]) -> tuple[int, str]:
    """Step and subject of the only alarm."""
    ((step, _, subject),) = events(records, "alarm")
    return step, subject


def test_a_slow_link_is_named_avoided_tried_and_used_again(ranks: RankPool) -> None:
    first, end = 5, 30
    outcome = run(ranks, Run(55, link=(2, 3), first=first, end=end))
    step, subject = alarm(outcome.records)
    assert subject == "link 2->3" and first <= step < first + 20
    carried = [any((k.source, k.target) == (2, 3) for k in r.links) for r in outcome.records]
    assert not any(carried[step + 1 : end]) and carried[-1]
    assert [kind for _, kind, _ in events(outcome.records)] == ["alarm", "action", "cleared", "undone"]
    assert outcome.digests[-1] == outcome.digests[0] != outcome.digests[step + 1]
    (event,) = [e for e in outcome.records[step].events if e.kind == "alarm"]
    assert first <= event.since_step < first + 3 and event.slowdown > 3 and event.cost_s > 0.1
    delayed = median(sum(k.transfer_s for k in r.links) for r in outcome.records[first:step])
    around = median(sum(k.transfer_s for k in r.links) for r in outcome.records[step + 1 : end])
    assert around < 0.2 * delayed


def test_a_slow_rank_is_named_gets_less_work_and_its_share_back(ranks: RankPool) -> None:
    first, end = 5, 35
    outcome = run(ranks, Run(70, rank=1, first=first, end=end))
    sound = run(ranks, Run(35))
    step, subject = alarm(outcome.records)
    assert subject == "rank 1" and first <= step < first + 20
    assert [kind for _, kind, _ in events(outcome.records)][-2:] == ["cleared", "undone"]

    def share(of: Outcome, steps: range) -> float:
        """Of all planned work, what rank 1 gets."""
        return sum(of.records[s].ranks[1].expected_s for s in steps) / sum(
            rank.expected_s for s in steps for rank in of.records[s].ranks
        )

    slow = range(step + 1, end)
    assert share(outcome, slow) < 0.75 * share(sound, slow)
    cleared = events(outcome.records, "undone")[-1][0]
    assert outcome.digests[cleared + 1] == outcome.digests[0]
    assert share(outcome, range(cleared + 1, 70)) > 0.85 * share(sound, range(35))


def test_two_faults_at_once_are_told_apart_and_without_fallback_nothing_is_done(ranks: RankPool) -> None:
    outcome = run(ranks, Run(25, link=(0, 1), rank=2, first=5, fallback=False))
    assert sorted(subject for _, _, subject in events(outcome.records, "alarm")) == ["link 0->1", "rank 2"]
    assert len(events(outcome.records)) == 2 and len(set(outcome.digests)) == 1


def test_two_hundred_steps_of_very_unequal_batches_raise_no_alarm(ranks: RankPool) -> None:
    """Planned by a cost model that is wrong, too."""
    outcome = run(ranks, Run(200, cost=WRONG))
    assert events(outcome.records) == []
    sizes = [sum(plan.lengths) for plan in outcome.plans]
    assert max(sizes) > 10 * min(sizes)
    assert median(unevenness(plan) for plan in outcome.plans) > 1.3


def unevenness(plan: StepPlan) -> float:
    """The most work of a rank over the least, as it is and not as the plan believes."""
    work = [sum(parts) for parts in work_parts(replace(plan, extra={"cost_model": COST.to_dict()}))]
    return max(work) / max(min(work), 1e-9)


def test_records_have_packs_with_intervals_and_survive_json(ranks: RankPool) -> None:
    outcome = run(ranks, Run(3, spans=True))
    for record, plan in zip(outcome.records, outcome.plans, strict=True):
        assert [(p.number, p.rank) for p in record.packs] == [
            (number, rank) for number, pack in enumerate(plan.packs()) for rank in pack.ranks
        ]
        for pack in record.packs:
            edges = [pack.start_s, *(i.end_s for i in pack.intervals)]
            assert [i.start_s for i in pack.intervals] == pytest.approx(edges[:-1]) and edges[-1] == pytest.approx(
                pack.end_s
            )
            assert 0 <= pack.start_s < pack.end_s <= record.seconds + 1e-9
        for number, pack in enumerate(plan.packs()):
            held = sum(p.tokens for p in record.packs if p.number == number)
            assert held == pack.tokens(plan.lengths)
        assert record.tokens == sum(plan.lengths) and record.predicted_s is not None
        assert StepRecord.from_json(record.to_json()) == record
