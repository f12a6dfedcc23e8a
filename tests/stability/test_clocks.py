"""Clocks: of machines that started at different times, and of devices."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dcp.parallel import clock_offsets
from lightning_dcp.parallel.stamps import CudaStamps, HostStamps, stamps_of
from tests.parallel.support import join_world
from tests.support.ranks import RankPool


def _offset(boots: list[str], ahead: list[float]) -> tuple[float, bool, float]:
    """As if ranks were on machines whose clocks started at different times; with what the common clock says now."""
    groups = join_world()
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead[groups.rank])
    original = clock_offsets.clock_name, clock_offsets.time
    clock_offsets.clock_name, clock_offsets.time = lambda: boots[groups.rank], clock  # type: ignore[assignment]
    try:
        offset, several = clock_offsets.clock_offset(groups.control, groups.world_ranks)
    finally:
        clock_offsets.clock_name, clock_offsets.time = original  # type: ignore[assignment]
    return offset, several, ahead[groups.rank] + offset


def test_clocks_of_other_machines_are_brought_to_the_first_ranks(ranks: RankPool) -> None:
    results = ranks.run(_offset, 4, ["a", "a", "b", "c"], [5.0, 5.0, 905.0, -70.0])
    assert [offset for offset, _, _ in results[:2]] == [0.0, 0.0] and all(several for _, several, _ in results)
    for _, _, common in results:
        assert common == pytest.approx(5.0, abs=0.02)  # a busy machine delays even the quickest of the answers


def test_on_one_machine_the_offset_is_exactly_none(ranks: RankPool) -> None:
    assert ranks.run(_offset, 2, ["a", "a"], [0.0, 0.0]) == [(0.0, False, 0.0)] * 2


class _Event:
    """Stands in for a CUDA event: the device is 3 s behind the host, and idle when it is waited for."""

    device_now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: Any) -> None:
        self.at = _Event.device_now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        assert self.at is not None and end.at is not None
        return 1e3 * (end.at - self.at)


def test_moments_of_a_device_are_told_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: _Event.device_now + 3.0)
    stamps = stamps_of(torch.device("cuda", 0))
    assert isinstance(stamps, CudaStamps)
    for _ in range(2):  # events are used again in the next step
        marks = []
        for moment in (1.0, 1.5, 4.0):
            _Event.device_now = moment
            marks.append(stamps.now())
        _Event.device_now = 10.0
        assert stamps.seconds(marks) == pytest.approx([4.0, 4.5, 7.0])
    assert len(stamps._events) == 3


def test_moments_of_the_host_are_its_own() -> None:
    stamps = stamps_of(torch.device("cpu"))
    assert isinstance(stamps, HostStamps)
    before = time.perf_counter()
    assert before <= stamps.now() and stamps.seconds([before]) == [before]
