import json
import math
import statistics

import numpy as np
import pytest

from lightning_dcp.commands import bench_measure
from lightning_dcp.commands.bench_contenders import CONTENDERS, Outcome, PeerLimit, ask, plan_megatron, plan_static
from lightning_dcp.commands.bench_measure import ModeResult, Quality, Speed, bound_of, measure_quality, measure_speed
from lightning_dcp.commands.bench_plan import bench_plan
from lightning_dcp.commands.bench_tables import milliseconds, quality_table, speed_table
from lightning_dcp.commands.bench_workloads import Size, Workload, find_workloads, parse_sizes
from lightning_dcp.errors import ConfigurationError, DataError
from lightning_dcp.schedule import Pack, StepPlan, preset, simulate
from lightning_dcp.schedule.megatron import MegatronScheduler

COST = preset("h100")


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "real.txt"
    random = np.random.default_rng(0)
    path.write_text("\n".join(map(str, random.lognormal(7, 1.5, 300).astype(int) + 1)))
    return path


def text_of(table, capsys):
    from rich.console import Console

    Console(width=200).print(table)
    return capsys.readouterr().out


# ------------------------------------------------------------------ the command


def test_the_command_prints_both_tables_and_writes_every_number(lengths_file, tmp_path, capsys):
    out = tmp_path / "bench.json"
    bench_plan(
        ["mine", "megatron-mock"],
        files=[f"mine={lengths_file}"],
        sizes=["4x24@2048", "8x64@2048"],
        draws=2,
        seed=5,
        speed_sizes=["4x16", "4x64"],
        json=str(out),
    )
    printed = capsys.readouterr().out
    for word in (
        "mine",
        "megatron-mock",
        "4x24@2048",
        "dynamic",
        "static",
        "megatron",
        "Planning time on mine",
        "4x64",
    ):
        assert word in printed
    values = json.loads(out.read_text())
    assert values["cost_model"] == COST.to_dict()
    assert (values["draws"], values["seed"], values["speed_workload"]) == (2, 5, "mine")
    assert len(values["quality"]) == 2 * 2 * 3
    for row in values["quality"]:
        assert row["planned"] == row["draws"] == 2
        for mode in ("free", "lockstep"):
            result = row["modes"][mode]
            assert len(result["ratios"]) == len(result["planning_s"]) == 2
            assert min(result["ratios"]) >= 1 - 1e-9
            assert result["mean"] == pytest.approx(statistics.fmean(result["ratios"]))
            assert result["max"] == max(result["ratios"])
            assert f"{result['mean']:.3f}" in printed
    assert [(row["scheduler"], row["size"]["samples"]) for row in values["speed"]] == [
        (name, samples) for samples in (16, 64) for name in ("dynamic", "static", "megatron")
    ]
    assert all(row["growth"]["free"] is None for row in values["speed"][:3])
    assert all(isinstance(row["growth"]["free"], float) for row in values["speed"][3:])


def test_ratios_depend_on_the_seed_alone(lengths_file, tmp_path):
    def ratios(name, seed):
        path = tmp_path / f"{name}.json"
        files = [f"mine={lengths_file}"]
        bench_plan(["mine", "rl"], files=files, sizes=["4x16"], draws=2, seed=seed, speed_sizes=[], json=str(path))
        return [row["modes"]["free"]["ratios"] for row in json.loads(path.read_text())["quality"]]

    assert ratios("a", 0) == ratios("b", 0)
    assert ratios("a", 0) != ratios("c", 1)


def test_peers_are_optional(capsys, tmp_path):
    path = tmp_path / "b.json"
    bench_plan(["rl"], sizes=["4x16"], draws=1, peers=[], speed_sizes=[], json=str(path))
    values = json.loads(path.read_text())
    assert [row["scheduler"] for row in values["quality"]] == ["dynamic"]
    assert (values["speed"], values["megatron_scheduler"]) == ([], None)
    printed = capsys.readouterr().out
    assert "static" not in printed
    assert "Megatron" not in printed


def test_a_peer_that_is_too_slow_is_skipped_visibly(capsys, tmp_path):
    path = tmp_path / "b.json"
    sizes = ["4x16", "8x64"]
    bench_plan(["rl"], sizes=sizes, draws=3, peer_limit_s=1e-9, peers=["static"], speed_sizes=sizes, json=str(path))
    rows = {(r["scheduler"], r["size"]["ranks"]): r for r in json.loads(path.read_text())["quality"]}
    assert {key: row["planned"] for key, row in rows.items()} == {
        ("dynamic", 4): 3,
        ("static", 4): 1,
        ("dynamic", 8): 3,
        ("static", 8): 0,
    }
    printed = capsys.readouterr().out
    assert "1 of 3 batches" in printed
    assert "skipped: would plan a batch for more than 1e-09 s." in printed
    assert [row["skipped"] for row in json.loads(path.read_text())["speed"]] == [False, False, False, True]


