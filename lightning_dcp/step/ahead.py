"""Plans made in a thread, while the batch before is computed."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from lightning_dcp.batch.view import BatchView, view
from lightning_dcp.boundaries.settle import Settled
from lightning_dcp.errors import PlanError
from lightning_dcp.schedule.alignment import NO_ALIGNMENT, Alignment
from lightning_dcp.schedule.plan import Scheduler, StepPlan
from lightning_dcp.segments import SampleSegments

KEPT = 16
"""Plans kept for batches that have not come yet; as many in a row that are never asked for end planning ahead."""

Checked = tuple[Settled, int]
"""A plan that keeps its rules, with the layouts of its packs, and its digest."""


class Samples(NamedTuple):
    """What planning knows of a batch.

    Attributes:
        lengths: tokens of each sample.
        ids: a name for each sample, for messages.
        segments: of each sample, if they have any.
    """

    lengths: tuple[int, ...]
    ids: tuple[Any, ...] = ()
    segments: tuple[SampleSegments, ...] | None = None

    @classmethod
    def of(cls, batch: BatchView) -> Samples:
        """The samples of a batch."""
        return cls(tuple(batch.lengths), tuple(batch.sample_ids), batch.segments)


Settle = Callable[[StepPlan, Samples], Settled]
"""Lays out the packs of a plan, and may change it, by what samples are made of."""


def as_planned(plan: StepPlan, samples: Samples) -> Settled:
    """Layouts by their names in the plan, whatever samples are made of."""
    return Settled(plan)


@dataclass(frozen=True)
class Planned:
    """The plan of one batch, and what it cost the step.

    Attributes:
        settled: the plan, checked, with the layouts of its packs and their audit.
        digest: of the plan.
        ready: whether the plan was there when the step asked for it.
        waited_s: seconds that the step was held up by planning.
    """

    settled: Settled
    digest: int
    ready: bool
    waited_s: float

    @property
    def plan(self) -> StepPlan:
        """Who does what."""
        return self.settled.plan


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
        settle: lays out the packs of each plan.

    Attributes:
        scheduler: makes the plans; :meth:`replace_scheduler` puts another in its place.
        counts: what happened so far.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        ranks: int,
        *,
        enabled: bool = True,
        alignment: Alignment = NO_ALIGNMENT,
        settle: Settle = as_planned,
    ) -> None:
        self.scheduler = scheduler
        self.counts = PlanCounts()
        self._ranks = ranks
        self._enabled = enabled
        self._alignment = alignment
        self._settle = settle
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

    def plan(self, samples: Samples) -> Planned:
        """The plan of the batch whose step begins.

        Raises:
            PlanError: the scheduler's own errors, and plans that break the rules or are for another batch or plane.
            BoundaryError: shards over their budgets, if these are to be kept.
        """
        start = time.perf_counter()
        job = self._claim(samples)
        ready = job is not None and job.result.done()
        checked = None if job is None else job.result.result()
        settled, digest = self._make(samples) if checked is None else checked
        ready = ready and checked is not None
        return self._counted(Planned(settled, digest, ready, time.perf_counter() - start), submitted=job is not None)

    def replace_scheduler(self, scheduler: Scheduler, settle: Settle) -> None:
        """Plan by another scheduler, and lay packs out anew, from the next step on: plans made already are dropped."""
        with self._turn:
            self.scheduler, self._settle = scheduler, settle
        while self._open_jobs:
            self._open_jobs.pop().withdraw()

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; one that is in the middle of a plan is not waited for any longer than ``timeout_s``."""
        self._enabled = False
        while self._open_jobs:
            self._open_jobs.pop().withdraw()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _claim(self, wanted: Samples) -> _Job | None:
        """The oldest job for a batch of such samples; it is no longer open then."""
        for job in self._open_jobs:
            found = job.samples.result()  # waits for a job that is not begun: it may be the one
            if found is not None and (found.lengths, found.segments) == (wanted.lengths, wanted.segments):
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

    def _make(self, samples: Samples) -> Checked:
        lengths = samples.lengths
        with self._turn:
            settle, plan = self._settle, self.scheduler.schedule(lengths)
        if not isinstance(plan, StepPlan):
            raise PlanError(f"{type(self.scheduler).__name__}.schedule returned {type(plan).__name__}, not a StepPlan")
        if plan.alignment != self._alignment:
            plan = replace(plan, alignment=self._alignment)
        plan.validate()
        if tuple(plan.lengths) != lengths:
            raise PlanError(f"the plan is for lengths {_short(plan.lengths)}, but the batch has {_short(lengths)}")
        if plan.ranks != self._ranks:
            raise PlanError(f"the plan is for {plan.ranks} rank(s), but the plane has {self._ranks}")
        settled = settle(plan, samples)
        if settled.plan is not plan:
            settled.plan.validate()
        return settled, _digest(settled)


def _digest(settled: Settled) -> int:
    """A 63-bit hash of the plan and of layouts that do not follow from it: ranks with others would wait for ever."""
    plan = settled.plan.digest()
    if not settled.layouts:
        return plan
    layouts = [None if layout is None else layout.ranks for layout in settled.layouts]
    return int.from_bytes(hashlib.blake2b(repr((plan, layouts)).encode(), digest_size=8).digest(), "big") >> 1


class _Job:
    """One batch to plan.

    Attributes:
        samples: what planning knows of them, once that is read; ``None`` if the batch is none that can be read.
        result: the plan, once it is made; ``None`` if that failed.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self.samples: Future[Samples | None] = Future()
        self.result: Future[Checked | None] = Future()

    def withdraw(self) -> None:
        """Give the job up, unless it is begun."""
        if self.samples.cancel():
            self._batch = None

    def run(self, make: Callable[[Samples], Checked]) -> None:
        """Plan the batch, in the thread."""
        if not self.samples.set_running_or_notify_cancel():
            return
        batch, self._batch = self._batch, None
        try:
            samples = Samples.of(view(batch))
            self.samples.set_result(samples)
            self.result.set_result(make(samples))
        except BaseException:  # whatever it is, the step must not wait for ever
            for future in (self.samples, self.result):
                if not future.done():
                    future.set_result(None)


def _short(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}]" if len(lengths) <= 8 else f"[{shown}, ...] of {len(lengths)} samples"
