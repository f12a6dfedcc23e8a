"""What is done about slow links and ranks, and when it is undone; from made-up records."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.stability.governor import IDLE, Governor
from lightning_dcp.stability.record import RankTime, StepRecord
from lightning_dcp.stability.settings import AlarmSettings
from tests.stability.records import rank_time, record, uneven

SETTINGS = AlarmSettings()


class World:
    """Four ranks whose links carry what the rings in force make them carry."""

    def __init__(self, **options: Any) -> None:
        self.governor = Governor(SETTINGS, RingOrders.by_rank(4), **options)
        self.records: list[StepRecord] = []
        self.probed: list[int] = []

    def run(
        self, steps: int, slow: dict[tuple[int, int], float] | None = None, ranks: dict[int, float] | None = None
    ) -> None:
        for _ in range(steps):
            step, state = len(self.records), self.governor.state
            links = dict.fromkeys(state.orders.hops(0, 4), 0.5e-3)
            for pair in (0, 2):
                if state.scheme_for(pair, 2) is None:
                    links |= dict.fromkeys(((pair, pair + 1), (pair + 1, pair)), 0.5e-3)
            took = {link: (slow or {}).get(link, seconds) for link, seconds in links.items()}
            probes = {link: (slow or {}).get(link, 0.5e-3) for link, _ in self.governor.probes_due()}
            self.probed += [step] * len(probes)
            works = self.works(step, ranks or {}, state.rank_speeds)
            self.records.append(self.governor.decide(record(step, took, works, probes)))

    def works(self, step: int, slow: dict[int, float], speeds: tuple[float, ...] | None) -> list[RankTime]:
        draw, found = random.Random(step), []
        for rank, parts in enumerate(uneven(step)):
            given = [part * (speeds or (1.0,) * 4)[rank] for part in parts]  # the planner gives a slow rank less
            found.append(rank_time(rank, sum(given) * slow.get(rank, 1.0) * (1 + 0.1 * draw.random()), given))
        return found

    def events(self) -> list[tuple[int, str, str]]:
        return [(e.step, e.kind, e.subject) for r in self.records for e in r.events]


def test_rings_go_around_a_slow_link_and_groups_that_cannot_change_their_scheme() -> None:
    world = World()
    before = world.governor.state
    world.run(10, {(2, 3): 0.03})
    state = world.governor.state
    assert world.events() == [(7, "alarm", "link 2->3"), (7, "action", "link 2->3")]
    assert (2, 3) not in state.orders.hops(0, 4)
    assert state.scheme_for(2, 2) == "all_gather"
    assert state.scheme_for(0, 2) is None and state.scheme_for(0, 4) is None
    assert state.digest() != before.digest() and before is not state


def test_the_link_is_tried_every_few_steps_and_used_again_when_it_is_sound() -> None:
    world = World()
    first = world.governor.state
    world.run(30, {(2, 3): 0.03})
    assert world.probed == [12, 17, 22, 27] and (2, 3) in world.governor.alarms.active
    world.run(20)
    assert world.events()[2:] == [(37, "cleared", "link 2->3"), (37, "undone", "link 2->3")]
    assert world.governor.state.digest() == first.digest() and not world.governor.alarms.active
    assert world.probed[4:] == [32, 37]


def test_a_link_that_turns_slow_again_soon_has_to_be_sound_for_longer_each_time() -> None:
    world = World()
    ends = []
    for _ in range(3):
        world.run(8, {(2, 3): 0.03})
        assert world.governor.state.scheme_for(2, 2) is not None
        since = len(world.records)
        while world.governor.state.scheme_for(2, 2) is not None:
            world.run(1)
        ends.append(len(world.records) - since)
    assert ends == [10, 20, 40]
    world.run(200)
    world.run(8, {(2, 3): 0.03})  # long after: as the first time
    world.run(10)
    assert world.governor.state.scheme_for(2, 2) is None


def test_slow_links_in_both_directions_of_a_pair_are_avoided_together() -> None:
    world = World()
    world.run(12, {(2, 3): 0.03, (3, 2): 0.03})
    assert not {(2, 3), (3, 2)} & set(world.governor.state.orders.hops(0, 4))


def test_a_slow_rank_gets_its_speed_which_goes_when_its_ratio_is_back() -> None:
    world = World()
    world.run(30, ranks={1: 2.0})
    speeds = world.governor.state.rank_speeds
    assert speeds is not None and speeds[1] == pytest.approx(0.5, rel=0.2) and speeds[0] == speeds[2] == speeds[3] == 1
    world.run(20)
    assert world.governor.state.rank_speeds is None
    kinds = [kind for _, kind, subject in world.events() if subject == "rank 1"]
    assert kinds[:2] == ["alarm", "action"] and kinds[-2:] == ["cleared", "undone"] and kinds.count("cleared") == 1


def test_a_speed_is_told_anew_when_the_rank_turns_slower_still() -> None:
    world = World()
    world.run(20, ranks={1: 2.0})
    world.run(20, ranks={1: 4.0})
    speeds = world.governor.state.rank_speeds
    assert speeds is not None and speeds[1] == pytest.approx(0.25, rel=0.25)


def test_speeds_that_the_user_gave_stay_in_it() -> None:
    world = World(rank_speeds=(1.0, 1.0, 0.5, 1.0))
    world.run(20, ranks={1: 2.0})
    speeds = world.governor.state.rank_speeds
    assert speeds is not None and speeds[2] == 0.5 and speeds[1] < 0.7
    world.run(30)
    assert world.governor.state.rank_speeds == (1.0, 1.0, 0.5, 1.0)


def test_a_slow_rank_without_work_gets_some_again_in_the_end() -> None:
    world = World()
    world.run(15, ranks={1: 3.0})
    before = world.governor.state.rank_speeds
    for _ in range(IDLE):
        step = len(world.records)
        works = [w if w.rank != 1 else rank_time(1, 0.0, (0.0, 0.0, 0.0)) for w in world.works(step, {}, None)]
        world.records.append(world.governor.decide(record(step, ranks=works)))
    after = world.governor.state.rank_speeds
    assert before is not None and after is not None and after[1] == pytest.approx(before[1] ** 0.5)


def test_without_fallback_there_are_alarms_and_nothing_else() -> None:
    world = World(fallback=False)
    world.run(20, {(2, 3): 0.03}, {1: 2.0})
    assert {kind for _, kind, _ in world.events()} == {"alarm"} and len(world.events()) == 2
    assert world.governor.state.digest() == World().governor.state.digest()
    assert world.governor.probes_due() == ()


def test_what_cannot_be_done_is_said_once() -> None:
    world = World(takes_speeds=False, ring=False)
    world.run(30, {(2, 3): 0.03}, {1: 2.0})
    assert [kind for _, kind, _ in world.events()].count("action") == 2
    texts = [e.text for r in world.records for e in r.events if e.kind == "action"]
    assert all("nothing is done" in text for text in texts)
    assert world.governor.state.digest() == World().governor.state.digest()


def test_no_event_when_nothing_is_slow() -> None:
    world = World()
    world.run(200)
    assert world.events() == []
