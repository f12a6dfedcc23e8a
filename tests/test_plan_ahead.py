"""Planning off the critical path: in time, in a run like any other, and without changing anything about it."""

from __future__ import annotations

import gc
import threading
import time
from collections import UserList
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_dcp import DCPStrategy, DynamicScheduler, RunSummary, SchedulerCallback, StepPlan
from lightning_dcp.data import COLLATORS
from tests.support.ranks import RankPool
from tests.support.training import RaggedTokens, TinyModule, fit, loader, trainer

LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9, 13, 40, 4, 4, 8, 30, 11, 6)
SMALL = {"max_seqlen_per_dp_cp_rank": 32}


class Seen(L.Callback):
    """Which batches each loop ran, by their lengths, and their plans."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, tuple[int, ...]]] = []
        self.digests: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._record(trainer)

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def _record(self, trainer: L.Trainer) -> None:
        plan = trainer.strategy.callback.scheduled.plan
        self.batches.append((trainer.state.stage.value, plan.lengths))
        self.digests.append(plan.digest())


def counts(run: L.Trainer) -> tuple[int, int]:
    """Plans that were begun before their step, and others."""
    found = run.strategy.plan_counts
    return found.ready + found.late, found.unplanned


# ------------------------------------------------------------------ in time


class Slow:
    """The dynamic scheduler, at 0.1 s a plan."""

    def __init__(self, ranks: int) -> None:
        self.plain = DynamicScheduler(ranks, 32)
        self.threads: list[str] = []

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        self.threads.append(threading.current_thread().name)
        time.sleep(0.1)
        return self.plain.schedule(lengths)


class SlowSteps(TinyModule):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        time.sleep(0.2)


def timed(plan_ahead: bool) -> dict[str, Any]:
    summary, module = RunSummary(), SlowSteps()
    run = trainer(strategy=SMALL | {"plan_ahead": plan_ahead, "scheduler": Slow}, callbacks=[summary])
    run.fit(module, loader(LENGTHS[:12], 2))
    found = run.strategy.plan_counts
    return {
        "counts": (found.ready, found.late, found.unplanned),
        "waited_s": found.waited_s,
        "row": summary._plans_text(),
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "threads": set(run.strategy._planner.scheduler.threads),
        "calls": len(run.strategy._planner.scheduler.threads),
    }


def test_plans_are_ready_when_their_steps_begin(ranks: RankPool) -> None:
    """Six batches; the first plan is begun when its step already waits, all others in the step before."""
    for ahead, plain in zip(ranks.run(timed, 2, True), ranks.run(timed, 2, False), strict=True):
        ready, late, unplanned = ahead["counts"]
        assert ready >= 4
        assert (ready + late, unplanned) == (6, 0)
        assert ahead["row"].startswith(f"{ready} of 6; waited ")
        assert plain["counts"] == (0, 0, 6)
        assert plain["row"].startswith("0 of 6; waited ")
        assert plain["waited_s"] > 0.6
        assert ahead["waited_s"] < 0.5 * plain["waited_s"]
        assert ahead["threads"] == {"lightning-dcp planning"}
        assert plain["threads"] == {"MainThread"}
        assert ahead["calls"] == plain["calls"] == 6
        assert all(torch.equal(weight, plain["weights"][name]) for name, weight in ahead["weights"].items())


# ------------------------------------------------- the same run, in all else


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow)], ids=["", "accumulation"]
)
def test_a_run_is_the_same_bit_for_bit(ranks: RankPool, options: dict[str, Any]) -> None:
    def run(plan_ahead: bool) -> list[dict[str, Any]]:
        strategy = {"max_seqlen_per_dp_cp_rank": 16, "plan_ahead": plan_ahead}
        return ranks.run(fit, 4, LENGTHS, 4, strategy=strategy, **options)

    for ahead, plain in zip(run(True), run(False), strict=True):
        assert ahead["cp_sizes"] == plain["cp_sizes"]
        assert ahead["losses"] == plain["losses"]
        assert ahead["logged"] == plain["logged"]
        assert all(torch.equal(weight, plain["weights"][name]) for name, weight in ahead["weights"].items())


class Stream(IterableDataset):
    """Batches one after the other. The stream goes on where the last iteration stopped, as one from a socket does."""

    def __init__(self, batches: int, *, sized: bool) -> None:
        self.all = [loader(LENGTHS[i % 10 :], 2).collate_fn(_samples(i)) for i in range(batches)]
        self.source = iter(self.all)
        self.sized = sized

    def __iter__(self) -> Iterator[Any]:
        return self.source

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("no length")
        return len(self.all)


def _samples(i: int) -> list[dict[str, Any]]:
    data = RaggedTokens((2 * i + 1, 30 - i))
    return [data[0], data[1]]


class Stateful(list):
    """A loader with a state of its own: what it has handed out."""

    def __iter__(self) -> Iterator[Any]:
        self.read = 0
        for batch in super().__iter__():
            self.read += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


def workers() -> DataLoader:
    return loader(LENGTHS, 3, shuffle=True, num_workers=2, persistent_workers=True)


LOADERS: dict[str, Any] = {
    "map-style": lambda: loader(LENGTHS, 3, shuffle=True),
    "workers": workers,
    "stream": lambda: DataLoader(Stream(8, sized=False), batch_size=None),
    "sized stream": lambda: DataLoader(Stream(8, sized=True), batch_size=None),
    "iterable": lambda: UserList(Stream(8, sized=True).all),
    "stateful": lambda: Stateful(Stream(8, sized=True).all),
    "several": lambda: CombinedLoader([loader(LENGTHS[:7], 2), loader(LENGTHS[7:], 3)], "sequential"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 2, "limit_test_batches": 3, "max_epochs": 2},
}


class Evaluated(TinyModule):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.model(batch["input_ids"]).sum())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.model(batch["input_ids"])


def collect_garbage() -> None:
    """Free what earlier runs of this process left behind: process groups must not be freed by a forked worker."""
    gc.collect()


def loops(kind: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What runs do with and without planning ahead."""
    if kind == "workers":
        collect_garbage()
    return [all_loops(plan_ahead, kind, settings) for plan_ahead in (True, False)]


