import subprocess
import sys
import warnings
from collections import defaultdict

import pytest
from hypothesis import given, settings
from megatron.core.datasets import data_schedule
from megatron.core.pipeline_parallel import hybrid_cp_schedule

from lightning_dcp.errors import ConfigurationError, PlanError, SampleTooLongError
from lightning_dcp.schedule.megatron import BALANCED, DEFAULT_DYNAMIC, MegatronScheduler, available_megatron_scheduler
from tests.schedule.plans import batches, walk

POWERS = (1, 2, 4, 8, 16, 32)
needs_balanced = pytest.mark.skipif(
    available_megatron_scheduler() != BALANCED, reason="the installed Megatron-Core has another scheduler"
)


class Plane:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


@pytest.fixture
def hands_over(monkeypatch):
    """Make Megatron-Core's newer scheduler hand over this; gives what it was built and asked with."""
    seen = []

    def answer(rounds):
        class Scheduler:
            def __init__(self, max_seqlen_per_dp_cp_rank, cp_size, dp_size, microbatch_group_size_per_vp_stage):
                assert microbatch_group_size_per_vp_stage is None
                seen.append((max_seqlen_per_dp_cp_rank, cp_size * dp_size))

            def get_groups_and_subsamples(self, sample_id_seqlens):
                seen.append(sample_id_seqlens)
                if isinstance(rounds, Exception):
                    raise rounds
                return rounds

        monkeypatch.setattr(data_schedule, DEFAULT_DYNAMIC, Scheduler, raising=False)
        return seen

    return answer


def packs_of(plan):
    return [[(pack.first_rank, pack.cp_size, pack.samples) for pack in microbatch] for microbatch in plan.microbatches]


# ------------------------------------------------------------------ the scheduler of the releases


@needs_balanced
@given(batches(planes=POWERS))
@settings(max_examples=150, deadline=None)
def test_plans_of_the_installed_scheduler_keep_all_rules(case):
    ranks, limit, lengths = case
    plan = MegatronScheduler(ranks, limit).schedule(lengths)
    plan.validate()
    assert walk(plan) == {}
    packs = {len(plan.packs_of(rank)) for rank in range(ranks)}
    if plan.mode == "free":
        assert any(sum(pack.cp_size for pack in microbatch) < ranks for microbatch in plan.microbatches)
    else:
        assert packs == {len(plan.microbatches)}


@needs_balanced
@given(batches(planes=POWERS))
@settings(max_examples=100, deadline=None)
def test_rounds_and_group_sizes_are_those_that_megatron_chose(case):
    ranks, limit, lengths = case
    scheduler = hybrid_cp_schedule.BalancedCPScheduler(limit, Plane(ranks))
    _, theirs = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    expected = []
    for samples_by_rank in theirs:
        sizes = defaultdict(int)
        for samples in samples_by_rank:
            for sample in samples:
                sizes[sample] += 1
        expected.append(dict(sizes))
    ours = [
        {s: p.cp_size for p in packs for s in p.samples} for packs in MegatronScheduler(ranks, limit).rounds(lengths)
    ]
    assert ours == expected


@needs_balanced
def test_long_and_short_samples_get_groups_of_different_sizes():
    plan = MegatronScheduler(8, 1000).schedule([4000] + [500] * 12)
    assert {pack.cp_size for pack in plan.packs() if 0 in pack.samples} == {4}
    assert min(pack.cp_size for pack in plan.packs()) == 1


def test_the_same_lengths_give_the_same_plan():
    lengths = [(7 * i * i) % 501 + 1 for i in range(60)]
    assert MegatronScheduler(8, 512).schedule(lengths) == MegatronScheduler(8, 512).schedule(tuple(lengths))


# ------------------------------------------------------------------ the scheduler of the dev branch


def test_the_newer_scheduler_is_used_where_there_is_one(hands_over):
    seen = hands_over([[[0, 2], [0, 2], [1], [3]]])
    assert available_megatron_scheduler() == DEFAULT_DYNAMIC
    plan = MegatronScheduler(4, 10, "contiguous").schedule([12, 7, 8, 9])
    assert seen == [(10, 4), [(0, 12), (1, 7), (2, 8), (3, 9)]]
    assert packs_of(plan) == [[(0, 2, (0, 2)), (2, 1, (1,)), (3, 1, (3,))]]
    assert plan.mode == "lockstep"
    assert {pack.layout for pack in plan.packs()} == {"contiguous"}


