"""Alarms from made-up records: what is slow is named, what merely waits or has more to do is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_dcp.stability.alarms import Alarms
from lightning_dcp.stability.record import Event, RankTime, StepRecord
from lightning_dcp.stability.settings import AlarmSettings
from tests.stability.records import RING, rank_time, record, uneven

SETTINGS = AlarmSettings()


def feed(records: list[StepRecord], settings: AlarmSettings = SETTINGS) -> tuple[list[Event], Alarms]:
    alarms, events = Alarms(settings), []
    for one in records:
        events += alarms.update(one)
    return events, alarms


def slow_link(typical: float, first: int, end: int, steps: int) -> list[StepRecord]:
    return [
        record(s, dict.fromkeys(RING, 0.5e-3) | ({(2, 3): typical} if first <= s < end else {})) for s in range(steps)
    ]


def worked(step: int, factors: dict[int, float], queued: dict[int, float] | None = None) -> list[RankTime]:
    draw = random.Random(step)
    return [
        rank_time(
            r, 5 * sum(parts) * factors.get(r, 1.0) * (1 + 0.2 * draw.random()), parts, (queued or {}).get(r, 0.0)
        )
        for r, parts in enumerate(uneven(step))
    ]


def test_a_slow_link_is_named_with_how_slow_since_when_and_what_it_cost() -> None:
    events, alarms = feed(slow_link(0.02, 5, 99, 20))
    (event,) = events
    assert (event.step, event.kind, event.subject, event.since_step) == (
        5 + SETTINGS.needed - 1,
        "alarm",
        "link 2->3",
        5,
    )
    assert event.slowdown == pytest.approx(20)
    assert event.cost_s == pytest.approx(SETTINGS.needed * 4 * 0.019)
    assert "link 2->3 is slow" in event.text and "20 ms, expected 1 ms; since step 5" in event.text
    assert alarms.active[2, 3].cost_s == pytest.approx(15 * 4 * 0.019)  # and goes on adding up


def test_an_alarm_ends_when_most_steps_of_the_window_are_sound() -> None:
    events, alarms = feed(slow_link(0.02, 0, 15, 40))
    assert [(e.kind, e.step) for e in events] == [("alarm", 7), ("cleared", 15 + SETTINGS.needed - 1)]
    assert not alarms.active and events[1].cost_s == pytest.approx(15 * 4 * 0.019)


@pytest.mark.parametrize("every", [2, 3])
def test_hops_that_are_slow_now_and_then_make_no_alarm(every: int) -> None:
    records = [record(s, dict.fromkeys(RING, 0.0) | ({(2, 3): 0.05} if s % every == 0 else {})) for s in range(60)]
    assert feed(records)[0] == []


def test_the_floor_and_the_factor_must_both_be_exceeded() -> None:
    assert feed(slow_link(0.009, 0, 99, 40))[0] == []  # nine times as long, but not 10 ms more
    slow = slow_link(0.035, 0, 99, 40)  # 15 ms more than expected, but not twice as long
    assert feed([replace(r, links=tuple(replace(k, expected_s=0.02) for k in r.links)) for r in slow])[0] == []


def test_all_links_at_once_are_the_machine_and_not_a_link() -> None:
    assert feed([record(s, dict.fromkeys(RING, 0.03)) for s in range(40)])[0] == []


def test_both_of_two_links_are_named_if_a_table_says_that_they_are_slow() -> None:
    events, _ = feed([record(s, {(0, 1): 0.03, (1, 0): 0.03}) for s in range(40)])
    assert sorted(e.subject for e in events) == ["link 0->1", "link 1->0"]


def test_steps_in_which_a_link_carries_nothing_do_not_count() -> None:
    records = [record(s, dict.fromkeys(RING, 0.0) | {(2, 3): 0.03} if s % 2 else {(0, 1): 0.0}) for s in range(20)]
    assert [(e.step, e.subject) for e in feed(records)[0]] == [(15, "link 2->3")]


def test_a_slow_rank_is_named_and_the_ranks_that_have_more_to_do_are_not() -> None:
    events, _ = feed([record(s, ranks=worked(s, {1: 2.0} if s >= 10 else {})) for s in range(40)])
    (event,) = events
    assert (event.kind, event.subject) == ("alarm", "rank 1")
    assert 10 + SETTINGS.needed - 1 <= event.step < 30 and 10 <= event.since_step < 13
    assert event.slowdown == pytest.approx(2.0, rel=0.2) and event.cost_s > 0


def test_a_rank_alarm_ends_when_its_ratio_is_back() -> None:
    events, _ = feed([record(s, ranks=worked(s, {3: 2.0} if s < 20 else {})) for s in range(60)])
    assert [(e.kind, e.subject) for e in events] == [("alarm", "rank 3"), ("cleared", "rank 3")]
    assert 20 <= events[1].step < 20 + SETTINGS.window


def test_unequal_work_with_noise_makes_no_alarm_in_a_thousand_steps() -> None:
    draw = random.Random(3)
    records = []
    for s in range(1000):
        links = {link: 0.03 * (draw.random() < 0.1) for link in RING}
        records.append(record(s, links, worked(s, {draw.randrange(4): draw.choice((1.0, 3.0))})))
    assert feed(records)[0] == []


def test_ranks_that_wait_for_cores_together_are_not_slow_but_one_alone_is() -> None:
    def queued(step: int, share: float) -> list[RankTime]:
        busy = [0.1 + share, 0.3, 0.1 + share, 0.1 + share]
        return [rank_time(r, b, (0.01, 0.05, 0.04), b - 0.1) for r, b in enumerate(busy)]

    assert feed([record(s, ranks=queued(s, 0.05)) for s in range(40)])[0] == []
    assert [e.subject for e in feed([record(s, ranks=queued(s, 0.0)) for s in range(40)])[0]] == ["rank 1"]


def test_the_same_records_give_the_same_events() -> None:
    records = [record(s, {(2, 3): 0.03, (0, 1): 0.0}, worked(s, {1: 2.0})) for s in range(30)]
    assert feed(records)[0] == feed([StepRecord.from_json(r.to_json()) for r in records])[0] != []
