"""Settings of alarms: what is refused, and that YAML can make them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lightning_dcp.errors import ConfigurationError
from lightning_dcp.stability.settings import DEVICE_FLOOR_S, HOST_FLOOR_S, AlarmSettings


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as told:
        AlarmSettings(
            window=0, needed=True, link_factor=1.0, rank_factor=float("nan"), link_floor_s=-1.0, rank_floor_s="x"
        )  # type: ignore[arg-type]
    asked = [problem.asked for problem in told.value.problems]
    names = ["window", "needed", "link_factor", "rank_factor", "link_floor_s", "rank_floor_s"]
    assert [text.split("=")[0] for text in asked] == names


@pytest.mark.parametrize("name", ["link_factor", "link_floor_s", "rank_factor", "rank_floor_s"])
@pytest.mark.parametrize("value", [10**400, [], {}, "", False, float("inf")], ids=lambda value: f"{value!r:.9}")
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=name):
        AlarmSettings(**{name: value})


@pytest.mark.parametrize(("window", "needed"), [(12, 6), (12, 13)])
def test_an_alarm_needs_more_than_half_of_the_window_and_no_more_than_it(window: int, needed: int) -> None:
    with pytest.raises(ConfigurationError, match="more than half"):
        AlarmSettings(window=window, needed=needed)


def test_settings_are_plain_values() -> None:
    settings = AlarmSettings(window=20, needed=15, link_floor_s=0.002)
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    assert AlarmSettings(**values) == settings


def test_the_floor_of_hops_follows_the_clock_that_times_them() -> None:
    assert AlarmSettings().link_floor("cpu") == HOST_FLOOR_S > AlarmSettings().link_floor("cuda") == DEVICE_FLOOR_S
    assert AlarmSettings(link_floor_s=0.0).link_floor("cpu") == 0.0
