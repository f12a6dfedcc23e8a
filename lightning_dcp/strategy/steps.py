"""Steps: a batch is planned, its packs are run, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_dcp import checks
from lightning_dcp.errors import BatchError
from lightning_dcp.loss.weighting import backward_scale
from lightning_dcp.models.megatron.gradients import reduce_gradients
from lightning_dcp.models.megatron.pipeline import ZeroLoss, run_schedule
from lightning_dcp.models.region import backward_of_nothing, region_marks
from lightning_dcp.parallel.randomness import seed_of
from lightning_dcp.step.control import StepControl
from lightning_dcp.step.outputs_choice import GATHERED, OutputsChoice
from lightning_dcp.step.runner import detached, loss_of, run_packs
from lightning_dcp.step.scheduled import PackWork, ScheduledBatch, schedule_batch
from lightning_dcp.strategy.planning import Planning


class StepHooks(Planning):
    """Hooks of Lightning's that run steps and their backward."""

    def schedule(self, batch: Any, batch_idx: int) -> ScheduledBatch:
        """Plan a batch; called by the scheduler callback."""
        if self._planner is None:
            raise RuntimeError("the scheduler is made when a run starts")
        if self._trainer.training and self._checkpoints is not None:
            self._checkpoints.resume_random_states()
        state = self._state_in_force()
        with self._naming_failures():
            scheduled = schedule_batch(
                batch,
                self._planner,
                self.groups,
                normalization=self.loss_normalization,
                device=self.root_device,
                clock=self.clock,
                attention=self._attention,
                seed=seed_of(
                    os.environ.get("PL_GLOBAL_SEED"),
                    str(self._trainer.state.stage),
                    self._trainer.global_step,
                    batch_idx,
                ),
                token_multiple=self.tensor_model_parallel_size if self.sequence_parallel else 1,
                gradient_scale=self._gradient_scale(),
                state=state,
                budget=self.boundaries.in_force,
            )
            checks.check_lockstep(self, scheduled.plan)
        self.audits.take(scheduled.planned.settled.audit, batch_idx)
        return scheduled

    def _gradient_scale(self) -> float:
        """The factor of gradients that do not come through the step's loss."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return (1.0 if scaler is None else scaler.get_scale()) / self._trainer.accumulate_grad_batches

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Run ``training_step`` and backward for each pack of this rank; return what one process would have.

        Lightning zeroes gradients after this and before :meth:`backward`; they wait in a stash until then.
        """
        accumulate = self._trainer.accumulate_grad_batches
        first = self._trainer.fit_loop.epoch_loop.batch_idx % accumulate == 0
        before = self._take_gradients() if first else []  # left over from the window before
        if first and self._distributed is not None:
            self._distributed.zero()
        if not self._sees_gradients_before_zero_grad():
            before.clear()  # they would take memory while the packs run
        after = partial(self._in_schedule if self.topology.is_pipeline else self._pack_backward, accumulate)
        output = self._run("training_step", self.precision_plugin.train_step_context, batch, args, after, self._outputs)
        self._stash = self._take_gradients()
        if self.callback.scheduled is not None and not any(self.callback.scheduled.targets):
            self._stash = self._zeros_for_none(self._stash)
        for parameter, gradient in zip(self._module.parameters(), before, strict=False):
            parameter.grad = gradient  # for on_before_zero_grad; Lightning drops them right after it
        return output

    def _zeros_for_none(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients of a batch without targets: its packs ran no backward, but optimizers take steps without gradients, too."""
        own, pairs = self._distributed, zip(self._module.parameters(), gradients, strict=True)
        wanted = [g is None and p.requires_grad and not (own and own.holds(p)) for p, g in pairs]
        every = zip(self._module.parameters(), gradients, wanted, strict=True)
        return [torch.zeros_like(p) if want else g for p, g, want in every]

    def _sees_gradients_before_zero_grad(self) -> bool:
        hook, trainer = "on_before_zero_grad", self._trainer
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        return is_overridden(hook, self._module) or any(is_overridden(hook, c, parent=Callback) for c in callbacks)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        """Run ``validation_step`` for each pack of this rank; return what one process would have."""
        return self._run("validation_step", self.precision_plugin.val_step_context, batch, args, _keep)

    def test_step(self, batch: Any, *args: Any) -> Any:
        """Run ``test_step`` for each pack of this rank; return what one process would have."""
        return self._run("test_step", self.precision_plugin.test_step_context, batch, args, _keep)

    def predict_step(self, batch: Any, *args: Any) -> Any:
        """Run ``predict_step`` for each pack of this rank; return the predictions in the batch's order."""
        return self._run("predict_step", self.precision_plugin.predict_step_context, batch, args, _keep)

    def _run(
        self,
        name: str,
        precision: Callable[[], AbstractContextManager[None]],
        batch: Any,
        args: tuple[Any, ...],
        after: Callable[[PackWork, Any], Any],
        outputs: OutputsChoice = GATHERED,
    ) -> Any:
        scheduled = self.callback.scheduled
        if scheduled is None or scheduled.view.batch is not batch:
            raise RuntimeError(f"{name} got a batch that the scheduler callback has not planned")

        def step(pack: Any) -> Any:
            with precision():
                return getattr(self._module, name)(pack, *args)

        run_all = self._through_stages if self.topology.is_pipeline else None
        self._running_packs = True
        try:
            with self._naming_failures():
                control = self._watch_over(name)
                self.callback.result = run_packs(
                    scheduled, self._module, self.regions, step, after, outputs, run_all, control
                )
        except StopIteration as error:  # Lightning would take it for the end of the epoch
            raise RuntimeError(f"StopIteration inside {name}") from error
        finally:
            self._running_packs = False
        return self.callback.result.output

    def _watch_over(self, name: str) -> StepControl | None:
        """What times training steps, told which batch of the run this is; other steps are not timed."""
        if name != "training_step":
            return None
        self.control.steps = self._trainer.fit_loop.epoch_loop.total_batch_idx
        return self.control

    def _through_stages(self, works: Sequence[PackWork], run: Callable[[PackWork], None]) -> None:
        """Run packs through the pipeline's stages; backward too, where gradients are wanted."""
        model = self._pipeline.module

        def forward(work: PackWork) -> Tensor:
            self._scaled_loss = None
            run(work if model.chunk.post_process else replace(work, leader=False))
            return torch.zeros((), device=self.root_device) if self._scaled_loss is None else self._scaled_loss

        # Interleaved micro-batches go in rounds of one a stage. What is missing is one that has run, for nothing.
        missing = -len(works) % (self.pipeline_model_parallel_size if len(model.chunks) > 1 else 1)
        last = works[-1]
        works = [*works, *(_filler(last) for _ in range(missing))]
        with self._pipeline.serving():
            run_schedule(model, works, forward, forward_only=not torch.is_grad_enabled())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """As in Lightning; not inside a step."""
        self._refuse_in_step("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As in Lightning; not inside a step."""
        self._refuse_in_step("reduce")
        return super().reduce(tensor, group, reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """As in Lightning; not inside a step."""
        self._refuse_in_step("barrier")
        with self._naming_failures():
            super().barrier(*args, **kwargs)

    def _refuse_in_step(self, name: str) -> None:
        if self._running_packs and self.world_size > 1:
            raise BatchError(
                f"{name} inside a step: ranks run different numbers of packs of a batch and would wait for each other for "
                "ever. Log values with self.log (they are joined over ranks), or call it in a hook outside the step."
            )

    def _pack_backward(self, accumulate: int, work: PackWork, output: Any) -> Any:
        loss = loss_of(output)
        if work.weight:  # a pack without targets adds nothing, and its mean over nothing is NaN
            with self.regions.backward_of(work.active):
                self._module.backward(self._scaled(loss, work, accumulate))
        elif work.pack_weight or self._has_megatron:  # experts of others wait for it, auxiliary losses count it
            with self.regions.backward_of(work.active):
                backward_of_nothing(loss)
        return _keep(work, output)

    def _in_schedule(self, accumulate: int, work: PackWork, output: Any) -> Any:
        """Hand the loss to the pipeline's schedule, which runs the backward."""
        loss, model_output = loss_of(output), self._pipeline.last_output
        self._pipeline.last_output = None
        if model_output is None or not model_output.requires_grad:
            raise BatchError(
                "training_step called the model without gradients, but the stages before wait for those of its last layers: call "
                "it outside torch.no_grad(), and leave the loss at `0 * output.sum()` where there is nothing to learn"
            )
        scaled = self._scaled(loss, work, accumulate) if work.weight else None
        if scaled is None or not region_marks(loss):  # the stages before wait for a gradient, if only of zeros
            nothing = ZeroLoss.apply(model_output)
            scaled = nothing if scaled is None else scaled + nothing
        self._scaled_loss = scaled
        return _keep(work, output)

    def _scaled(self, loss: Tensor, work: PackWork, accumulate: int) -> Tensor:
        """The loss before its backward."""
        scaled = loss * backward_scale(work.weight, work.copies, accumulate)
        scaler = getattr(self.precision_plugin, "scaler", None)
        return scaled if scaler is None else scaler.scale(scaled)

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = []
        for parameter in self._module.parameters():
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over the gradients that :meth:`training_step` made; sum them over the plane when a step follows."""
        module = self._module
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        for parameter, gradient in zip(module.parameters(), self._stash or [], strict=True):
            parameter.grad = gradient
        self._stash = None
        if not self._trainer.fit_loop._should_accumulate():
            self.gradient_reductions += 1
            with self._naming_failures():
                own = self._distributed
                reduce_gradients(module, self.groups, self.clock, None if own is None else own.reduce)
        return self.precision_plugin.post_backward(closure_loss, module)


def _filler(work: PackWork) -> PackWork:
    """The same pack again, adding nothing."""
    return replace(work, weight=0.0, leader=False, active=replace(work.active, gradient_scale=0.0))


def _keep(work: PackWork, output: Any) -> Any:
    """What is kept of a step's output: its values, only where they will be sent from."""
    return detached(output) if work.leader else None