def test_refusals_are_counted_and_the_first_is_told(capsys):
    bench_plan(["megatron-mock"], sizes=["8x4@8192"], draws=2, peers=["static"], speed_sizes=["8x4"])
    printed = capsys.readouterr().out
    assert "lockstep 2 refused" in printed
    assert "refused: static, first on megatron-mock 8x4@8192: 4 sample(s) cannot be 8 packs" in printed


def test_megatron_is_refused_on_planes_that_it_cannot_plan(capsys):
    bench_plan(["megatron-mock"], sizes=["6x32@8192"], draws=1, peers=["megatron"], speed_sizes=[])
    printed = capsys.readouterr().out
    assert "  1 refused" in printed
    assert "a DPxCP plane of 6 ranks" in printed


def test_a_million_samples_are_measured_when_asked_for(monkeypatch, capsys):
    from lightning_dcp.commands import bench_plan as module

    monkeypatch.setattr(module, "MILLION", "2x300")
    bench_plan(["rl"], sizes=["2x8"], draws=1, peers=[], speed_sizes=[], million=True)
    assert "2x300@8192" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaints"),
    [
        (
            {"draws": 0, "seed": -1, "peer_limit_s": 0.0, "json": "/none/x.json"},
            ["--draws 0", "--seed -1", "--peer-limit-s 0.0", "--json /none/x.json"],
        ),
        (
            {"workloads": ["chats", "rl", "talks"]},
            ["workload 'chats'", "workload 'talks'", "use some of megatron-mock"],
        ),
        (
            {"sizes": ["8x", "8x64@0", "ax3", "8x64"]},
            ["--sizes '8x'", "--sizes '8x64@0'", "--sizes 'ax3'", "3 problem(s)"],
        ),
        ({"speed_sizes": ["0x5"]}, ["--speed-sizes '0x5'"]),
        ({"files": ["lengths.txt"]}, ["--files 'lengths.txt'", "write NAME=PATH"]),
        ({"files": ["a=/none.txt"]}, ["'/none.txt'", "cannot be read"]),
        ({"cost_model": "none.yaml"}, ["cost model 'none.yaml'"]),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, complaints):
    with pytest.raises(ConfigurationError) as caught:
        bench_plan(**options)
    for complaint in complaints:
        assert complaint in str(caught.value)


def test_a_file_cannot_take_the_name_of_a_distribution(lengths_file):
    with pytest.raises(ConfigurationError, match=r"--files rl=\.\.\."):
        bench_plan(files=[f"rl={lengths_file}"])


def test_a_file_with_a_bad_line_is_refused(tmp_path):
    (tmp_path / "bad.txt").write_text("3\n0\n")
    with pytest.raises(DataError, match=r"bad.txt:2: a length of 0"):
        bench_plan(files=[f"bad={tmp_path / 'bad.txt'}"])


# ------------------------------------------------------------------ workloads


def test_sizes_are_read_with_a_default_limit():
    assert parse_sizes(["8x64", " 32x512@4096 "], "--sizes") == (Size(8, 64, 8192), Size(32, 512, 4096))
    assert [str(size) for size in parse_sizes(["8x64"], "--sizes")] == ["8x64@8192"]


@pytest.mark.parametrize(("size", "longest"), [(Size(8, 1, 2048), 16_384), (Size(64, 1, 8192), 131_072)])
def test_samples_are_cut_to_what_the_plane_holds_and_128k_at_most(size, longest):
    workload = Workload("mine", (size,), (5, 10**6))
    assert sorted({length for batch in workload.batches(size, 40, 0) for length in batch}) == [5, longest]


def test_all_distributions_and_files_are_workloads_by_default(lengths_file):
    found = find_workloads(None, [f"mine={lengths_file}"], None)
    assert [w.name for w in found] == ["mine", "megatron-mock", "rl", "longalign", "llama3-sft"]
    sizes = {w.name: [str(size) for size in w.sizes] for w in found}
    assert sizes["mine"] == [
        "8x64@8192",
        "8x128@8192",
        "8x256@8192",
        "32x256@8192",
        "32x512@8192",
        "64x512@8192",
        "64x1024@8192",
    ]
    assert sizes["megatron-mock"] == ["8x32@2048", "8x128@2048"]
    assert {size.split("x")[0] for size in sizes["rl"]} == {"8", "32", "64"}


def test_lengths_of_json_lines_are_found_by_their_field(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"n": 7}\n{"n": 9}\n')
    (workload,) = find_workloads(["s"], [f"s={tmp_path / 's.jsonl'}:n"], None)
    assert workload.pool == (7, 9)


