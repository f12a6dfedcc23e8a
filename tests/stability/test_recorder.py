"""The recorder on real ranks: who waited for whom, what it costs, and that it can be switched off."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dcp.parallel.clock import WaitClock
from lightning_dcp.parallel.core_queue import CoreQueue
from lightning_dcp.parallel.exchange import GroupExchange
from lightning_dcp.parallel.hop_times import HopRecorder
from lightning_dcp.parallel.rank_times import LinkSummary, PackShare, RankSummary
from lightning_dcp.stability.probe import probe_links
from tests.parallel.support import join_world
from tests.stability.timing_cost import TimingCost, measure_timing_cost
from tests.support.planted import slow_link
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
LATE = 0.15
"""Seconds of what is planted: well above what a busy machine does to a hop."""


SCENES: dict[str, tuple[int | None, tuple[int, int], bool]] = {
    "late rank 1": (1, (-1, -1), False),
    "slow link 2->3": (None, (2, 3), False),
    "late rank 1 in a collective": (1, (-1, -1), True),
    "late rank 2, slow link 0->1": (2, (0, 1), False),
}
"""Which rank computes for long, which link is slow, and whether it is a collective instead of a hop."""


def _scenes() -> dict[str, RankSummary]:
    groups = join_world()
    recorder = HopRecorder(groups, CPU)
    exchange = GroupExchange(groups.cp_group(0, 4), groups.rank, WaitClock(recorder))
    return {name: _scene(groups.rank, recorder, exchange, *scene) for name, scene in SCENES.items()}


def _scene(
    rank: int, recorder: HopRecorder, exchange: GroupExchange, late: int | None, link: tuple[int, int], collective: bool
) -> RankSummary:
    dist.barrier()  # scenes before it made some ranks late
    with slow_link(*link, seconds=LATE):
        recorder.begin_step()
        with recorder.pack(PackShare(0, 0, 4, 3)):
            if rank == late:
                time.sleep(LATE)
            if collective:
                exchange.all_gather(torch.ones(3, 2), [3] * 4)
            else:
                exchange.start_hop([torch.ones(3, 2)], 3, tag=0).wait()
        return recorder.finish_step(packs=True, spans=True)


@pytest.fixture(scope="module")
def scenes(ranks: RankPool) -> dict[str, list[RankSummary]]:
    """What each rank told of each scene."""
    told = ranks.run(_scenes, 4)
    return {name: [rank[name] for rank in told] for name in SCENES}


def test_a_late_rank_makes_its_neighbours_wait_and_no_link_is_to_blame(scenes: dict[str, list[RankSummary]]) -> None:
    told = scenes["late rank 1"]
    assert told[1].busy_s > LATE > told[1].wait_s
    assert told[2].wait_s > 0.5 * LATE > told[2].busy_s  # it waited for what rank 1 sends
    assert told[0].wait_s > 0.5 * LATE  # and this one until rank 1 received
    assert all(link.transfer_s < 0.5 * LATE and link.typical_s < 0.5 * LATE for rank in told for link in rank.links)
    assert [(link.source, link.target, link.hops, link.num_bytes) for rank in told for link in rank.links] == [
        ((r - 1) % 4, r, 1, 24) for r in range(4)
    ]


def test_a_slow_link_is_transfer_at_its_receiver_and_nowhere_else(scenes: dict[str, list[RankSummary]]) -> None:
    told = scenes["slow link 2->3"]
    assert told[3].transfer_s >= LATE > told[3].wait_s
    assert told[3].links[0].typical_s >= LATE and told[3].links[0].fastest_s >= LATE
    assert all(rank.links[0].typical_s < 0.5 * LATE for rank in told[:3])
    assert all(rank.busy_s < 0.5 * LATE for rank in told)


def test_a_collective_is_waiting_until_the_last_rank_comes(scenes: dict[str, list[RankSummary]]) -> None:
    told = scenes["late rank 1 in a collective"]
    assert all(rank.wait_s > 0.5 * LATE for rank in told if rank.place != 1)
    assert all(rank.transfer_s < 0.5 * LATE for rank in told) and told[1].busy_s > LATE
    kinds = [[kind for kind, _, _ in rank.packs[0].spans] for rank in told]
    assert all(kind[:2] == ["compute", "wait"] or kind[:1] == ["wait"] for kind in (kinds[0], kinds[2], kinds[3]))


def test_busy_wait_and_transfer_are_all_of_the_time(scenes: dict[str, list[RankSummary]]) -> None:
    for rank in (rank for told in scenes.values() for rank in told):
        assert rank.busy_s + rank.wait_s + rank.transfer_s == pytest.approx(rank.end_s - rank.start_s, abs=1e-9)
        (pack,) = rank.packs
        assert rank.start_s <= pack.start_s <= pack.spans[0][1] and pack.spans[-1][2] <= pack.end_s <= rank.end_s
        assert all(a[2] == b[1] for a, b in zip(pack.spans, pack.spans[1:], strict=False))
        assert rank.memory_bytes > 1e7


def _uneven_hops() -> tuple[RankSummary, RankSummary, RankSummary]:
    """Empty shares, hops that are paused, groups of two sizes, and hops outside of a step."""
    groups = join_world()
    recorder = HopRecorder(groups, CPU)
    clock, rank = WaitClock(recorder), groups.rank
    four = GroupExchange(groups.cp_group(0, 4), rank, clock)
    two = GroupExchange(groups.cp_group(rank - rank % 2, 2), rank % 2, clock, [1, 0])
    tokens = [2, 0, 3, 1]

    def hop(exchange: GroupExchange, sent: int, received: int) -> None:
        exchange.start_hop([torch.ones(sent)], received, tag=0).wait()

    hop(four, 1, 1)  # no step is under way
    recorder.begin_step()
    hop(four, 1, 1)  # and this one is forgotten, as its step begins anew
    recorder.begin_step()
    for _ in range(3):
        hop(four, tokens[rank], tokens[rank - 1])
    with recorder.paused():
        time.sleep(LATE)
        hop(two, 1, 1)
    for _ in range(2):
        hop(two, 5, 5)
    first = recorder.finish_step()
    recorder.begin_step()
    second = recorder.finish_step()
    recorder.begin_step()
    hop(two, 1, 1)
    return first, second, recorder.finish_step(packs=True)


def test_what_is_not_sent_is_not_told_and_pauses_do_not_count(ranks: RankPool) -> None:
    results = ranks.run(_uneven_hops, 4)
    links = [[(k.source, k.hops, k.num_bytes) for k in first.links] for first, _, _ in results]
    assert links == [
        [(1, 2, 40), (3, 3, 12)],
        [(0, 5, 24 + 40)],
        [(3, 2, 40)],
        [(2, 5, 36 + 40)],
    ]
    for first, second, third in results:
        assert first.busy_s < LATE < first.end_s - first.start_s
        assert second.links == () and second.wait_s == second.transfer_s == 0 and third.packs == ()
        assert [k.hops for k in third.links] == [1]


def _two_planes() -> tuple[RankSummary, tuple[LinkSummary, ...]]:
    """Tensor parallelism: ranks 0 and 2 of the world are one plane, 1 and 3 the other."""
    groups = join_world(tensor_parallel=2)
    recorder = HopRecorder(groups, CPU)
    exchange = GroupExchange(groups.cp_group(0, 2), groups.rank, WaitClock(recorder))
    with slow_link(1, 3, seconds=LATE):
        recorder.begin_step()
        exchange.start_hop([torch.ones(2)], 2, tag=0).wait()
        summary = recorder.finish_step()
        return summary, probe_links(groups, [((0, 1), 8), ((1, 0), 8)], CPU)


def test_planes_are_told_by_places_and_probed_each_by_itself(ranks: RankPool) -> None:
    results = ranks.run(_two_planes, 4)
    assert [summary.place for summary, _ in results] == [0, 0, 1, 1]
    links = [[(k.source, k.target, k.typical_s >= LATE) for k in summary.links] for summary, _ in results]
    assert links == [[(1, 0, False)], [(1, 0, False)], [(0, 1, False)], [(0, 1, True)]]
    probes = [[(k.source, k.target, k.typical_s >= LATE) for k in told] for _, told in results]
    assert probes == links


def _cost() -> TimingCost:
    return measure_timing_cost(join_world(), CPU, 4000)


def test_timing_takes_microseconds_a_hop_and_less_than_a_hundredth_of_a_step(ranks: RankPool) -> None:
    """A hop of attention hides behind milliseconds of compute: here 3 ms each, and 300 of them a step."""
    for cost in ranks.run(_cost, 4):
        assert 0 < cost.hop_s < 20e-6 and 0 <= cost.hop_end_s < 10e-6
        assert 0 < cost.step_s < 6e-3
        assert cost.share(300, 300 * 3e-3) < 0.01, str(cost)
        assert cost.share(300, 0.9) == pytest.approx((cost.step_s + 300 * (cost.hop_s + cost.hop_end_s)) / 0.9)


def _without() -> tuple[bool, float]:
    groups = join_world()
    clock = WaitClock()
    exchange = GroupExchange(groups.cp_group(0, 2), groups.rank, clock)
    hop: Any = exchange.start_hop([torch.ones(3)], 3, tag=0)
    hop.wait()
    exchange.all_gather(torch.ones(1), [1, 1])
    return hop._mark is None, clock.seconds


def test_without_a_recorder_nothing_is_noted_and_waiting_is_still_counted(ranks: RankPool) -> None:
    for unmarked, seconds in ranks.run(_without, 2):
        assert unmarked and seconds > 0


def test_seconds_in_the_queue_for_a_core_only_grow_and_are_none_for_a_closed_one() -> None:
    queue = CoreQueue()
    assert queue.seconds() == 0
    queue.open()
    before = queue.seconds()
    time.sleep(0.01)
    assert 0 <= before <= queue.seconds()
    queue.close()
    assert queue.seconds() == 0
