"""Times training steps of chosen batches, in one run of the trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import Progress
from torch.utils.data import DataLoader, Dataset

from lightning_dcp.batch.view import view
from lightning_dcp.calibration.build import Run
from lightning_dcp.calibration.samples import SampleSource
from lightning_dcp.callbacks.scheduler import SchedulerCallback
from lightning_dcp.errors import BatchError, ConfigurationError, Problem
from lightning_dcp.schedule.plan import StepPlan

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class RealData:
    """What the user's own training loader gives.

    Attributes:
        batch: its first batch.
        lengths: tokens of each sample of all batches that were read.
        batch_size: samples of the first batch.
    """

    batch: Any
    lengths: Lengths
    batch_size: int


@dataclass
class StepTimes:
    """One batch's measurements.

    Attributes:
        lengths: tokens of its samples.
        plan: by which it ran.
        seconds: of each step but the first: the longest that a rank took for its packs, forward and backward, with its
            waiting for others of its groups; without the sum of gradients and the optimizer.
    """

    lengths: Lengths
    plan: StepPlan | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)


def measure_steps(
    run: Run,
    choose: Callable[[RealData], Sequence[Lengths]],
    *,
    repeats: int,
    real_batches: int = 1,
    callbacks: Sequence[Callback] = (),
    title: str = "measuring",
) -> list[StepTimes]:
    """Train on batches of chosen lengths, each several times, and time the steps.

    All batches run once unmeasured (the first use of a group or a shape is slow), then ``repeats`` times, in order and
    in reverse by turns, so that a machine that becomes slower or faster meets all alike. Collective: runs on every rank.

    Args:
        run: see :func:`~lightning_dcp.calibration.build.build_run`.
        choose: from the user's data to the lengths of each batch.
        repeats: measured steps of each batch.
        real_batches: how many batches of the user's are read.
        callbacks: further callbacks of the trainer.
        title: of the progress bar.

    Returns:
        The same on all ranks, in the order of ``choose``.
    """
    steps = _Steps(run, choose, repeats, real_batches)
    bar = _ProgressBar(steps, title)
    run.trainer.callbacks.extend([_Timer(steps), bar, *callbacks])  # type: ignore[attr-defined]
    run.strategy.plan_ahead = False  # nothing but the packs may use the machine while they are timed
    steps.own_loader = run.loader_owner.train_dataloader
    vars(run.loader_owner)["train_dataloader"] = steps.train_dataloader
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*is smaller than the logging interval.*")
        run.trainer.fit(run.model, datamodule=run.datamodule)
    if run.trainer.interrupted:
        raise KeyboardInterrupt
    return steps.times


class _Steps(Dataset[Any]):
    """The steps of a run in order; each item is a batch."""

    def __init__(
        self, run: Run, choose: Callable[[RealData], Sequence[Lengths]], repeats: int, real_batches: int
    ) -> None:
        self.run, self.choose, self.repeats, self.real_batches = run, choose, repeats, real_batches
        self.own_loader: Callable[[], Any] = run.loader_owner.train_dataloader
        self.times: list[StepTimes] = []
        self.order: list[int] = []
        self._source: SampleSource | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        """Stands in for the user's; called by the trainer when ranks, data and strategy are ready."""
        strategy = self.run.strategy
        # read once and handed on: a shuffle of the user's may differ from rank to rank
        found = strategy.broadcast(self._read() if strategy.global_rank == 0 else None)
        if not isinstance(found, RealData):
            raise found or BatchError("rank 0 handed on no batch")
        self._source = SampleSource(found.batch)
        self.times = [StepTimes(tuple(lengths)) for lengths in self.choose(found)]
        forth = list(range(len(self.times)))
        rounds = [forth, *(forth[:: -1 if number % 2 else 1] for number in range(1, self.repeats + 1))]
        self.order = [step for steps in rounds for step in steps]
        return DataLoader(self, batch_size=None)

    def _read(self) -> RealData | BatchError:
        """What rank 0 reads; an error is handed to all ranks, who wait for this."""
        try:
            batches = list(islice(iter(self.own_loader()), self.real_batches))
            if not batches:
                return BatchError("the training loader of the configuration gives no batch")
            lengths = [view(batch).lengths for batch in batches]
            return RealData(batches[0], tuple(n for batch in lengths for n in batch), len(lengths[0]))
        except BatchError as error:
            return error

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        if self._source is None:
            raise RuntimeError("the batches are made when a run starts")
        return self._source.batch(self.times[self.order[index]].lengths)


class _Timer(Callback):
    """Loads a checkpoint's weights and takes down each step's seconds."""

    def __init__(self, steps: _Steps) -> None:
        self.steps = steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = self.steps.run.weights
        if weights is None:
            return
        try:
            pl_module.load_state_dict(weights)
        except RuntimeError as error:
            remedy = "give the configuration of the run that saved it"
            raise ConfigurationError([Problem("the checkpoint's weights", str(error)[:300], remedy)]) from None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        callback = next(c for c in trainer.callbacks if isinstance(c, SchedulerCallback))  # type: ignore[attr-defined]
        if callback.scheduled is None or callback.result is None:
            raise RuntimeError("a step ended that was not planned")
        times = self.steps.times[self.steps.order[batch_idx]]
        times.plan = callback.scheduled.plan
        if batch_idx >= len(self.steps.times):
            times.seconds.append(callback.result.seconds)


class _ProgressBar(Callback):
    """Shows how many steps are done, on one rank and on a terminal."""

    def __init__(self, steps: _Steps, title: str) -> None:
        self.steps, self.title = steps, title
        self._progress: Progress | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        console = Console(stderr=True)
        if trainer.is_global_zero and console.is_terminal:
            self._progress = Progress(console=console, transient=True)
            self._progress.add_task(self.title, total=len(self.steps))
            self._progress.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=batch_idx + 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