def all_loops(plan_ahead: bool, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Sanity check, training with validation in between, validation, test, prediction; what they ran."""
    seen, module, make = Seen(), Evaluated(lr=0.01), LOADERS[kind]
    options = {"num_sanity_val_steps": 2, "val_check_interval": 2, "check_val_every_n_epoch": None, **settings}
    run = trainer(strategy={"plan_ahead": plan_ahead, "max_seqlen_per_dp_cp_rank": 64}, callbacks=[seen], **options)
    run.fit(module, loader(LENGTHS, 3) if kind == "several" else make(), make())
    found = [counts(run)]
    for loop in (run.validate, run.test, run.predict):
        loop(module, make())
        found.append(counts(run))
    return {
        "batches": list(zip(seen.batches, seen.digests, strict=True)),
        "begun": sum(begun for begun, _ in found),
        "at step": sum(at_step for _, at_step in found),
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
    }


CASES = [
    ("map-style", "whole"),
    pytest.param("map-style", "steps", marks=pytest.mark.slow),
    pytest.param("map-style", "limits", marks=pytest.mark.slow),
    ("workers", "limits"),
    pytest.param("stream", "whole", marks=pytest.mark.slow),
    ("stream", "limits"),
    pytest.param("sized stream", "steps", marks=pytest.mark.slow),
    pytest.param("sized stream", "limits", marks=pytest.mark.slow),
    pytest.param("iterable", "limits", marks=pytest.mark.slow),
    pytest.param("stateful", "whole", marks=pytest.mark.slow),
    pytest.param("several", "limits", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_the_same_batches_are_run_in_every_loop(ranks: RankPool, kind: str, settings: str) -> None:
    ahead, plain = ranks.run(loops, 1, kind, SETTINGS[settings])[0]
    assert ahead["batches"] == plain["batches"]
    assert {stage for (stage, _), _ in ahead["batches"]} == {"sanity_check", "train", "validate", "test", "predict"}
    assert all(torch.equal(weight, plain["weights"][name]) for name, weight in ahead["weights"].items())
    every = len(ahead["batches"])
    assert (plain["begun"], plain["at step"]) == (0, every)
    assert (ahead["begun"], ahead["at step"]) == ((0, every) if kind == "stateful" else (every, 0))


class Cutting(TinyModule):
    """Cuts every batch after the loader, so that no plan made ahead fits; and in place, which must do no harm."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["attention_mask"][:, 4:] = False
        batch["labels"][:, 4:] = -100
        return batch


def cut(plan_ahead: bool) -> tuple[list[Any], tuple[int, int], dict[str, Tensor]]:
    seen, module = Seen(), Cutting()
    run = trainer(strategy=SMALL | {"plan_ahead": plan_ahead}, callbacks=[seen], max_epochs=3)
    run.fit(module, loader(LENGTHS, 2))
    return seen.batches, counts(run), {name: p.detach().clone() for name, p in module.named_parameters()}


def test_batches_that_hooks_change_are_planned_as_they_are_run(ranks: RankPool) -> None:
    (batches, (_, at_step), weights), (plain, _, expected) = ranks.run(cut, 2, True)[0], ranks.run(cut, 2, False)[0]
    assert batches == plain
    assert max(max(lengths) for _, lengths in batches) == 4
    assert at_step >= 20, "only plans for the same lengths can be used: of (4, 4) there is one"
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


# ------------------------------------------------------------------- resuming


def resumable(directory: str, steps: int, resume_from: str | None, workers: int) -> dict[str, Any]:
    if workers:
        collect_garbage()
    seen, module = Seen(), TinyModule(optimizer="adamw", lr=0.01)
    saving = ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": steps, "enable_checkpointing": True}
    options["precision"] = "32-true"  # Lightning restores a checkpoint's weights before it makes them float64
    run = trainer(strategy=SMALL, callbacks=[seen, saving], **options)
    data = loader(LENGTHS, 3, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    run.fit(module, data, ckpt_path=resume_from)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"batches": seen.batches, "digests": seen.digests, "weights": weights}


@pytest.mark.parametrize(("workers", "step"), [pytest.param(0, 3, marks=pytest.mark.slow), (2, 9)])
def test_a_resumed_run_plans_the_same(ranks: RankPool, tmp_path: Path, workers: int, step: int) -> None:
    """Seven batches an epoch: resumed in the middle of the first one and of the second one, by new trainers."""
    straight = ranks.run(resumable, 2, str(tmp_path / "a"), 12, None, workers)
    checkpoint = str(tmp_path / "a" / f"step={step}.ckpt")
    resumed = ranks.run(resumable, 2, str(tmp_path / "b"), 12, checkpoint, workers)
    for whole, half in zip(straight, resumed, strict=True):
        assert len(whole["digests"]) == 12
        assert half["batches"] == whole["batches"][step:]
        assert half["digests"] == whole["digests"][step:]
        assert all(torch.equal(weight, whole["weights"][name]) for name, weight in half["weights"].items())


# --------------------------------------------------------- errors and the end


class Broken(RaggedTokens):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("sample 5 is broken")
        return super().__getitem__(index)


def run_until_failure(kind: str, plan_ahead: bool) -> dict[str, Any]:
    """Six samples that fail as the last: unreadable, too long, or refused by the scheduler; two a batch."""
    data: Any = Broken(LENGTHS[:6]) if kind == "unreadable" else RaggedTokens((5, 3, 4, 2, 7, 99))
    seen = Seen()
    run = trainer(strategy={"max_seqlen_per_dp_cp_rank": 64, "plan_ahead": plan_ahead}, callbacks=[seen])
    try:
        run.fit(TinyModule(), DataLoader(data, batch_size=2, collate_fn=COLLATORS["padded"]))
    except Exception as error:
        names = [thread.name for thread in threading.enumerate()]
        return {
            "batches": seen.batches,
            "error": f"{type(error).__name__}: {error}",
            "step": run.global_step,
            "threads": names,
        }
    raise AssertionError("the run did not fail")


@pytest.mark.parametrize(
    ("kind", "words"), [("unreadable", "sample 5 is broken"), ("too long", "(id 1) has 99 tokens")]
)
def test_an_error_of_a_batch_is_raised_at_its_step(ranks: RankPool, kind: str, words: str) -> None:
    ahead, plain = (ranks.run(run_until_failure, 1, kind, plan_ahead)[0] for plan_ahead in (True, False))
    assert ahead["error"] == plain["error"]
    assert words in ahead["error"]
    assert ahead["batches"] == plain["batches"]
    assert ahead["step"] == plain["step"] == 2
    assert "lightning-dcp planning" not in ahead["threads"], "the thread ends with the run"


def threads_of_runs() -> tuple[bool, list[str], list[str]]:
    """Whether the thread runs in training; which threads there are after a run, and after another one."""
    watched = []

    class Watching(TinyModule):
        def on_train_batch_end(self, *_: Any) -> None:
            watched.append("lightning-dcp planning" in [thread.name for thread in threading.enumerate()])

    run, after = trainer(strategy=SMALL), []
    for _ in range(2):
        run.fit(Watching(), loader(LENGTHS, 4))
        after.append([thread.name for thread in threading.enumerate()])
    return all(watched), after[0], after[1]


def test_the_thread_lives_as_long_as_the_run(ranks: RankPool) -> None:
    for running, *after in ranks.run(threads_of_runs, 2):
        assert running
        assert all("lightning-dcp planning" not in names for names in after)


class Counting:
    """A scheduler of the user's that remembers what it was asked, and by whom."""

    def __init__(self, ranks: int) -> None:
        self.plain, self.asked = DynamicScheduler(ranks, 32), []

    def schedule(self, lengths: Sequence[int]) -> StepPlan:
        self.asked.append((threading.current_thread().name, tuple(lengths)))
        return self.plain.schedule(lengths)


def own_scheduler() -> tuple[list[Any], list[Any]]:
    seen, scheduler = Seen(), Counting(2)
    run = trainer(strategy=SMALL, callbacks=[SchedulerCallback(scheduler), seen], max_epochs=2)
    run.fit(TinyModule(), loader((5, 3) * 6, 2))
    return scheduler.asked, seen.batches


def test_a_scheduler_of_the_users_is_asked_once_a_batch_in_order(ranks: RankPool) -> None:
    for asked, seen in ranks.run(own_scheduler, 2):
        assert asked == [("lightning-dcp planning", lengths) for _, lengths in seen]
        assert len(asked) == 12


def summarized() -> None:
    trainer(strategy={}, callbacks=[RunSummary()]).fit(TinyModule(lr=0.1), loader(LENGTHS, 2))


def test_the_summary_says_how_many_plans_were_ready(ranks: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    ranks.close()  # so that the ranks write where the test reads
    ranks.run(summarized, 1)
    assert any(
        "plans ready before their step" in line and " of 10; waited 0." in line
        for line in capfd.readouterr().out.splitlines()
    )


def test_it_can_be_switched_off() -> None:
    assert DCPStrategy().plan_ahead
    assert not DCPStrategy(plan_ahead=False).plan_ahead