def test_the_order_of_rounds_is_kept(hands_over):
    hands_over([[[1], [2]], [[0], [0]]])
    plan = MegatronScheduler(2, 10).schedule([3, 4, 5])
    assert packs_of(plan) == [[(0, 1, (1,)), (1, 1, (2,))], [(0, 2, (0,))]]
    assert plan.mode == "lockstep"


# ------------------------------------------------------------------ what is put right


def test_groups_that_do_not_start_at_a_multiple_of_their_size_change_places(hands_over):
    hands_over([[[0], [1], [1], [2]]])
    plan = MegatronScheduler(4, 10).schedule([3, 12, 5])
    assert packs_of(plan) == [[(0, 2, (1,)), (2, 1, (0,)), (3, 1, (2,))]]
    assert plan.mode == "lockstep"


def test_more_tokens_than_fit_become_packs_after_each_other(hands_over):
    hands_over([[[0, 1, 2], [3]]])
    scheduler = MegatronScheduler(2, 10)
    plan = scheduler.schedule([6, 4, 3, 9])
    assert packs_of(plan) == [[(0, 1, (0, 1)), (1, 1, (3,))], [(0, 1, (2,))]]
    assert plan.mode == "free"
    assert len(scheduler.rounds([6, 4, 3, 9])) == 1


def test_free_running_ranks_do_not_wait_for_the_end_of_a_round(hands_over):
    """Rank 1 goes on with the second round's pack while rank 0 is at its second pack of the first."""
    hands_over([[[0, 1], [2]], [[3], [4]]])
    plan = MegatronScheduler(2, 10).schedule([9, 9, 9, 9, 9])
    assert packs_of(plan) == [[(0, 1, (0,)), (1, 1, (2,))], [(0, 1, (1,)), (1, 1, (4,))], [(0, 1, (3,))]]


def test_packs_after_each_other_on_all_ranks_stay_in_lockstep(hands_over):
    hands_over([[[0, 1], [2, 3]]])
    plan = MegatronScheduler(2, 10).schedule([9, 9, 9, 9])
    assert packs_of(plan) == [[(0, 1, (0,)), (1, 1, (2,))], [(0, 1, (1,)), (1, 1, (3,))]]
    assert plan.mode == "lockstep"


def test_rounds_that_are_uneven_in_turn_make_a_lockstep_plan_together(hands_over):
    hands_over([[[0, 1], [2]], [[3], [4, 5]]])
    plan = MegatronScheduler(2, 10).schedule([9] * 6)
    assert packs_of(plan) == [
        [(0, 1, (0,)), (1, 1, (2,))],
        [(0, 1, (1,)), (1, 1, (4,))],
        [(0, 1, (3,)), (1, 1, (5,))],
    ]
    assert plan.mode == "lockstep"


def test_groups_of_different_sizes_in_one_round_run_after_each_other(hands_over):
    hands_over([[[0, 1], [0, 2]]])
    plan = MegatronScheduler(2, 10).schedule([8, 3, 4])
    assert packs_of(plan) == [[(0, 2, (0,))], [(0, 1, (1,)), (1, 1, (2,))]]
    assert plan.mode == "lockstep"


def test_a_rank_without_samples_makes_the_plan_one_for_free_running_ranks(hands_over):
    hands_over([[[0], []]])
    plan = MegatronScheduler(2, 10).schedule([8])
    assert packs_of(plan) == [[(0, 1, (0,))]]
    assert plan.mode == "free"


# ------------------------------------------------------------------ what is refused

