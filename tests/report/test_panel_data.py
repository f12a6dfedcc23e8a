"""The panel's numbers: each part computed from runs in which the answer is known."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_dcp.errors import DataError
from lightning_dcp.report.panel import panel_of
from lightning_dcp.report.panel.comparison import histogram
from lightning_dcp.report.panel.draw.axes import Scale, apart, ticks
from lightning_dcp.report.panel.draw.tags import DOT, polyline
from lightning_dcp.report.panel.events import MOST_ROWS, event_log
from lightning_dcp.report.panel.facts import facts, run_names, words
from lightning_dcp.report.panel.measured import measure, shown_ranks
from lightning_dcp.report.panel.series import step_series
from lightning_dcp.report.panel.shards import MOST_POINTS, shard_budgets
from lightning_dcp.report.panel.texts import comparison_rows, main_cause, numbers
from lightning_dcp.report.panel.timeline import Stretch, coarse, timelines
from lightning_dcp.stability.record import Event, Interval, LinkTime, PackTime, RankTime, StepRecord
from lightning_dcp.stability.run_folder import Run
from tests.report.panel_runs import MadeUp, tiny


def step(number, seconds=1.0, *, busy=(0.8, 0.6), wait=(0.0, 0.2), transfer=(0.1, 0.1), expected=(0.4, 0.3), **more):
    ranks = tuple(
        RankTime(r, b, w, t, e, 1000 * (r + 1))
        for r, (b, w, t, e) in enumerate(zip(busy, wait, transfer, expected, strict=True))
    )
    return StepRecord(number, seconds, 100, None, ranks, **more)


def run_of(steps, path="runs/a", **meta):
    return Run(Path(path), meta, tuple(steps))


def link(source, target, typical=0.01, expected=0.01, hops=2, num_bytes=100, transfer=None):
    return LinkTime(
        source, target, hops, num_bytes, hops * typical if transfer is None else transfer, typical, expected
    )


# ----------------------------------------------------------------------- the whole run


def test_the_summary_is_that_of_the_definitions():
    times = [1.0] * 9 + [2.0]
    summary = panel_of(run_of(step(n, s) for n, s in enumerate(times))).summary
    assert summary.p50_s == 1.0
    assert summary.p99_s == pytest.approx(np.quantile(times, 0.99))
    assert summary.throughput == pytest.approx(1000 / 11)
    assert summary.steadiness == pytest.approx(10 / 11)
    assert summary.busy_share == pytest.approx(10 * 1.4 / (2 * 11))
    assert summary.transfer_share == pytest.approx(10 * 0.2 / 22)
    assert summary.wait_share == pytest.approx(10 * 0.2 / 22)
    assert summary.memory_bytes == 2000
    assert summary.verdict.startswith("Not steady: over 10 steps the p99 step took 1.91x the p50")


def test_the_verdict_does_not_contradict_itself():
    """Half of the steps far quicker than the median, one far slower: the throughput is above that of median steps."""
    times = [0.2] * 20 + [1.0] * 25 + [3.0] * 2
    summary = panel_of(run_of(step(n, s) for n, s in enumerate(times))).summary
    assert summary.steadiness == 1.0
    assert summary.verdict.startswith("Not steady: ")
    assert "though quicker steps made up for what the slow ones cost in throughput, no alarms." in summary.verdict
    assert "%" not in summary.verdict


def test_of_few_steps_no_steadiness_is_told():
    panel = panel_of(run_of(step(n) for n in range(9)))
    assert panel.summary.steadiness is None
    assert "throughput" not in panel.summary.verdict
    assert ("steadiness", "-") in numbers(panel.summary)


@pytest.mark.parametrize(("slow", "word"), [(1.05, "Steady"), (1.2, "Fairly steady"), (1.5, "Not steady")])
def test_the_verdict_follows_p99_over_p50(slow, word):
    times = [1.0] * 90 + [slow] * 10
    assert panel_of(run_of(step(n, s) for n, s in enumerate(times))).summary.verdict.startswith(f"{word}: ")


def test_warm_up_steps_count_nowhere_but_their_alarms_stay():
    alarm = Event(0, "alarm", "rank 1", "slow")
    steps = [step(0, 50.0, events=(alarm,)), step(1, 40.0), *(step(n) for n in range(2, 12))]
    panel = panel_of(run_of(steps, warmup_batches=2))
    assert (panel.summary.steps, panel.summary.warmup, panel.summary.p99_s) == (10, 2, 1.0)
    assert panel.series.numbers[0] == 2
    assert panel.events.events == (alarm,)
    assert panel.summary.open_alarms == ("rank 1",)


def test_a_run_shorter_than_its_warm_up_is_shown_whole():
    assert panel_of(run_of([step(0), step(1)], warmup_batches=2)).summary.steps == 2


def test_a_run_without_steps_is_refused():
    with pytest.raises(DataError, match="no step yet"):
        panel_of(run_of([]))


def test_steps_whose_ranks_were_not_kept_are_passed_over():
    thin = [replace(step(n, 3.0), ranks=(), links=()) for n in range(5, 10)]
    panel = panel_of(run_of([*(step(n) for n in range(5)), *thin]))
    assert panel.summary.busy_share == pytest.approx(0.7)
    assert panel.ranks.bars[0].busy_s == pytest.approx(0.8)
    assert panel.reasons == ()
    assert panel.series.load[0] == pytest.approx(0.8 / 0.7)
    assert panel.series.load[9] is None


# ----------------------------------------------------------------------- the series


def test_bands_are_quantiles_of_the_window():
    random = np.random.default_rng(0)
    times = random.lognormal(0, 0.2, 300)
    series = step_series(measure([step(n, float(s)) for n, s in enumerate(times)]))
    assert (series.steps_a_point, series.window) == (1, 50)
    for i in (0, 10, 49, 200, 299):
        expected = np.quantile(times[max(0, i - 49) : i + 1], (0.5, 0.99))
        assert (series.p50_s[i], series.p99_s[i]) == pytest.approx(expected)
    assert [number for number, _ in series.slowest] == list(np.argsort(-times)[:5])


def test_long_runs_keep_their_extremes():
    times = np.ones(10_001)
    times[7777], times[10_000] = 9.0, 0.1
    series = step_series(measure([step(n, float(s)) for n, s in enumerate(times)]))
    assert series.steps_a_point == 13
    assert len(series.high_s) == len(series.numbers) == -(-10_001 // 13)
    assert series.high_s[7777 // 13] == 9.0
    assert series.low_s[-1] == 0.1
    assert series.slowest == ((7777, 9.0),)
    assert series.numbers[1] == 13


def test_predictions_are_scaled_to_the_measured_median():
    steps = [replace(step(n, 2.0 + n % 3), predicted_s=0.01 * (2.0 + n % 3)) for n in range(30)]
    series = step_series(measure(steps))
    assert series.predicted_scale == pytest.approx(100)
    assert series.predicted_s == pytest.approx(series.median_s)
    assert step_series(measure([step(0)])).predicted_s == ()


def test_load_distance_and_transfers():
    links = (link(0, 1, num_bytes=300), link(3, 0, num_bytes=100))
    series = step_series(measure([step(0, transfer=(0.1, 0.3), links=links)]))
    assert series.load == pytest.approx((0.8 / 0.7,))
    assert series.planned_load == pytest.approx((0.4 / 0.35,))
    assert series.distance == pytest.approx(((300 * 1 + 100 * 3) / 400,))
    assert series.held_up_s == pytest.approx((0.3,))


# ----------------------------------------------------------------------- reasons

SLOW = {
    "work": {"busy": (1.8, 0.6), "expected": (0.9, 0.3)},
    "compute": {"busy": (1.8, 0.6)},
    "transfer": {"transfer": (1.1, 0.1), "links": (link(1, 0, 0.4, 0.1, 2), link(2, 0, 0.1, 0.1, 2))},
    "wait": {"wait": (1.0, 0.2)},
    "outside": {},
}


@pytest.mark.parametrize("cause", SLOW)
def test_a_planted_cause_is_named(cause):
    steps = [step(n) for n in range(40)]
    steps[17] = step(17, 2.0, **SLOW[cause])
    (reason,) = panel_of(run_of(steps)).reasons
    assert (reason.step, reason.rank, reason.cause) == (17, 0, cause)
    assert reason.excess_s == pytest.approx(1.0)
    assert sum(reason.parts.values()) == pytest.approx(1.0)
    assert reason.parts[cause] > 0.9
    if cause == "transfer":
        assert reason.link == (1, 0)
        assert "link 1->0, which took 4.0x its expected time" in reason.text
        assert main_cause([reason]) == "One step was slow, mostly because of slow transfers over link 1->0."


def begun(*starts, cp_size=2):
    """A pack on each rank, begun then."""
    return tuple(pack(rank, start, 2.0, cp_size=cp_size) for rank, start in enumerate(starts))


def test_the_rank_that_began_late_is_named_and_not_its_victim():
    steps = [step(n, packs=begun(0.0, 0.01)) for n in range(40)]
    steps[17] = step(17, 2.0, wait=(1.0, 0.2), packs=begun(0.0, 1.01))
    panel = panel_of(run_of(steps))
    (reason,) = panel.reasons
    assert (reason.rank, reason.cause, reason.late_rank) == (0, "start", 1)
    assert reason.text == "Late start: rank 1 began its packs 1.01 s after the first; rank 0 waited for it."
    assert reason.parts["start"] == pytest.approx(1.0)
    assert sum(reason.parts.values()) == pytest.approx(1.0)
    assert main_cause(panel.reasons) == "One step was slow, mostly because of ranks that began late (rank 1)."
    assert panel.hot.samples == ()  # no sample made the rank begin late


def test_a_critical_rank_that_itself_began_late_is_named():
    steps = [step(n, packs=begun(0.0, 0.0, cp_size=1)) for n in range(40)]
    steps[17] = step(17, 2.0, packs=begun(1.0, 0.0, cp_size=1))
    (reason,) = panel_of(run_of(steps)).reasons
    assert (reason.rank, reason.cause, reason.late_rank) == (0, "start", 0)
    assert reason.text == "Late start: rank 0 began its packs 1.00 s after the first."


def test_a_late_start_that_is_usual_explains_nothing():
    steps = [step(n, packs=begun(0.0, 0.5)) for n in range(40)]
    steps[17] = step(17, 2.0, busy=(1.8, 0.6), packs=begun(0.0, 0.5))
    panel = panel_of(run_of(steps))
    assert panel.reasons[0].cause == "compute"
    assert panel.hot.samples[0].excess_s == pytest.approx(1.0)


def test_the_late_sender_is_named():
    steps = [step(n) for n in range(40)]
    both = (*begun(0.0, 0.0, cp_size=1), pack(0, 0.4, 2.0, number=1), pack(1, 1.4, 2.0, number=1))
    steps[17] = step(17, 2.0, wait=(1.0, 0.2), packs=both)
    steps[18] = step(18, 1.9, wait=(0.9, 0.2))
    came, least = panel_of(run_of(steps)).reasons
    assert (came.cause, came.late_rank, least.late_rank) == ("wait", 1, 1)
    assert came.text.endswith("longer than usual for rank 1, which came to pack 1 1.00 s after it.")
    assert least.text.endswith("most likely for rank 1: it sent late and waited least itself (200 ms).")


def test_the_headline_names_all_causes():
    steps = [step(n) for n in range(40)]
    for n, cause in ((3, "work"), (9, "work"), (17, "transfer"), (25, "compute")):
        steps[n] = step(n, 2.0, **SLOW[cause])
    assert main_cause(panel_of(run_of(steps)).reasons) == (
        "Of the 4 slowest steps, 2 were slow mostly because of more work in the batch, "
        "1 because of slow transfers over link 1->0, 1 because of slow computing on rank 0."
    )


def test_a_rank_without_a_core_is_told():
    steps = [step(n) for n in range(40)]
    slow = step(17, 2.0, busy=(1.8, 0.6))
    steps[17] = replace(slow, ranks=(replace(slow.ranks[0], queued_s=0.9), slow.ranks[1]))
    (reason,) = panel_of(run_of(steps)).reasons
    assert reason.text.endswith("for 900 ms it had no core to run on.")


def test_noise_has_no_reason():
    assert panel_of(run_of(step(n, 1.0 + 0.002 * (n % 40)) for n in range(200))).reasons == ()


def test_without_predictions_nothing_is_blamed_on_the_plan():
    steps = [step(n, expected=(0.0, 0.0)) for n in range(40)]
    steps[3] = step(3, 2.0, busy=(1.8, 0.6), expected=(0.0, 0.0))
    (reason,) = panel_of(run_of(steps)).reasons
    assert reason.cause == "compute"
    assert reason.text.startswith("More or slower computing: rank 0 took 1.00 s longer than usual")


# ----------------------------------------------------------------------- steps in time


def pack(rank, start=0.0, end=1.0, *, number=0, cp_size=2, tokens=100, dense=10, ids=("a",), **more):
    return PackTime(number, rank, 0, cp_size, start, end, tokens, dense, ids, **more)


def test_the_median_step_and_the_slowest_are_chosen_among_those_kept():
    inside = (Interval("compute", 0.0, 0.6), Interval("wait", 0.6, 1.0))
    times = {0: 1.0, 1: 1.3, 2: 5.0, 3: 2.0, 4: 1.01, 5: 9.0}
    steps = [
        step(n, s, packs=(pack(0, intervals=inside), pack(1, cp_size=1)) if n != 5 else ()) for n, s in times.items()
    ]
    chosen = timelines(steps, 1.1)
    assert [t.step for t in chosen] == [4, 2, 3, 1]
    assert [t.role for t in chosen][:2] == ["near the median", "slowest"]
    assert timelines(steps, 0.8)[0].role == "the one kept that is nearest to the median"
    assert chosen[0].cp_sizes == (1, 2)
    first, second = chosen[0].rows
    assert first.stretches == (Stretch("compute", 2, 0.0, 0.6), Stretch("wait", 0, 0.6, 1.0))
    assert second.stretches == (Stretch("untimed", 1, 0.0, 1.0),)


def test_too_many_stretches_keep_their_shares_of_time():
    random = np.random.default_rng(1)
    at, stretches = 0.0, []
    for i in range(4000):
        kind, size = (("compute", 2), ("transfer", 0))[i % 2]
        length = float(random.uniform(0.5, 1.5)) * (3 if kind == "compute" else 1)
        stretches.append(Stretch(kind, size, at, at + length))
        at += length
    end = at * 1.25  # then nothing
    drawn = coarse(stretches, end, 400)
    assert len(drawn) <= 400
    for kind in ("compute", "transfer"):
        exact = sum(s.end_s - s.start_s for s in stretches if s.kind == kind)
        assert sum(s.end_s - s.start_s for s in drawn if s.kind == kind) == pytest.approx(exact, abs=2 * end / 400)
    assert drawn[-1].end_s == pytest.approx(at, abs=2 * end / 400)
    assert coarse(stretches[:10], end, 400) == tuple(stretches[:10])


def test_of_too_many_ranks_the_extremes_are_shown():
    assert shown_ranks(np.arange(3.0), 4) == (0, 1, 2)
    assert shown_ranks(np.array([5.0, 1, 9, 2, 7, 3]), 4) == (1, 2, 3, 4)


# ----------------------------------------------------------------------- links, ranks, shards, samples


def test_links_are_compared_with_what_is_expected():
    steps = [step(n, links=(link(0, 1), link(1, 0, 0.05 if n >= 18 else 0.01))) for n in range(20)]
    steps[0] = replace(steps[0], probes=(link(0, 3, 0.03),))
    links = panel_of(run_of(steps)).links
    assert links.ranks == 4
    assert [(c.source, c.target) for c in links.cells] == [(0, 1), (0, 3), (1, 0)]
    back = links.cells[2]
    assert (back.ratio, back.typical_s, back.hops, back.num_bytes) == (1.0, 0.01, 40, 2000)
    assert back.bad_ratio == pytest.approx(5.0)
    late = panel_of(run_of([step(0, links=(link(0, 1, 0.001, 0.01, 4, transfer=0.2),))])).links.cells[0]
    assert (late.ratio, late.bad_ratio) == pytest.approx((0.1, 5.0))
    assert back.held_up_s == pytest.approx(18 * 0.02 + 2 * 0.1)
    assert (links.cells[1].ratio, links.cells[1].hops) == (pytest.approx(3.0), 0)
    assert links.slowest[0] == back


def test_links_without_expected_times():
    links = panel_of(run_of([step(0, links=(link(0, 1, expected=0.0),))])).links
    assert not links.has_expected
    assert links.cells[0].ratio is None


def test_rank_bars_add_up_to_the_mean_step():
    bars = panel_of(run_of([step(0, 1.0), step(1, 2.0, busy=(1.0, 0.6))])).ranks.bars
    assert bars[0].busy_s == pytest.approx(0.9)
    for bar in bars:
        assert bar.busy_s + bar.transfer_s + bar.wait_s + bar.rest_s == pytest.approx(1.5)
    assert [bar.memory_bytes for bar in bars] == [1000, 2000]
    assert sum(bar.planned_s for bar in bars) == pytest.approx(sum(bar.busy_s for bar in bars))


def test_shards_over_a_budget_are_counted_and_always_drawn():
    budget = {"budget": {"max_tokens": 1000, "dense_limit": 50}}
    packs = tuple(pack(0, tokens=100 + n % 800, dense=n % 40) for n in range(4000))
    bad = (pack(0, tokens=1001), pack(1, dense=51), pack(1, tokens=1000, dense=50))
    shards = shard_budgets([step(0, packs=packs + bad)], budget)
    assert (shards.shards, shards.over_tokens, shards.over_dense) == (4003, 1, 1)
    assert len(shards.points) <= MOST_POINTS
    assert sum(point.over for point in shards.points) == 2


@pytest.mark.parametrize(
    ("meta", "max_tokens", "dense_limit"),
    [
        ({"max_seqlen_per_dp_cp_rank": 64}, 64, None),
        ({"budget": {"max_tokens": None, "dense_limit": 9}, "max_seqlen_per_dp_cp_rank": 64}, 64, 9),
        ({"budget": {"max_tokens": 32}, "max_seqlen_per_dp_cp_rank": 64}, 32, None),
        ({"budget": "none"}, None, None),
        ({}, None, None),
    ],
)
def test_budgets_are_those_of_the_record(meta, max_tokens, dense_limit):
    shards = shard_budgets([step(0, packs=(pack(0),))], meta)
    assert (shards.max_tokens, shards.dense_limit) == (max_tokens, dense_limit)


def test_hot_samples_share_the_seconds_over_the_median():
    packs = (
        pack(0, 0.0, 0.75, ids=("a", "b"), tokens_by_kind={"tool": 100}),
        pack(0, 0.75, 1.0, number=1, ids=(["c", 1],), tokens_by_kind={"user": 100}),
        pack(1, ids=("innocent",)),
    )
    steps = [step(n) for n in range(20)]
    steps[4] = step(4, 3.0, packs=packs)
    steps[9] = step(9, 2.0, packs=packs)
    hot = panel_of(run_of(steps)).hot
    assert hot.steps == 2
    assert {s.sample: s.excess_s for s in hot.samples} == pytest.approx({"a": 1.125, "b": 1.125, "['c', 1]": 0.75})
    assert hot.samples[0].steps == (4, 9)
    assert dict(hot.kinds) == pytest.approx({"tool": 2.25, "user": 0.75})


# ----------------------------------------------------------------------- events, comparison, facts


def test_alarms_last_until_they_are_cleared():
    def event(n, kind, subject, since=0):
        return Event(n, kind, subject, "text", since_step=since)

    steps = [
        step(0),
        step(5, events=(event(5, "alarm", "rank 1", 2),)),
        step(8, events=(event(8, "cleared", "rank 1", 2), event(8, "alarm", "link 0->1", 7))),
        step(9),
    ]
    log = event_log(steps)
    assert [(s.subject, s.since, s.until, s.is_open) for s in log.spans] == [
        ("rank 1", 2, 8, False),
        ("link 0->1", 7, 9, True),
    ]


def test_of_very_many_events_the_costly_ones_stay_in_order():
    events = tuple(Event(n, "alarm", "rank 0", "text", cost_s=float(n % 500)) for n in range(1000))
    log = event_log([step(0, events=events)])
    assert (len(log.events), log.total) == (MOST_ROWS, 1000)
    assert min(event.cost_s for event in log.events) == 400
    assert [event.step for event in log.events] == sorted(event.step for event in log.events)


def first_again():
    return run_of((step(n, 1.0) for n in range(100)), "runs/a")


def test_a_loggers_version_gets_the_folder_above():
    assert panel_of(run_of([step(0)], "runs/chat/version_0/stability")).summary.name == "chat/version_0"
    assert panel_of(run_of([step(0)], "/version_3")).summary.name == "version_3"
    assert panel_of(run_of([step(0)], "runs/chat")).summary.name == "chat"


def test_the_comparison_is_first_over_second():
    first = run_of((step(n, 1.0) for n in range(100)), "runs/a", dynamic_context_parallel=True)
    second = run_of((step(n, 2.0 + (n == 50)) for n in range(100)), "runs/b", dynamic_context_parallel=False)
    comparison = panel_of(first, second).comparison
    assert comparison.verdict.startswith(
        "a (dynamic) trains at 2.01x the tokens a second of b (static), with a p99/p50 of 1.00"
    )
    assert comparison.warning == ""
    better = {row[0]: row[4] for row in comparison_rows(comparison)}
    assert (better["steps"], better["p99 / p50"], better["steadiness"]) == ("", "lower", "higher")
    assert all(better[name] for name in better.keys() - {"steps", "ranks"})
    shorter = run_of((step(n) for n in range(60)), "runs/c")
    assert "unequal length: 100 and 60 steps" in panel_of(first_again(), shorter).comparison.warning
    for shares in comparison.histogram.shares:
        assert math.fsum(shares) == pytest.approx(1.0)


def test_the_last_bin_of_the_histogram_holds_the_tail():
    first = np.concatenate([np.linspace(1, 2, 999), [50.0]])
    bins = histogram(first, np.linspace(1, 2, 500))
    assert bins.has_tail
    assert bins.edges_s[-1] < 3
    assert sum(bins.shares[0]) == pytest.approx(1.0)
    same = histogram(np.ones(5), np.ones(3))
    assert [sum(shares) for shares in same.shares] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("logs/a/version_0/stability", "logs/a/version_1/stability", ("a/version_0", "a/version_1")),
        ("logs/a/version_0/stability", "logs/b/version_0", ("a/version_0", "b/version_0")),
        ("logs/a", "logs/a", None),
    ],
)
def test_runs_have_different_names(first, second, names):
    found = run_names(run_of([], first), run_of([], second))
    assert found[0] != found[1]
    assert names is None or found == names


def test_facts_are_words():
    meta = {
        "format": 1,
        "starts": ["2025-01-01", "2025-01-02"],
        "cp_sizes": [1, 2],
        "budget": {"max_tokens": 8192, "dense_limit": None},
        "dynamic_context_parallel": True,
        "link_table": [[1.0] * 64] * 64,
        "nothing": None,
    }
    assert facts(meta) == (
        ("started", "2025-01-01, resumed 1 time"),
        ("cp sizes", "1, 2"),
        ("budget", "max tokens 8192"),
        ("dynamic context parallel", "yes"),
    )
    assert len(words("x" * 10_000)) <= 500


# ----------------------------------------------------------------------- axes


@pytest.mark.parametrize(
    ("low", "high", "about", "found"),
    [(0, 10, 5, (0, 2, 4, 6, 8, 10)), (0, 0.3, 3, (0, 0.1, 0.2, 0.3)), (3, 7, 10, (3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7))],
)
def test_ticks_are_round(low, high, about, found):
    assert ticks(low, high, about) == pytest.approx(found)


def test_a_point_alone_is_a_dot():
    drawn = str(polyline([(1.0, 2.0), None, (5.0, 6.0), (7.0, 8.0), None, (9.0, 9.0)], "series"))
    assert drawn.count(DOT) == 2
    assert f"M1.0 2.0{DOT}M5.0 6.0L7.0 8.0M9.0 9.0{DOT}" in drawn


def test_scales_are_linear():
    scale = Scale(10.0, 20.0, 100.0, 0.0)
    assert (scale(10), scale(20), scale(15)) == (100, 0, 50)


def test_labels_do_not_touch():
    assert apart([(50, 40), (80, 40), (120, 40), (94, 10)]) == [True, False, True, False]


def test_made_up_runs_add_up():
    """What the pictures are made from: ranks' times are those of their packs."""
    for record in MadeUp(steps=20).run().steps:
        for rank in record.ranks:
            assert rank.busy_s + rank.wait_s + rank.transfer_s <= record.seconds + 1e-9
    assert panel_of(tiny()).links.cells == ()
