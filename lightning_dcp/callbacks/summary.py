"""A table at the end of training: what was run, how fast, and at which CP sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lightning_dcp.attention.choice import SchemeChooser
from lightning_dcp.callbacks.timed import TimedBatches, scheduler_of
from lightning_dcp.metrics import BusyShare, StepTime, TokenThroughput
from lightning_dcp.step.runner import BatchResult
from lightning_dcp.step.scheduled import ScheduledBatch


class RunSummary(TimedBatches):
    """Counts packs and times steps while training, and prints a table at the end.

    The busy share is the part of the time of all ranks, while packs run, that is not spent waiting for others. A plan is
    ready if it was there when its step asked for it (on this rank); how long steps waited for plans is no part of the
    step time. With ``attention="auto"`` a row counts this rank's attention calls by scheme and CP size.

    Args:
        validation_metric: the logged value shown as validation loss.
        warmup_steps: first steps left out of the timings (the first use of a group is slow).
    """

    def __init__(self, validation_metric: str = "val_loss", warmup_steps: int = 2) -> None:
        self.validation_metric, self.warmup_steps = validation_metric, warmup_steps
        self.losses: list[float] = []
        self.packs_by_size: Counter[int] = Counter()
        self.microbatches: list[int] = []
        self.tokens: list[int] = []
        self.padding: list[int] = []
        self.seconds: list[float] = []
        self.busy: list[tuple[float, float]] = []
        self.plans_ready = 0
        self.plans_waited_s = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin anew; refuse to run under a strategy that makes no plans."""
        scheduler_of(trainer, self)
        for values in (self.losses, self.microbatches, self.tokens, self.padding, self.seconds, self.busy):
            values.clear()
        self.packs_by_size.clear()
        self.plans_ready, self.plans_waited_s = 0, 0.0

    def count(self, trainer: Trainer, scheduled: ScheduledBatch, result: BatchResult, seconds: float) -> None:
        """Count what the step did."""
        self.seconds.append(seconds)
        plan = scheduled.plan
        self.packs_by_size.update(pack.cp_size for pack in plan.packs())
        self.microbatches.append(len(plan.microbatches))
        self.tokens.append(sum(plan.lengths))
        self.padding.append(sum(plan.padding(pack) for pack in plan.packs()))
        self.plans_ready += scheduled.planned.ready
        self.plans_waited_s += scheduled.planned.waited_s
        self.busy.append((sum(result.busy), len(result.busy) * result.seconds))
        output = result.output  # Lightning divides its own copy of the loss by accumulate_grad_batches
        self.losses.append(float(output["loss"] if isinstance(output, Mapping) else output))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks over the time of the counted steps."""
        return self._measured()[0]

    def _measured(self) -> tuple[float, float, float]:
        """Tokens a second, median step time and busy share of the counted steps; all ranks know the tokens of all."""
        tokens, time_of_steps = TokenThroughput(sync_on_compute=False), StepTime((0.5,), sync_on_compute=False)
        share = BusyShare(sync_on_compute=False)
        skip = self.warmup_steps if len(self.seconds) > self.warmup_steps else 0
        for count, seconds, busy in list(zip(self.tokens, self.seconds, self.busy, strict=True))[skip:]:
            tokens.update(count, seconds)
            time_of_steps.update(seconds)
            share.update(*busy)
        return float(tokens.compute()), float(time_of_steps.compute()["p50"]), float(share.compute())

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table, on one rank."""
        folder = trainer.log_dir or trainer.default_root_dir  # asks all ranks, so it is read on all
        if self.seconds and trainer.is_global_zero:
            Console().print(self._table(trainer, folder))

    def _plans_text(self) -> str:
        return f"{self.plans_ready} of {len(self.microbatches)}; waited {self.plans_waited_s:.2f} s"

    def _table(self, trainer: Trainer, folder: str) -> Table:
        tokens_per_second, median_s, busy_share = self._measured()
        table = Table(title="Training with context parallelism", show_header=False)
        sizes = ", ".join(f"CP {size}: {count}" for size, count in sorted(self.packs_by_size.items()))
        accumulated = trainer.accumulate_grad_batches
        rows = {
            "batches (optimizer steps)": f"{len(self.seconds)} ({trainer.global_step})",
            "step time, median": f"{median_s * accumulated:.3f} s",
            "tokens/s, all ranks": f"{tokens_per_second:,.0f}",
            "packs by context-parallel size": sizes,
            "micro-batches a step": f"{sum(self.microbatches) / len(self.microbatches):.2f}",
            "plans ready before their step": self._plans_text(),
            "busy share of the ranks": f"{busy_share:.1%}",
            "training loss, first and last": f"{self.losses[0]:.4f}, {self.losses[-1]:.4f}",
        }
        if any(self.padding):
            rows["padding, of the tokens computed"] = f"{sum(self.padding) / sum((*self.padding, *self.tokens)):.1%}"
        rows |= _schemes_row(trainer) | _audit_row(trainer)
        validation = trainer.callback_metrics.get(self.validation_metric)
        if validation is not None:
            rows["validation loss"] = f"{float(validation):.4f}"
        if trainer.loggers or trainer.checkpoint_callbacks:
            rows["logs and checkpoints in"] = folder
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def _audit_row(trainer: Trainer) -> dict[str, str]:
    """What audits of boundaries found, where there is a budget."""
    audits = getattr(trainer.strategy, "audits", None)
    return {} if audits is None or not audits.summary else {"findings of boundary audits": audits.summary}


def _schemes_row(trainer: Trainer) -> dict[str, str]:
    """Which exchange schemes were picked; nothing where the user chose one, or where no pack was cut."""
    options = getattr(trainer.strategy, "attention", None)
    chooser = getattr(options, "scheme", None)
    if not isinstance(chooser, SchemeChooser) or not chooser.picked:
        return {}
    counts = (f"CP {size} {scheme}: {count}" for (size, scheme), count in sorted(chooser.picked.items()))
    return {"attention calls by scheme": ", ".join(counts)}
