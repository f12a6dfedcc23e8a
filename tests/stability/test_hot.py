"""What slow steps owe to samples and kinds, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_dcp.stability.hot import by_kind, by_sample, critical_rank, excess_seconds, kinds_of
from lightning_dcp.stability.record import PackTime, RankTime, StepRecord


def pack(start: float, end: float, tokens: int, samples: tuple[object, ...], **kinds: int) -> PackTime:
    return PackTime(0, 0, 0, 1, start, end, tokens, sample_ids=samples, tokens_by_kind=kinds)


def step(seconds: float, *ranks: RankTime) -> StepRecord:
    return StepRecord(0, seconds, 100, None, ranks)


def test_the_critical_rank_computes_and_receives_for_longest() -> None:
    late, slow_link = RankTime(0, 3.0, 2.0, 0.0, 1.0), RankTime(1, 1.0, 1.0, 3.0, 1.0)
    assert critical_rank(step(5.0, late, slow_link)) == 1
    assert critical_rank(step(5.0, slow_link, RankTime(2, 4.0, 0.0, 0.0, 1.0))) == 1  # the first of equals
    assert critical_rank(step(5.0)) is None


def test_only_slow_steps_have_an_excess() -> None:
    assert excess_seconds(step(2.19), 2.0) == 0.0
    assert excess_seconds(step(2.5), 2.0) == 0.5


def test_ids_that_cannot_be_counted_by_count_as_their_text() -> None:
    packs = [pack(0.0, 1.0, 10, ([1], {"a": 2})), pack(1.0, 2.0, 10, ([1],))]
    assert by_sample(packs, 4.0) == pytest.approx({"[1]": 3.0, "{'a': 2}": 1.0})


def test_samples_share_by_the_packs_time_and_their_tokens() -> None:
    packs = [pack(0.0, 3.0, 90, ("a", "b")), pack(3.0, 4.0, 10, ("b", "c"))]
    told = [replace(packs[0], sample_tokens=(20, 10)), replace(packs[1], sample_tokens=(10, 90))]
    found = by_sample(told, 8.0)
    assert found == pytest.approx({"a": 8 * 3 / 4 * 2 / 3, "b": 8 * (3 / 4 / 3 + 1 / 4 / 10), "c": 8 / 4 * 0.9})
    assert sum(found.values()) == pytest.approx(8.0)
    assert by_sample(packs, 8.0) == pytest.approx({"a": 3.0, "b": 4.0, "c": 1.0})


def test_packs_without_times_share_by_tokens() -> None:
    packs = [pack(0.0, 0.0, 30, ("a",)), pack(0.0, 0.0, 10, ("b",))]
    assert by_sample(packs, 4.0) == pytest.approx({"a": 3.0, "b": 1.0})
    assert by_sample([], 4.0) == {}


def test_kinds_share_by_their_tokens_and_the_rest_is_text() -> None:
    packs = [pack(0.0, 1.0, 100, ("a",), tool=75), pack(1.0, 2.0, 50, ("b",), user=50)]
    assert kinds_of(packs[0]) == {"tool": 75, "text": 25}
    assert by_kind(packs, 4.0) == pytest.approx({"tool": 1.5, "text": 0.5, "user": 2.0})
