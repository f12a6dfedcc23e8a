"""The callback that records and replays the routes of Megatron-Core's mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_dcp.callbacks.loops import STAGES, EveryLoop, Stage
from lightning_dcp.callbacks.timed import scheduler_of
from lightning_dcp.errors import BatchError, ConfigurationError, Problem, RegionError, raise_problems
from lightning_dcp.models.megatron import MegatronModel
from lightning_dcp.models.megatron.model import megatron_models
from lightning_dcp.models.megatron.replay import (
    Mode,
    ModelReplay,
    RouteStore,
    bind,
    binding_problems,
    has_experts,
    unbind,
)
from lightning_dcp.step.scheduled import ScheduledBatch


class RouterReplay(EveryLoop):
    """Sends tokens to the experts that they went to before, so that a policy is trained on the routes it was sampled with.

    Weights of the replayed experts, and the gradients of the router, are those of the live router; balance losses see its
    own choice. Routes are known by sample and token, in the samples' order: CP size, pack, tensor and expert parallelism may
    be others when they are replayed, and layers that are computed again in the backward replay the same.

    - **R3, routes that come with the batch** (from vLLM or SGLang, which name them ``routed_experts``):
      ``RouterReplay(field="routed_experts")``. The field is per-token, integers ``[.., layers, topk]`` behind the axes of
      ``input_ids``; ``layers`` counts the mixture-of-experts layers, or all. Rows of -1 are routed live. One byte an entry
      is enough for up to 128 experts, and batches are sent to the device whole.
    - **R2, routes recorded in an earlier pass.** In one step::

          replay = RouterReplay()                     # among the trainer's callbacks, and known to the module
          def training_step(self, batch, batch_idx):
              with torch.no_grad(), replay.record():
                  old = self.log_probs(batch)
              with replay.replay():
                  new = self.log_probs(batch)

      Or over several passes, by the samples' ids (``sample_ids``): ``RouterReplay(record=["predict"])`` records while the
      old log-probabilities are predicted, and replays in training. With pipelines this is the way, as a micro-batch goes
      through the stages once.

    Routes that outlive a batch are held by every rank on the CPU, of the layers of its stage: ``layers * topk`` bytes a token,
    twice that beyond 128 experts; a sample's newest replace older ones, and :meth:`clear` drops all. They are exchanged at the
    end of each batch, and are not part of checkpoints.

    Args:
        field: the batch's field with routes; by default what was recorded is replayed.
        record: loops that record all their calls.
        replay: loops that replay in all their calls; by default training, if ``field`` or ``record`` is given.
        keep: keep what ``with replay.record()`` records for later batches, too.
        models: attribute paths of the models; by default all Megatron-Core models with experts. Each replays its own routes.

    Raises:
        ConfigurationError: all that stands against it, at once: of the arguments here, of the models when a run starts.
    """

    def __init__(
        self,
        *,
        field: str | None = None,
        record: Sequence[Stage] = (),
        replay: Sequence[Stage] | None = None,
        keep: bool = False,
        models: Sequence[str] | None = None,
    ) -> None:
        self.field, self.keep, self.model_names = field, keep, models
        by_default = ("train",) if field is not None or record else ()
        self.stages: dict[str, tuple[str, ...]] = {
            "record": tuple(record),
            "replay": tuple(by_default if replay is None else replay),
        }
        self._replays: dict[str, ModelReplay] = {}
        self._bound: dict[str, MegatronModel] = {}
        self._stores: dict[str, RouteStore] = {}
        raise_problems(list(self._argument_problems()))

    def _argument_problems(self) -> Iterator[Problem]:
        record, replay = self.stages["record"], self.stages["replay"]
        for name, stages in self.stages.items():
            if unknown := [stage for stage in stages if stage not in STAGES]:
                yield Problem(f"{name}={list(stages)}", f"no loops {unknown}", f"use some of {list(STAGES)}")
        if both := sorted(set(record) & set(replay)):
            yield Problem(
                f"record={list(record)} and replay={list(replay)}",
                f"{both} in both",
                "take them out of one; to do both in a step, use `with replay.record()` and `with replay.replay()`",
            )
        if self.field is not None and (record or self.keep):
            yield Problem(
                f"field={self.field!r} and {'keep=True' if self.keep else f'record={list(record)}'}",
                "two sources of the routes to replay",
                "give the field, or record",
            )

    # ------------------------------------------------------------ in a step

    @contextmanager
    def record(self) -> Iterator[None]:
        """Calls that begin inside remember their routes, for the rest of the batch or, with ``keep=True``, longer.

        Raises:
            RegionError: no model with experts is bound.
        """
        with self._in_mode(Mode.RECORD):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Calls that begin inside replay the batch's field, or what was recorded: of this batch, else of an earlier one.

        Raises:
            RegionError: no model with experts is bound.
        """
        with self._in_mode(Mode.REPLAY):
            yield

    @contextmanager
    def live(self) -> Iterator[None]:
        """Calls that begin inside choose their experts, whatever the loop does."""
        with self._in_mode(Mode.LIVE):
            yield

    @contextmanager
    def _in_mode(self, mode: Mode) -> Iterator[None]:
        if not self._replays and mode is not Mode.LIVE:
            raise RegionError(
                f"router replay: no Megatron-Core model with experts to {mode.value} routes of. Put the RouterReplay among the "
                "trainer's callbacks, and set num_moe_experts"
            )
        before = {name: replay.mode for name, replay in self._replays.items()}
        for replay in self._replays.values():
            replay.mode = mode
        try:
            yield
        finally:
            for name, replay in self._replays.items():
                replay.mode = before[name]

    def routes(self, sample_id: int, model: str | None = None) -> Tensor:
        """The kept routes of a sample, ``[L, layers, topk]``: int8 or int16, on the CPU, of the layers of this rank's stage.

        Args:
            sample_id: of the sample.
            model: attribute path of the model; may be left out for one.

        Raises:
            BatchError: nothing was recorded of it.
        """
        names = [model] if model is not None else list(self._stores)
        found = [self._stores[name].samples for name in names if name in self._stores]
        if len(found) != 1 or sample_id not in found[0]:
            raise BatchError(
                f"routes of sample {sample_id}: recorded are {[len(samples) for samples in found]} samples in the models {names}"
            )
        return found[0][sample_id].routes

    def clear(self) -> None:
        """Drop all kept routes."""
        self._stores.clear()
        for name, replay in self._replays.items():
            self._stores[name] = replay.store = RouteStore(replay.layers.own)

    # ------------------------------------------------------------- Lightning

    def batch_begins(self, trainer: Trainer, stage: Stage) -> None:
        """Take the batch, and do what the loop does."""
        scheduled = self._scheduled(trainer)
        mode = next((Mode(name) for name, stages in self.stages.items() if stage in stages), Mode.LIVE)
        for replay in self._replays.values():
            replay.begin(scheduled.view, mode, self.field)

    def batch_ends(self, trainer: Trainer, stage: Stage) -> None:
        """Keep what was recorded for later batches, where that is asked for. Collective."""
        scheduled = self._scheduled(trainer)
        for replay in self._replays.values():
            if self.keep or stage in self.stages["record"]:
                replay.keep(partial(_exchange, scheduled))
            replay.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the routers."""
        self._unbind()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the routers; kept routes stay."""
        self._unbind()

    def loop_starts(self, trainer: Trainer, module: LightningModule) -> None:
        """Bind the routers of the models as they are now."""
        scheduler_of(trainer, self)
        self._unbind()
        models = self._models(module)
        problems = [p for name, model in models.items() for p in binding_problems(model, name, self._stores.get(name))]
        raise_problems(problems)
        for name, model in models.items():
            replay = self._replays[name] = bind(model, self._stores.get(name))
            self._stores[name] = replay.store
        self._bound = models

    # ------------------------------------------------------------------ parts

    def _models(self, module: LightningModule) -> dict[str, MegatronModel]:
        every = megatron_models(module)
        asked = every if self.model_names is None else self.model_names
        found = {name: every[name] for name in asked if name in every and has_experts(every[name])}
        missing = [name for name in asked if name not in found] if self.model_names is not None else []
        if missing or (not found and any(self.stages.values())):
            raise ConfigurationError(
                [
                    Problem(
                        f"router replay{f' in models {missing}' if missing else ''}",
                        f"Megatron-Core models {list(every)}, of which {list(found)} have experts",
                        "set num_moe_experts, or leave RouterReplay out",
                    )
                ]
            )
        return found

    def _unbind(self) -> None:
        for model in self._bound.values():
            unbind(model)
        self._bound, self._replays = {}, {}

    def _scheduled(self, trainer: Trainer) -> ScheduledBatch:
        scheduled = scheduler_of(trainer, self).scheduled
        if scheduled is None:
            raise RuntimeError("a batch begins or ends that the scheduler callback has not planned")
        return scheduled


def _exchange(scheduled: ScheduledBatch, own: Any) -> list[Any]:
    every: list[Any] = [None] * len(scheduled.groups.world_ranks)
    with scheduled.clock.waiting():
        dist.all_gather_object(every, own, group=scheduled.groups.control)
    return every