def test_a_batch_from_a_file_holds_each_sample_once_while_they_last():
    workload = Workload("mine", (), tuple(range(1, 101)))
    first, second = workload.batches(Size(1, 50, 8192), 2, 0)
    assert sorted(first + second) == list(range(1, 101))
    (large,) = workload.batches(Size(1, 1000, 8192), 1, 0)
    assert len(large) == 1000
    assert set(large) <= set(range(1, 101))


def test_draws_of_a_distribution_differ():
    workload = Workload("rl", ())
    batches = workload.batches(Size(8, 64, 8192), 3, 0)
    assert len(set(batches)) == 3
    assert {len(batch) for batch in batches} == {64}


# ------------------------------------------------------------------ contenders and measures


def test_static_gets_the_smallest_size_that_holds_the_longest_sample():
    size = Size(8, 4, 100)
    lengths = [350, 20, 30, 90, 90, 10, 80, 60]
    outcome = plan_static(size, lengths, COST)["free"]
    packs = ([(0, (0, 1, 2)), (4, (3, 4, 5, 6, 7))],)
    expected = StepPlan(8, 100, tuple(lengths), tuple(tuple(Pack(f, 4, s) for f, s in r) for r in packs))
    assert outcome.step_s == pytest.approx(simulate(expected, COST).step_s)


def test_megatron_waits_after_each_of_its_rounds_in_lockstep_only():
    size = Size(8, 64, 8192)
    lengths = Workload("rl", ()).batches(size, 1, 1)[0]
    outcome = plan_megatron(size, lengths, COST)
    rounds = MegatronScheduler(8, 8192).rounds(lengths)
    assert len(rounds) > 1
    done = [0.0] * 8
    waiting = 0.0
    for packs in rounds:
        within = [0.0] * 8
        for pack in packs:
            seconds = COST.pack_seconds([lengths[s] for s in pack.samples], pack.cp_size)
            for times in (done, within):
                end = max(times[rank] for rank in pack.ranks) + seconds
                for rank in pack.ranks:
                    times[rank] = end
        waiting += max(within)
    assert outcome["free"].step_s == pytest.approx(max(done))
    assert outcome["lockstep"].step_s == pytest.approx(waiting)
    assert max(done) < waiting


@pytest.mark.parametrize("name", CONTENDERS)
def test_no_scheduler_beats_the_bound(name):
    for workload in ("megatron-mock", "rl", "longalign", "llama3-sft"):
        size = Size(8, 48, 8192)
        for lengths in Workload(workload, ()).batches(size, 2, 9):
            for mode, outcome in CONTENDERS[name](size, lengths, COST).items():
                assert outcome.step_s is not None, outcome.refusal
                assert outcome.step_s >= bound_of(size, lengths, COST, mode) * (1 - 1e-9)


def test_a_plan_that_breaks_the_rules_of_its_mode_counts_as_refused(monkeypatch):
    class Idle:
        def __init__(self, ranks, limit, cost, mode):
            self.ranks, self.limit, self.mode = ranks, limit, mode

        def schedule(self, lengths):
            packs = ((Pack(0, 1, tuple(range(len(lengths)))),),)
            return StepPlan(self.ranks, self.limit, tuple(lengths), packs, "free")

    monkeypatch.setattr("lightning_dcp.commands.bench_contenders.DynamicScheduler", Idle)
    outcomes = CONTENDERS["dynamic"](Size(2, 3, 100), [5, 6, 7], COST)
    assert outcomes["free"].step_s is not None
    assert outcomes["lockstep"].step_s is None
    assert "rank(s) [1] have no pack" in outcomes["lockstep"].refusal


def test_the_limit_of_peers_looks_ahead_from_the_largest_size_so_far():
    limit = PeerLimit(5.0)
    small, middle, large = Size(8, 64, 8192), Size(16, 128, 8192), Size(32, 256, 8192)
    assert limit.allows("megatron", large)
    limit.saw("megatron", small, 1.0)
    assert limit.allows("megatron", small)
    assert not limit.allows("megatron", middle)  # 4^1.2 = 5.3 times as long
    assert limit.allows("static", large)
    limit.saw("megatron", middle, 0.9)
    assert limit.allows("megatron", large)  # 4.7 s
    limit.saw("megatron", large, 9.0)
    assert not limit.allows("megatron", large)
    assert limit.allows("megatron", middle)


def test_one_slow_plan_among_quick_ones_does_not_count():
    limit = PeerLimit(5.0)
    for seconds in (0.1, 60.0):
        limit.saw("megatron", Size(8, 64, 8192), seconds)
    assert limit.allows("megatron", Size(8, 64, 8192))
    assert limit.allows("megatron", Size(8, 128, 8192))


