"""Plans made in a thread: the same as without it, in order, one at a time, and never in the way."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from lightning_dcp.boundaries.findings import Audit
from lightning_dcp.boundaries.settle import Settled
from lightning_dcp.errors import PlanError, SampleTooLongError
from lightning_dcp.schedule import StaticScheduler, StepPlan
from lightning_dcp.step.ahead import KEPT, PlanAhead, Samples


class Recording:
    """The static scheduler on one rank, with a record of its calls; each waits until ``gate`` is open."""

    def __init__(self, limit: int = 64, *, held: bool = False) -> None:
        self.plain = StaticScheduler(1, limit, 1)
        self.calls: list[tuple[tuple[int, ...], str]] = []
        self.gate = threading.Event()
        self.running = self.most_running = 0
        if not held:
            self.gate.set()

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.calls.append((tuple(lengths), threading.current_thread().name))
        try:
            assert self.gate.wait(20)
            return self.plain.schedule(lengths)
        finally:
            self.running -= 1

    @property
    def lengths(self) -> list[tuple[int, ...]]:
        return [lengths for lengths, _ in self.calls]


class Batch(dict[str, Any]):
    """A padded batch that can be watched."""

    def __init__(self, *lengths: int) -> None:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        super().__init__(input_ids=mask.long(), attention_mask=mask)


@pytest.fixture
def ahead() -> Iterator[Any]:
    """Makes planners, and ends their threads."""
    made: list[PlanAhead] = []

    def make(scheduler: Any, **options: Any) -> PlanAhead:
        made.append(PlanAhead(scheduler, 1, **options))
        return made[-1]

    yield make
    for planner in made:
        planner.scheduler.gate.set()
        planner.close(20)


def finish(planner: PlanAhead) -> None:
    """Wait until all that was submitted is planned."""
    for job in planner._open_jobs:
        job.result.result(20)


def counts(planner: PlanAhead) -> tuple[int, int, int]:
    return planner.counts.ready, planner.counts.late, planner.counts.unplanned


def test_a_plan_is_there_when_its_step_asks_for_it(ahead: Any) -> None:
    scheduler = Recording()
    planner = ahead(scheduler)
    planner.submit(Batch(5, 3))
    finish(planner)
    planned = planner.plan(Samples((5, 3)))
    assert planned.plan == scheduler.plain.schedule((5, 3))
    assert planned.digest == planned.plan.digest()
    assert planned.ready
    assert counts(planner) == (1, 0, 0)
    assert scheduler.calls == [((5, 3), "lightning-dcp planning")]
    assert planner.counts.waited_s == planned.waited_s < 1


def test_a_step_waits_for_a_plan_that_is_being_made(ahead: Any) -> None:
    scheduler = Recording(held=True)
    planner = ahead(scheduler)
    planner.submit(Batch(5, 3))
    threading.Timer(0.2, scheduler.gate.set).start()
    planned = planner.plan(Samples((5, 3)))
    assert not planned.ready
    assert planned.waited_s > 0.1
    assert counts(planner) == (0, 1, 0)
    assert scheduler.lengths == [(5, 3)]


def test_a_step_makes_the_plan_of_a_batch_that_was_not_read_ahead(ahead: Any) -> None:
    scheduler = Recording()
    planner = ahead(scheduler)
    planner.submit(Batch(5, 3))
    planned = planner.plan(Samples((5, 2)))
    assert planned.plan.lengths == (5, 2)
    assert counts(planner) == (0, 0, 1)
    assert scheduler.calls[-1] == ((5, 2), threading.main_thread().name)
    assert planner.plan(Samples((5, 3))).plan.lengths == (5, 3)
    assert planner.counts.unplanned == 1
    assert len(scheduler.calls) == 2


def test_batches_are_planned_once_each_in_the_order_they_are_read(ahead: Any) -> None:
    """Also batches of the same lengths: a scheduler that counts its calls counts batches."""
    scheduler = Recording()
    planner = ahead(scheduler)
    batches = [(4, 4), (4, 4), (2,), (4, 4), (7, 1), (2,)]
    for previous, lengths in zip([None, *batches], batches, strict=False):
        planner.submit(Batch(*lengths))
        if previous is not None:
            assert planner.plan(Samples(previous)).plan.lengths == previous
    planner.plan(Samples(batches[-1]))
    assert scheduler.lengths == batches
    assert planner.counts.ready + planner.counts.late == len(batches)
    assert not planner._open_jobs


def test_the_scheduler_is_called_by_one_thread_at_a_time(ahead: Any) -> None:
    scheduler = Recording(held=True)
    planner = ahead(scheduler)
    planner.submit(Batch(5, 3))
    threading.Timer(0.2, scheduler.gate.set).start()
    planner.plan(Samples((9,)))
    assert scheduler.lengths == [(5, 3), (9,)]
    assert scheduler.most_running == 1


def test_an_error_appears_when_its_step_plans_and_no_sooner(ahead: Any) -> None:
    scheduler = Recording(limit=4)
    planner = ahead(scheduler)
    with pytest.raises(SampleTooLongError) as direct:
        scheduler.plain.schedule((3, 9))
    planner.submit(Batch(3, 2))
    planner.submit(Batch(3, 9))
    finish(planner)
    assert planner.plan(Samples((3, 2))).ready
    with pytest.raises(SampleTooLongError) as caught:
        planner.plan(Samples((3, 9)))
    assert str(caught.value) == str(direct.value)
    planner.submit(Batch(1, 1))
    assert planner.plan(Samples((1, 1))).plan.lengths == (1, 1), "the thread goes on"


def test_whatever_ends_a_plan_the_step_does_not_wait_for_ever(ahead: Any) -> None:
    class Exiting(Recording):
        def schedule(self, lengths: Sequence[int]) -> StepPlan:
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit
            return super().schedule(lengths)

    planner = ahead(Exiting())
    for _ in range(2):
        planner.submit(Batch(5, 3))
        planned = planner.plan(Samples((5, 3)))
        assert planned.plan.lengths == (5, 3)
        assert not planned.ready


@pytest.mark.parametrize("batch", [None, 3, ("a", "b"), {"input_ids": "text"}, {"other": torch.ones(2, 2)}])
def test_batches_that_cannot_be_read_are_left_to_the_step(ahead: Any, batch: Any) -> None:
    planner = ahead(Recording())
    planner.submit(batch)
    planner.submit(Batch(5, 3))
    assert planner.plan(Samples((5, 3))).plan.lengths == (5, 3)
    assert planner.counts.unplanned == 0


def test_plans_of_a_training_loader_outlive_a_validation_in_between(ahead: Any) -> None:
    planner = ahead(Recording())
    planner.submit(Batch(50, 3))
    for number in range(1, 60):
        planner.submit(Batch(number))
        planner.plan(Samples((number,)))
    assert planner.plan(Samples((50, 3))).ready
    assert planner.counts.unplanned == 0


def test_memory_is_bounded_and_no_batch_is_kept(ahead: Any) -> None:
    planner = ahead(Recording())
    batches = [Batch(n + 1) for n in range(3 * KEPT)]
    watched = [weakref.ref(batch) for batch in batches]
    for number, batch in enumerate(batches):
        planner.submit(batch)
        planner._unclaimed = min(number, 1)
    assert len(planner._open_jobs) == KEPT
    finish(planner)
    del batches, batch
    planner.submit(Batch(1))
    finish(planner)
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def test_a_batch_that_waits_to_be_planned_is_let_go_at_the_end(ahead: Any) -> None:
    scheduler = Recording(held=True)
    planner = ahead(scheduler)
    planner.submit(Batch(5, 3))
    batch = Batch(4)
    watched = weakref.ref(batch)
    planner.submit(batch)
    del batch
    threading.Timer(0.2, scheduler.gate.set).start()
    planner.close(20)
    gc.collect()
    assert watched() is None
    assert scheduler.lengths in ([(5, 3)], [])


def test_planning_ahead_ends_when_nobody_asks_for_the_plans(ahead: Any) -> None:
    """As where a hook changes the lengths of every batch between loader and step."""
    scheduler = Recording()
    planner = ahead(scheduler)
    for _ in range(3 * KEPT):
        planner.submit(Batch(9))
        planner.plan(Samples((8,)))
    assert planner.counts.unplanned == 3 * KEPT
    assert scheduler.lengths.count((9,)) <= KEPT


def test_one_plan_that_is_asked_for_keeps_it_going(ahead: Any) -> None:
    planner = ahead(Recording())
    for number in range(6 * KEPT):
        planner.submit(Batch(9))
        planner.plan(Samples((9,) if number % 4 == 3 else (8,)))
    assert planner.counts.ready + planner.counts.late == 6 * KEPT / 4


def test_the_thread_starts_with_the_first_batch_and_ends_when_closed(ahead: Any) -> None:
    scheduler = Recording()
    planner = ahead(scheduler)
    assert planner._thread is None
    planner.submit(Batch(5, 3))
    thread = planner._thread
    assert thread is not None
    assert thread.is_alive()
    assert thread.daemon
    planner.close()
    assert not thread.is_alive()
    planner.submit(Batch(5, 3))
    assert planner._thread is None
    assert planner.plan(Samples((5, 3))).plan.lengths == (5, 3), "a plan can still be had, made at once"
    planner.close()


def test_closing_does_not_wait_for_a_scheduler_that_takes_long(ahead: Any) -> None:
    planner = ahead(Recording(held=True))
    planner.submit(Batch(5, 3))
    start = time.monotonic()
    planner.close(0.1)
    assert time.monotonic() - start < 5


def test_without_planning_ahead_there_is_no_thread(ahead: Any) -> None:
    scheduler = Recording()
    planner = ahead(scheduler, enabled=False)
    planner.submit(Batch(5, 3))
    assert planner._thread is None
    assert not planner.plan(Samples((5, 3))).ready
    assert counts(planner) == (0, 0, 1)


class Fixed:
    """Returns one and the same thing."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.gate = threading.Event()

    def schedule(self, lengths: Sequence[int]) -> Any:
        return self.plan


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (None, "Fixed.schedule returned NoneType, not a StepPlan"),
        (StaticScheduler(1, 64, 1).schedule((3, 5)), r"for lengths \[3, 5\], but the batch has \[5, 3\]"),
        (StaticScheduler(2, 64, 1).schedule((5, 3)), r"for 2 rank\(s\), but the plane has 1"),
        (StepPlan(1, 64, (5, 3), ()), "every sample must be planned exactly once"),
    ],
)
@pytest.mark.parametrize("submitted", [False, True])
def test_plans_are_checked_wherever_they_are_made(ahead: Any, plan: Any, words: str, submitted: bool) -> None:
    planner = ahead(Fixed(plan))
    if submitted:
        planner.submit(Batch(5, 3))
        finish(planner)
    with pytest.raises(PlanError, match=words):
        planner.plan(Samples((5, 3)))


PROGRAM = """
import time
from tests.step.test_ahead import Batch, PlanAhead

class Slow:
    def schedule(self, lengths):
        print("planning", flush=True)
        time.sleep(600)

planner = PlanAhead(Slow(), 1)
planner.submit(Batch(5, 3))
time.sleep(0.5)
raise SystemExit(3)
"""


def test_a_plan_under_way_does_not_keep_the_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (3, "planning\n"), done.stderr


def test_another_scheduler_drops_plans_made_ahead_and_lays_out_anew(ahead: Any) -> None:
    first, second = Recording(), Recording(limit=32)
    planner = ahead(first)
    planner.submit(Batch(5, 3))
    finish(planner)
    notes = Audit((), ("laid out anew",))
    planner.replace_scheduler(second, lambda plan, samples: Settled(plan, audit=notes))
    planned = planner.plan(Samples((5, 3)))
    assert not planned.ready
    assert planned.plan.max_seqlen_per_dp_cp_rank == 32
    assert planned.settled.audit is notes
    planner.submit(Batch(9, 2))
    finish(planner)
    assert planner.plan(Samples((9, 2))).ready, "planning ahead goes on"
