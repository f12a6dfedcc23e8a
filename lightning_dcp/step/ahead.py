"""Plans made in a thread, while the batch before is computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

from lightning_dcp.batch.view import view
from lightning_dcp.errors import PlanError
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.plan import Scheduler, StepPlan

KEPT = 16
"""Plans kept for batches that have not come yet; as many in a row that are never asked for end planning ahead."""

Lengths = tuple[int, ...]
Checked = tuple[StepPlan, int]
"""A plan that keeps its rules, and its digest."""


@dataclass(frozen=True)
class Planned:
    """The plan of one batch, and what it cost the step.

    Attributes:
        plan: checked.
        digest: of the plan.
        ready: whether the plan was there when the step asked for it.
        waited_s: seconds that the step was held up by planning.
    """

    plan: StepPlan
    digest: int
    ready: bool
    waited_s: float


@dataclass
class PlanCounts:
    """Where the plans of a run came from.

    Attributes:
        ready: plans that were there when their step asked for them.
        late: plans that were begun ahead, but that their step had to wait for.
        unplanned: plans of batches that were not read ahead, or changed before their step.
        waited_s: seconds that steps were held up by planning.
    """

    ready: int = 0
    late: int = 0
    unplanned: int = 0
    waited_s: float = 0.0


class PlanAhead:
    """Plans batches that are read ahead in a thread; a step gets its plan from there, or makes it itself.

    A plan follows from lengths alone, so where it was made changes nothing about it. Errors in the thread are dropped
    there: they come again, and are raised, when the step plans. The scheduler is called by one thread at a time, and as
    a rule once for each batch, in the loader's order.

    The thread starts with the first batch, and does not keep the process alive.

    Args:
        scheduler: makes the plans.
        ranks: size of the plane that every plan must be for.
        enabled: ``False`` leaves all planning to the steps.
        alignment: the padding that the model's back end needs, with which every plan must keep its rules; schedulers that
            know nothing of padding may make them.

    Attributes:
        scheduler: makes the plans.
        counts: what happened so far.
    """

    def __init__(
        self, scheduler: Scheduler, ranks: int, *, enabled: bool = True, alignment: Alignment = NO_ALIGNMENT
    ) -> None:
        self.scheduler = scheduler
        self.counts = PlanCounts()
        self._ranks = ranks
        self._enabled = enabled
        self._alignment = alignment
        self._turn = Lock()
        self._thread: Thread | None = None
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._open_jobs: deque[_Job] = deque()
        self._unclaimed = 0

    def submit(self, batch: Any) -> None:
        """Begin to plan a batch that was read ahead. Returns at once, and never raises.

        Plans cost the thread's time for nothing if hooks of the user's change all batches before the step. So once
        :data:`KEPT` plans in a row were not asked for, no more are made.
        """
        if not self._enabled or self._unclaimed >= KEPT:
            return
        if self._thread is None:
            self._thread = Thread(target=self._run_jobs, name="lightning-dcp planning", daemon=True)
            self._thread.start()
        job = _Job(batch)
        self._unclaimed += 1
        self._open_jobs.append(job)
        if len(self._open_jobs) > KEPT:
            self._open_jobs.popleft().withdraw()
        self._jobs.put(job)

    def plan(self, lengths: Sequence[int]) -> Planned:
        """The plan of the batch whose step begins.

        Raises:
            PlanError: the scheduler's own errors, and plans that break the rules or are for another batch or plane.
        """
        start = time.perf_counter()
        wanted = tuple(lengths)
        job = self._claim(wanted)
        ready = job is not None and job.result.done()
        checked = None if job is None else job.result.result()
        plan, digest = self._make(wanted) if checked is None else checked
        ready = ready and checked is not None
        return self._counted(Planned(plan, digest, ready, time.perf_counter() - start), submitted=job is not None)

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that is in the middle of a plan is not waited for any longer than ``timeout_s``."""
        self._enabled = False
        while self._open_jobs:
            self._open_jobs.pop().withdraw()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _claim(self, lengths: Lengths) -> _Job | None:
        """The oldest job for a batch of these lengths; it is no longer open then."""
        for job in self._open_jobs:
            if job.lengths.result() == lengths:  # waits for a job that is not begun: it may be the one
                self._open_jobs.remove(job)
                self._unclaimed = 0
                return job
        return None

    def _counted(self, planned: Planned, *, submitted: bool) -> Planned:
        self.counts.ready += planned.ready
        self.counts.late += submitted and not planned.ready
        self.counts.unplanned += not submitted
        self.counts.waited_s += planned.waited_s
        return planned

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self._make)

    def _make(self, lengths: Lengths) -> Checked:
        with self._turn:
            plan = self.scheduler.schedule(lengths)
        if not isinstance(plan, StepPlan):
            raise PlanError(f"{type(self.scheduler).__name__}.schedule returned {type(plan).__name__}, not a StepPlan")
        if plan.alignment != self._alignment:
            plan = replace(plan, alignment=self._alignment)
        plan.validate()
        if tuple(plan.lengths) != lengths:
            raise PlanError(f"the plan is for lengths {_short(plan.lengths)}, but the batch has {_short(lengths)}")
        if plan.ranks != self._ranks:
            raise PlanError(f"the plan is for {plan.ranks} rank(s), but the plane has {self._ranks}")
        return plan, plan.digest()


class _Job:
    """One batch to plan.

    Attributes:
        lengths: of its samples, once they are known; ``None`` if the batch is none that can be read.
        result: the plan, once it is made; ``None`` if that failed.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.lengths: Future[Lengths | None] = Future()
        self.result: Future[Checked | None] = Future()

    def withdraw(self) -> None:
        """Give the job up, unless it is begun."""
        if self.lengths.cancel():
            self._batch = None

    def run(self, make: Callable[[Lengths], Checked]) -> None:
        """Plan the batch, in the thread."""
        if not self.lengths.set_running_or_notify_cancel():
            return
        batch, self._batch = self._batch, None
        try:
            lengths = view(batch).lengths
            self.lengths.set_result(lengths)
            self.result.set_result(make(lengths))
        except BaseException:  # whatever it is, the step must not wait for ever
            for future in (self.lengths, self.result):
                if not future.done():
                    future.set_result(None)


def _short(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}]" if len(lengths) <= 8 else f"[{shown}, ...] of {len(lengths)} samples"
