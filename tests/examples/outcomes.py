"""Trainings of the table's rows, several in one job: setting up ranks takes longer than most trainings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as L
import torch

from tests.examples.data import LENGTHS, LIMIT, loader
from tests.examples.rows import ROWS, WITH_TRANSFORMERS, Row
from tests.support.ranks import RankFailure, RankPool
from tests.support.training import Recorder, trainer

ALL_ROWS = ROWS | WITH_TRANSFORMERS
TOGETHER = 8


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        row: name of the row.
        fmt: format of the batches.
        world: ranks; 0 is plain Lightning in one process.
        outputs: what the steps see.
    """

    row: str
    fmt: str = "padded"
    world: int = 4
    precision: str = "64-true"
    batch_size: int = 6
    lengths: tuple[int, ...] = LENGTHS
    without_targets: tuple[int, ...] = ()
    outputs: str = "gathered"

    @property
    def alone(self) -> Case:
        """Plain Lightning on one process and padded batches: what everything else has to agree with."""
        return replace(self, fmt="padded", world=0, outputs="gathered")

    def __str__(self) -> str:
        return f"{self.row}-{self.fmt}-{self.world}" + ("" if self.outputs == "gathered" else f"-{self.outputs}")


class StepLogs(Recorder):
    """Also keeps what was logged at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, *rest)
        step = len(self.losses)
        self.logged |= {f"{name}, step {step}": float(value) for name, value in trainer.callback_metrics.items()}


def fit_cases(cases: Iterable[Case]) -> list[dict[str, Any]]:
    return [fit_case(case) for case in cases]


def fit_case(case: Case) -> dict[str, Any]:
    """Train by SGD with lr 1; but for the optimizer the module is as the example has it."""
    row, recorder = ALL_ROWS[case.row], StepLogs()
    module = row.make()
    learnt = [p for p in module.parameters() if p.requires_grad]
    module.configure_optimizers = lambda: torch.optim.SGD(learnt, lr=1.0)  # type: ignore[method-assign]
    strategy = strategy_of(row, case.world) | {"outputs": case.outputs} if case.world else None
    run = trainer(strategy=strategy, precision=case.precision, callbacks=[recorder])
    data = {"lengths": case.lengths, "without_targets": case.without_targets}
    run.fit(module, loader(row.batches, case.fmt, case.precision, case.batch_size, **data))
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "logged": recorder.logged,
        "sharded": run.strategy._outputs.sharded if case.world else None,
        "cp_sizes": {size for sizes in recorder.cp_sizes for size in sizes},
    }


def strategy_of(row: Row, world: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_seqlen_per_dp_cp_rank": LIMIT[world], "loss_normalization": row.normalization}
    return options | ({"regions": list(row.regions)} if row.regions else {})


class Outcomes:
    """What trainings gave, on each rank; made when first asked for, together with others of the same world.

    Args:
        ranks: the ranks.
        cases: those that will be asked for.
    """

    def __init__(self, ranks: RankPool, cases: Iterable[Case]) -> None:
        self._ranks, self._done = ranks, dict[Case, list[dict[str, Any]]]()
        self._wanted = list(dict.fromkeys(cases))

    def of(self, case: Case) -> list[dict[str, Any]]:
        """Of each rank."""
        if case not in self._done:
            start = self._wanted.index(case) if case in self._wanted else 0
            others = [c for c in self._wanted[start:] if c.world == case.world and c not in self._done and c != case]
            try:
                self._run([case, *others[: TOGETHER - 1]])
            except RankFailure:  # perhaps of another case
                self._run([case])
        return self._done[case]

    def _run(self, cases: list[Case]) -> None:
        results = self._ranks.run(fit_cases, max(cases[0].world, 1), cases)
        for i, case in enumerate(cases):
            self._done[case] = [of_rank[i] for of_rank in results]
