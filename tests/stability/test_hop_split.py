"""Waiting and transfer told apart, from moments that are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dcp.parallel.hop_split import (
    NOBODY,
    CollectiveTable,
    HopTable,
    incoming_links,
    lower_quartile,
    outgoing_links,
    split_collectives,
    split_hops,
    times_for_peers,
)
from lightning_dcp.parallel.pack_spans import blocked_spans, pack_spans
from lightning_dcp.parallel.rank_times import PackShare


def table(*rows: tuple[int, int, float, float, float, float], together: bool = False) -> HopTable:
    """Hops ``(source, target, posted, wait begun, message there, done)``."""
    source, target = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    sizes = np.full(len(rows), 100)
    return HopTable(source, target, sizes, sizes, np.array([row[2:] for row in rows]), together)


def parts(hops: HopTable, told: dict[int, list[float]]) -> list[list[float]]:
    """Waiting for the sender, transfer, waiting for the receiver, transfer; of each hop."""
    return np.diff(split_hops(hops, {p: np.array(t) for p, t in told.items()}), axis=1).round(9).tolist()


@pytest.mark.parametrize(
    ("sender", "receiver", "expected"),
    [
        (0.0, 0.0, [0, 4, 0, 2]),  # both were there: all of it is transfer
        (4.0, 0.0, [2, 2, 0, 2]),  # the sender came late
        (9.0, 0.0, [4, 0, 0, 2]),  # clocks are not exact: never more than all of it
        (0.0, 7.0, [0, 4, 1, 1]),  # the receiver came late, when the message from the other side was there
        (5.0, 9.0, [3, 1, 2, 0]),
    ],
)
def test_waiting_ends_when_the_other_side_posts_the_hop(sender: float, receiver: float, expected: list[float]) -> None:
    hops = table((0, 2, 1.0, 2.0, 6.0, 8.0))
    assert parts(hops, {0: [sender], 2: [receiver]}) == [expected]


def test_in_a_group_of_two_one_peer_is_both_and_hops_are_matched_in_order() -> None:
    hops = table((1, 1, 0, 1, 3, 3), (1, NOBODY, 3, 4, 8, 8), (NOBODY, 1, 5, 8, 8, 12))
    # from rank 1: when it posted what this rank received, then when it posted what this rank sent
    assert parts(hops, {1: [2.0, 6.0, 0.0, 9.0]}) == [[1, 1, 0, 0], [2, 2, 0, 0], [0, 0, 1, 3]]


def test_where_both_directions_end_together_both_sides_are_waited_for() -> None:
    hops = table((0, 2, 1.0, 2.0, 8.0, 8.0), together=True)
    assert parts(hops, {0: [3.0], 2: [5.0]}) == [[3, 3, 0, 0]]


def test_each_peer_is_told_what_it_had_to_do_with() -> None:
    hops = table((0, 2, 1, 1, 1, 1), (0, NOBODY, 2, 2, 2, 2), (NOBODY, 2, 3, 3, 3, 3))
    collectives = CollectiveTable(((0, 1), (0, 1, 2, 3)), np.array([[4.0, 5.0], [6.0, 7.0]]))
    told = {place: times.tolist() for place, times in times_for_peers(hops, collectives, own=1).items()}
    assert told == {0: [1, 2, 4, 6], 2: [1, 3, 6], 3: [6]}


def test_a_collective_waits_for_its_last_rank() -> None:
    hops = table((0, 0, 0, 0, 0, 0))
    collectives = CollectiveTable(((0, 1), (0, 1, 2)), np.array([[1.0, 5.0], [6.0, 9.0]]))
    told = {0: np.array([0.0, 0.0, 3.0, 0.0]), 2: np.array([99.0])}
    moments = split_collectives(collectives, told, hops)
    assert np.diff(moments, axis=1).tolist() == [[2, 2], [3, 0]]


def test_links_are_summed_up_by_their_source() -> None:
    rows = [(0, 2, i, i + 1.0, i + 1.0 + took, i + 9.0) for i, took in enumerate((1.0, 2.0, 3.0, 4.0, 5.0))]
    hops = table(*rows, (3, NOBODY, 0, 0, 7, 7))
    told = {0: np.arange(5.0), 2: np.arange(5.0), 3: np.array([1.0])}
    first, second = incoming_links(hops, split_hops(hops, told), told, own=1)
    assert (first.source, first.target, first.hops, first.num_bytes) == (0, 1, 5, 500)
    assert (first.transfer_s, first.typical_s, first.fastest_s) == (15, 2, 3)
    assert (second.source, second.transfer_s, second.fastest_s) == (3, 6, 6)


def test_the_sender_sums_up_links_where_both_ends_have_to_be_asked() -> None:
    hops = table((0, 2, 0, 1, 5, 5), (0, 2, 5, 6, 8, 8), together=True)
    told = {0: np.array([0.0, 0.0]), 2: np.array([2.0, 7.0])}
    (link,) = outgoing_links(hops, split_hops(hops, told), told, own=1)
    assert (link.source, link.target, link.hops, link.transfer_s, link.typical_s, link.fastest_s) == (1, 2, 2, 4, 1, 1)


def test_the_lower_quartile_is_one_of_the_values() -> None:
    assert [lower_quartile(np.arange(float(n))) for n in (1, 2, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_packs_have_spans_without_gaps_and_short_ones_are_computing() -> None:
    hops = table((0, 2, 0.0, 2.0, 6.0, 6.0), (0, 2, 6.0, 7.0, 7.0005, 7.0005))
    blocked = blocked_spans(split_hops(hops, {0: np.array([4.0, 0.0]), 2: np.zeros(2)}), np.array([[12.0, 13.0, 15.0]]))
    shares = [PackShare(0, 0, 2, 8), PackShare(1, 0, 4, 8), PackShare(2, 0, 1, 8)]
    spans = pack_spans(shares, np.array([[0.0, 10.0], [10.0, 15.0], [15.0, 16.0]]), blocked)
    assert [span.spans for span in spans] == [
        (("compute", 0, 2), ("wait", 2, 4), ("transfer", 4, 6), ("compute", 6, 10)),
        (("compute", 10, 12), ("wait", 12, 13), ("transfer", 13, 15)),
        (("compute", 15, 16),),
    ]
    assert all(span.spans == () for span in pack_spans(shares, np.zeros((3, 2)), None))