def test_a_peer_shows_its_speed_on_a_small_batch_before_it_gets_a_large_one(monkeypatch):
    asked = []

    def planner(size, lengths, cost):
        asked.append((size.samples, len(lengths)))
        return {mode: Outcome(1.0, 0.01) for mode in ("free", "lockstep")}

    monkeypatch.setitem(CONTENDERS, "megatron", planner)
    limit = PeerLimit(5.0)
    assert ask("megatron", Size(8, 10**6, 8192), [100] * 10**6, COST, limit) is None
    assert asked == [(512, 512)]
    assert ask("megatron", Size(8, 1024, 8192), [100] * 1024, COST, limit) is not None
    assert asked == [(512, 512), (1024, 1024)]


def test_the_own_scheduler_is_never_skipped():
    limit = PeerLimit(5.0)
    limit.saw("dynamic", Size(8, 64, 8192), 100.0)
    assert limit.allows("dynamic", Size(8, 64, 8192))


def test_growth_is_the_exponent_between_batches_on_the_same_plane(monkeypatch):
    def planner(size, lengths, cost):
        return {"free": Outcome(1.0, 1e-6 * len(lengths) ** 2), "lockstep": Outcome(None, 0.1, "no")}

    monkeypatch.setitem(bench_measure.CONTENDERS, "dynamic", planner)
    done = []
    for size in (Size(4, 10, 8192), Size(8, 20, 8192), Size(4, 40, 8192), Size(4, 80, 8192)):
        done.append(measure_speed(Workload("rl", ()), size, "dynamic", 0, COST, PeerLimit(5), done))
    assert [speed.growth["free"] for speed in done] == [None, None, pytest.approx(2), pytest.approx(2)]
    assert [speed.planning_s["lockstep"] for speed in done] == [None] * 4


def test_quality_uses_the_bound_of_the_same_batch_and_mode(monkeypatch):
    def planner(size, lengths, cost):
        return {mode: Outcome(3 * bound_of(size, lengths, cost, mode), 0.5) for mode in ("free", "lockstep")}

    monkeypatch.setitem(bench_measure.CONTENDERS, "static", planner)
    size = Size(4, 16, 8192)
    (result,) = measure_quality(Workload("rl", (size,)), size, ["static"], 3, 0, COST, PeerLimit(5))
    for mode in ("free", "lockstep"):
        assert result.modes[mode].ratios == pytest.approx((3.0,) * 3)
        assert result.modes[mode].median_planning_s == 0.5


# ------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000123, "0.123"),
        (0.00456, "4.56"),
        (0.0456, "45.6"),
        (0.456, "456"),
        (12.3456, "12,346"),
        (0.0, "0"),
        (1e-8, "0.000"),
    ],
)
def test_milliseconds_have_three_digits(seconds, text):
    assert milliseconds(seconds) == text


def test_the_quality_table_names_each_batch_once(capsys):
    good = ModeResult((1.0, 1.5), (0.001, 0.003), ())
    bad = ModeResult((), (), ("no", "no"))
    assert math.isnan(bad.mean)
    size = Size(8, 64, 4096)
    rows = [
        Quality("rl", size, "dynamic", 2, 2, {"free": good, "lockstep": good}),
        Quality("rl", size, "static", 2, 2, {"free": good, "lockstep": bad}),
        Quality("rl", size, "megatron", 2, 0, {"free": ModeResult((), (), ()), "lockstep": ModeResult((), (), ())}),
    ]
    lines = text_of(quality_table(rows), capsys).splitlines()
    assert [line.split() for line in lines if "dynamic" in line] == [
        ["rl", "8x64@4096", "dynamic", "1.250", "1.500", "2.00", "1.250", "1.500", "2.00"]
    ]
    assert [line.split() for line in lines if "static" in line] == [
        ["static", "1.250", "1.500", "2.00", "-", "-", "-", "lockstep", "2", "refused"]
    ]
    assert [line.split() for line in lines if "megatron" in line] == [["megatron", *"------", "skipped"]]
    assert "note" not in text_of(quality_table(rows[:1]), capsys)


def test_the_speed_table_shows_what_was_left_out(capsys):
    size = Size(8, 64, 4096)
    rows = [
        Speed(size, "dynamic", {"free": 0.02, "lockstep": None}, growth={"free": 1.25, "lockstep": None}),
        Speed(size, "megatron", {"free": None, "lockstep": None}, skipped=True),
    ]
    text = text_of(speed_table(rows, "rl"), capsys)
    assert "Planning time on rl" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["8x64@4096", "dynamic", "20.0", "1.25", "refused"] in lines
    assert ["megatron", "skipped", "skipped"] in lines
