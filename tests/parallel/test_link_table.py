"""The table of links: measured in rounds of pairs, the same on all ranks, kept in a file and taken from it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dcp.errors import ConfigurationError, DataError
from lightning_dcp.parallel import exchange as exchange_module
from lightning_dcp.parallel import link_measure
from lightning_dcp.parallel.link_file import load_or_measure
from lightning_dcp.parallel.link_measure import _partners, _slowest, measure_link_table
from lightning_dcp.parallel.link_table import LinkTable, MeasuredOn
from lightning_dcp.parallel.links import LARGE, SMALL, Link
from tests.parallel.support import join_world
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
HERE = MeasuredOn((("a",), ("b",)), "gloo", "cpu")
TABLE = LinkTable(((0.0, 2.0), (4.0, 0.0)), ((0.0, 8.0), (16.0, 0.0)), HERE)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_in_each_round_pairs_are_disjoint_and_in_all_rounds_each_meets_each_other_one_once(ranks: int) -> None:
    met = [_partners(rank, ranks) for rank in range(ranks)]
    assert all(sorted(partners) == [r for r in range(ranks) if r != rank] for rank, partners in enumerate(met))
    waiting = [list(partners) for partners in met]
    rounds = 0
    while any(waiting):  # a pair measures when each is the other's next: nobody waits for ever
        pairs = [(a, w[0]) for a, w in enumerate(waiting) if w and waiting[w[0]][0] == a]
        assert pairs
        for a, _ in pairs:
            waiting[a].pop(0)
        rounds += 1
    assert rounds == (0 if ranks == 1 else ranks - 1 + ranks % 2)


def test_seconds_of_a_hop() -> None:
    assert TABLE.seconds(0, 1, 16) == 4.0 and TABLE.seconds(1, 0, 16) == 5.0 and TABLE.seconds(1, 1, 16) == 0.0
    assert TABLE.ranks == 2 and TABLE.link(1, 0) == Link(4.0, 16.0) and TABLE.nodes == (("a",), ("b",))


def test_json_holds_everything_and_nothing_but_hosts_backend_and_device_tells_of_the_machine() -> None:
    data = json.loads(json.dumps(TABLE.to_json()))
    assert LinkTable.from_json(data) == TABLE
    assert set(data) == {"kind", "latency_s", "bandwidth", "measured_on"}
    assert set(data["measured_on"]) == {"hosts", "backend", "device"}
    told = LinkTable(TABLE.latency_s, TABLE.bandwidth)
    assert LinkTable.from_json(told.to_json()) == told and told.nodes is None


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "cost model"},
        {"latency_s": [[0.0, 1.0]]},
        {"latency_s": [[0.0, 0.0], [1.0, 0.0]]},
        {"bandwidth": [[0.0, math.inf], [1.0, 0.0]]},
        {"bandwidth": [[0.0, "fast"], [1.0, 0.0]]},
        {"latency_s": [[0.0, 10**400], [1.0, 0.0]]},
        {"measured_on": {"hosts": [["a"], ["b"]]}},
    ],
    ids="{!s:.60}".format,
)
def test_what_is_no_table_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        LinkTable.from_json(TABLE.to_json() | change)


def test_of_several_planes_links_the_slowest_counts() -> None:
    every = [{(0, 1): (1.0, LARGE / 8)}, {(0, 1): (2.0, LARGE / 16), (1, 0): (4.0, LARGE / 4)}, {}]
    assert _slowest(every) == {(0, 1): Link(2.0, 8.0), (1, 0): Link(4.0, 4.0)}


# --- on ranks


def _measure(tensor_parallel: int = 1) -> tuple[LinkTable, float]:
    groups = join_world(tensor_parallel)
    start = time.perf_counter()
    return measure_link_table(groups, CPU), time.perf_counter() - start


@pytest.mark.parametrize(
    ("world", "tensor_parallel", "places"), [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (8, 1, 8)]
)
def test_all_links_are_measured_and_all_ranks_know_the_same(
    ranks: RankPool, world: int, tensor_parallel: int, places: int
) -> None:
    results = ranks.run(_measure, world, tensor_parallel)
    table = results[0][0]
    assert all(other == table for other, _ in results)
    assert table.ranks == places and table.measured_on is not None
    assert [len(hosts) for hosts in table.measured_on.hosts] == [tensor_parallel] * places
    assert (table.measured_on.backend, table.measured_on.device) == ("gloo", "cpu")
    for i in range(places):
        for j in range(places):
            if i != j:
                link = table.link(i, j)
                assert 1e-6 < link.latency_s < 10 and 1e5 < link.bandwidth < 1e12
                assert math.frexp(link.latency_s)[0] == math.frexp(link.bandwidth)[0] == 0.5  # powers of two
    assert max(seconds for _, seconds in results) < 30  # 1 s on an idle machine


def _measure_with_a_slow_link(source: int, target: int) -> LinkTable:
    """What is large takes 80 ms more from one rank to another, and not back."""
    groups = join_world()
    whole = exchange_module.GroupExchange.start_hop

    def start_hop(self: Any, tensors: Any, tokens: int, *, tag: int) -> Any:
        hop = whole(self, tensors, tokens, tag=tag)
        towards = {groups.plane_ranks[source], groups.plane_ranks[target]} == set(self._group.global_ranks)
        if towards and groups.rank == target and tokens > SMALL:
            time.sleep(0.08)
        return hop

    exchange_module.GroupExchange.start_hop = start_hop  # type: ignore[method-assign]
    try:
        return link_measure.measure_link_table(groups, CPU)
    finally:
        exchange_module.GroupExchange.start_hop = whole  # type: ignore[method-assign]


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 0)])
def test_a_link_that_is_slow_in_one_direction_is_slow_in_that_direction(
    ranks: RankPool, source: int, target: int
) -> None:
    table = ranks.run(_measure_with_a_slow_link, 3, source, target)[0]
    planted = table.link(source, target).bandwidth
    others = [table.link(i, j).bandwidth for i in range(3) for j in range(3) if i != j and (i, j) != (source, target)]
    assert planted <= 2**26 < min(others)  # 4 MiB in 80 ms are 52 MB/s


# --- the file


def _load(path: str, rounds: int = 1) -> list[tuple[LinkTable, list[str]]]:
    groups = join_world()
    results = []
    for _ in range(rounds):
        said: list[str] = []
        results.append((load_or_measure(path, groups, CPU, said.append), said))
    return results


def test_a_file_is_written_once_and_taken_after_that(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "links.json"
    results = ranks.run(_load, 3, str(path), 2)
    first, second = results[0]
    assert "measured in" in first[1][0] and "the file was not there yet" in first[1][0] and str(path) in first[1][0]
    assert second[1] == [f"links between 3 ranks taken from {path}"] and len(first[1]) == 1
    assert all(table == first[0] and not said for rank in results[1:] for table, said in rank)
    assert second[0] == first[0] == LinkTable.from_json(json.loads(path.read_text()))
    assert [file.name for file in path.parent.iterdir()] == ["links.json"]


@pytest.mark.parametrize("other", ["hosts", "backend", "device", "ranks"])
def test_a_file_of_another_machine_is_measured_again_and_written(ranks: RankPool, tmp_path: Path, other: str) -> None:
    path = tmp_path / "links.json"
    [(table, _)] = ranks.run(_load, 2, str(path))[0]
    data = table.to_json()
    here = dict(data["measured_on"])
    if other == "ranks":
        data = {**TABLE.to_json(), "latency_s": [[0.0]], "bandwidth": [[0.0]], "measured_on": here}
    else:
        data["measured_on"] = here | {other: [["elsewhere"], ["there"]] if other == "hosts" else "another"}
    path.write_text(json.dumps(data))
    results = ranks.run(_load, 2, str(path))
    assert "of other machines or ranks" in results[0][0][1][0]
    assert results[0][0][0] == results[1][0][0] == LinkTable.from_json(json.loads(path.read_text()))
    assert results[0][0][0].measured_on == table.measured_on


def _refused(path: str) -> str:
    groups = join_world()
    with pytest.raises(ConfigurationError) as caught:
        load_or_measure(path, groups, CPU)
    return str(caught.value)


def test_a_file_of_something_else_is_refused_on_all_ranks_and_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    for content in ('{"messages": []}', "not json", "[]", "[" * 100_000):
        path = tmp_path / "train.jsonl"
        path.write_text(content)
        texts = ranks.run(_refused, 2, str(path))
        assert all(f"links_file='{path}'" in text and "name a file of measured links" in text for text in texts)
        assert path.read_text() == content


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"], ids=["long", "nul"])
def test_a_path_that_no_file_can_have_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path, name: str) -> None:
    texts = ranks.run(_refused, 2, str(tmp_path / name))
    assert all("links_file=" in text and "name a file" in text for text in texts)


def test_a_file_that_cannot_be_written_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    texts = ranks.run(_refused, 2, str(tmp_path / "file" / "links.json"))
    assert all("name a file that can be written" in text for text in texts)


def test_without_a_file_links_are_measured(ranks: RankPool) -> None:
    results = ranks.run(_load_without, 2)
    assert results[0][0] == results[1][0]
    assert "no file for them was named" in results[0][1][0] and results[1][1] == []


def _load_without() -> tuple[LinkTable, list[str]]:
    said: list[str] = []
    return load_or_measure(None, join_world(), CPU, said.append), said