LENGTHS = [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("rounds", "complaint"),
    [
        ([[[0], [1], [2], [0]]], r"round 0 has a group of ranks \[0, 3\], which are not consecutive"),
        ([[[0], [1], [2], [1]], [[3]] * 4], r"ranks \[1, 3\], which are not consecutive"),
        ([[[0], [1], [2], [2]]], r"exactly once; not so for sample\(s\) \[3\]"),
        ([[[0], [1], [2], [3]], [[3]] * 4], r"exactly once; not so for sample\(s\) \[3\]"),
        ([[[0], [1], [2], [4]]], r"round 0 has sample\(s\) \[4\], of a batch of 4"),
        ([[[0], [1], [2]]], "round 0 is for 3 ranks of 4"),
        ([[[0, 1, 2]] * 3 + [[3]]], "cp_size 3 does not divide the plane of 4 ranks"),
        ([[[1], [0, 1], [0, 3], [2]]], "a group of 2 must start at a multiple of 2"),
        ([], r"exactly once; not so for sample\(s\) \[0, 1, 2, 3\]"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(rounds, complaint, hands_over):
    hands_over(rounds)
    with pytest.raises(PlanError, match=complaint) as caught:
        MegatronScheduler(4, 10).schedule(LENGTHS)
    assert str(caught.value).startswith(
        "Megatron-Core's DefaultDynamicCPScheduler handed over a plan that cannot run: "
    )
    assert 'use scheduler="dynamic"' in str(caught.value)


def test_a_sample_on_too_few_ranks_is_refused(hands_over):
    hands_over([[[0], [1], [2], [3]]])
    with pytest.raises(PlanError, match="11 tokens on 1 rank"):
        MegatronScheduler(4, 10).schedule([5, 11, 7, 8])


@pytest.mark.parametrize("error", [AssertionError("no room"), IndexError("list index"), ZeroDivisionError()])
def test_what_megatron_raises_is_told_with_its_scheduler(error, hands_over):
    hands_over(error)
    with pytest.raises(PlanError, match=f"DefaultDynamicCPScheduler failed on 4 .* 4 ranks .{type(error).__name__}"):
        MegatronScheduler(4, 10).schedule(LENGTHS)


@pytest.mark.parametrize("ranks", [0, 3, 6, 12, 24])
def test_planes_that_are_no_power_of_two_are_refused(ranks):
    with pytest.raises(ConfigurationError, match=f"DPxCP plane of {ranks} ranks") as caught:
        MegatronScheduler(ranks, 10)
    assert 'use scheduler="dynamic"' in str(caught.value)


def test_a_megatron_without_a_scheduler_is_refused(monkeypatch):
    for module, name in ((data_schedule, DEFAULT_DYNAMIC), (hybrid_cp_schedule, BALANCED)):
        monkeypatch.delattr(module, name, raising=False)
    assert available_megatron_scheduler() is None
    with pytest.raises(ConfigurationError) as caught:
        MegatronScheduler(6, 10)
    assert len(caught.value.problems) == 2
    assert "neither of megatron.core.datasets.data_schedule.DefaultDynamicCPScheduler" in str(caught.value)


def test_a_sample_too_long_for_the_plane_is_named():
    with pytest.raises(SampleTooLongError, match="sample 1 of the batch has 41 tokens"):
        MegatronScheduler(4, 10).schedule([3, 41])


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_batches_and_samples_are_refused(lengths):
    with pytest.raises(PlanError, match=r"empty batch|has 0 tokens"):
        MegatronScheduler(4, 10).schedule(lengths)


MODULES = ("megatron.core.datasets.data_schedule", "megatron.core.pipeline_parallel.hybrid_cp_schedule")


def test_what_megatron_reports_when_imported_is_not_shown(monkeypatch, recwarn):
    def noisy(name):
        warnings.warn(f"{name}: Transformer Engine is not installed", stacklevel=1)
        raise ImportError(name)

    for module in MODULES:
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("lightning_dcp.schedule.megatron.importlib.import_module", noisy)
    assert available_megatron_scheduler() is None
    assert not recwarn.list


PROGRAM = """
import sys
from lightning_dcp.schedule.megatron import MegatronScheduler
before = "megatron" in sys.modules
plan = MegatronScheduler(4, 64).schedule([5, 60, 200, 33])
print(before, sum(len(pack.samples) for pack in plan.packs()))
"""


@pytest.mark.slow
def test_megatron_is_imported_late_and_nothing_else_is_printed():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "False 4\n"
    assert done.stderr == ""
