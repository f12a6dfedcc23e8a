"""`lightning-dcp bench boundaries`: simulated steps are steady with audited cuts where uniform ones are not."""

import json
from itertools import pairwise
from random import Random

import pytest

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.commands.bench_boundaries import AUDITED, bench_boundaries, cases_of
from lightning_dcp.commands.bench_boundaries_chats import ChatPack, draw_chat, draw_packs
from lightning_dcp.commands.bench_boundaries_steps import Machine, simulate_steps
from lightning_dcp.errors import ConfigurationError
from lightning_dcp.schedule import CostModel, preset

RANKS, TOKENS = 16, 4096


def test_audited_cuts_are_steady_where_uniform_ones_are_not():
    """The numbers of the command itself, with fewer steps; nothing is set for one of the cases alone."""
    machine, budget = Machine(RANKS, preset("h100"), (RANKS // 2 - 1, RANKS // 2)), BoundaryBudget(TOKENS, 2048)
    packs = draw_packs(400, RANKS * TOKENS, 3.0, 0)
    cases = {case.name: case for case in cases_of(machine, budget)}
    names = "uniform cuts", "uniform cuts, fixed ring order", AUDITED
    uniform, ordered, audited = (simulate_steps(cases[name], packs, machine, budget, 0) for name in names)
    assert uniform.ratio >= 1.3
    assert audited.ratio <= 1.11
    assert audited.ratio < ordered.ratio < uniform.ratio
    assert uniform.throughput < ordered.throughput < audited.throughput
    assert uniform.tokens == audited.tokens


def test_the_search_for_the_ring_leaves_the_slow_link_out():
    machine = Machine(4, preset("h100"), (1, 2), slow_share=0.5, slowdown=3.0)
    rings = cases_of(machine, BoundaryBudget(100, 50))[1].rings
    assert not {(1, 2), (2, 1)} & set(rings.hops(0, 4))


def test_a_step_without_jitter_is_the_slowest_ranks_work_and_the_slowest_hops():
    cost = CostModel(1.0, 0.001, hop_latency=5.0, hop_bytes=2.0, bandwidth=4.0)
    machine = Machine(2, cost, (0, 1), slow_share=1.0, slowdown=3.0, jitter=0.0)
    pack = ChatPack((100,), ((),))
    by_name = {case.name: case for case in cases_of(machine, BoundaryBudget(100, None))}
    (seconds,) = simulate_steps(by_name["uniform cuts"], [pack], machine, BoundaryBudget(100, None), 0).seconds
    linear, attention = 50.0, 0.001 * (100**2 - 50**2)
    hop = 3.0 * (5.0 + 2.0 * 50 / 4.0)
    assert seconds == pytest.approx(linear + attention / 2 + max(attention / 2, hop))


def test_chats_are_unequal_with_dense_turns_next_to_each_other():
    chats = [draw_chat(Random(n), 5000, 3.0) for n in range(300)]
    lengths = sorted(chat[-1].end for chat in chats)
    assert lengths[290] > 5 * lengths[30]
    dense = [[segment.kind == "tool" for segment in chat] for chat in chats]
    assert any(a and b for kinds in dense for a, b in pairwise(kinds))
    packs = draw_packs(20, 5000, 3.0, 3)
    assert packs == draw_packs(20, 5000, 3.0, 3)
    assert all(0 < pack.num_tokens <= 5000 for pack in packs)


def test_the_command_prints_a_table_and_writes_every_number(tmp_path, capsys):
    out = tmp_path / "bench.json"
    results = bench_boundaries(8, ranks=4, max_tokens=1024, dense_limit=400, json=str(out))
    printed = capsys.readouterr().out
    for word in ("uniform cuts", "fixed ring order", "greedy shards", AUDITED, "p99/p50", "1.00x"):
        assert word in printed
    values = json.loads(out.read_text())
    assert [value["name"] for value in values] == [result.name for result in results]
    assert all(len(value["seconds"]) == 8 for value in values)


def test_all_bad_options_are_told_at_once():
    with pytest.raises(ConfigurationError) as error:
        bench_boundaries(
            0, ranks=1, density=0.0, slow_share=2.0, slowdown=0.5, jitter=-1.0, seed=-1, json="/no/where/x"
        )
    assert len(error.value.problems) == 8
