"""How a Megatron-Core model is called as a region."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dcp.errors import Problem, RegionError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.call import RegionCall
from lightning_dcp.models.megatron.alignment import has_transformer_engine_attention, needed_alignment
from lightning_dcp.models.megatron.model import MegatronModel
from lightning_dcp.models.megatron.model_problems import model_problems
from lightning_dcp.models.megatron.randomness import seed_states
from lightning_dcp.models.megatron.replay.own import own_samples
from lightning_dcp.models.megatron.scope import PackScope
from lightning_dcp.models.pack import ActivePack
from lightning_dcp.parallel.randomness import seed_of
from lightning_dcp.schedule.alignment import Alignment


class StageOutput(BaseException):
    """Ends the user's step on a stage before the last, whose hidden state goes to the next stage instead.

    No Exception, so that the step's own ``except Exception`` does not take it for an error.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("a pipeline stage's hidden state")
        self.hidden = hidden


class MegatronAdapter(ModelAdapter):
    """A :class:`MegatronModel`: its layers find the pack in the model's scope, and attention needs no mode.

    Attributes:
        alignment: the padding that layers of Transformer Engine and FP8 need.
        last_output: what the last call on a pack gave on this rank, with its graph; the pipeline starts the backward of a
            pack without targets there.
    """

    dry_runs = False
    module: MegatronModel

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.alignment = self.needed_alignment()
        self.last_output: Tensor | None = None
        self._last: tuple[ActivePack, Any] | None = None

    def needed_alignment(self) -> Alignment:
        """The padding that the config and the layers need."""
        te = has_transformer_engine_attention(self.module)
        return needed_alignment(self.module.config, transformer_engine_attention=te)

    def problems(self, name: str) -> Iterator[Problem]:
        """What config and layers ask for that does not run over CP groups."""
        yield from model_problems(self.module, name)

    def serving(self) -> AbstractContextManager[Any]:
        """A backward leaves the scope of its last call behind; put back what was there."""
        return self.module.scope.kept()

    def call(self, call: RegionCall) -> Any:
        """Run the chunk under way; on a stage before the last, end the step."""
        model, pack = self.module, call.pack
        self._refuse_second(call)
        scope = PackScope(
            call.context,
            pack.attention,
            pack.batch_tokens,
            pack.batch_samples * len(call.context.layout.lengths) / max(1, len(pack.samples)),
            pack.gradient_scale,
            own_samples(call) if model.config.num_moe_experts else None,  # only routers ask
        )
        with model.scope.inside(scope):
            local = model.scope.mark(call.run(partial(self._seeded, call), serve_attention=False), scope)
        if not model.chunk.post_process:
            raise StageOutput(local)
        if model.config.pipeline_model_parallel_size > 1 and torch.is_grad_enabled():
            self.last_output = local
        return call.gathered(local)

    def _refuse_second(self, call: RegionCall) -> None:
        """In a pipeline the first call ends the step on all stages but the last, which would wait there for ever."""
        model, before = self.module, self._last
        again = before is not None and before[0] is call.pack and before[1] is model.chunk
        if again and model.config.pipeline_model_parallel_size > 1:
            raise RegionError(
                f"region {call.name!r} is called twice in a step under pipeline_model_parallel_size="
                f"{model.config.pipeline_model_parallel_size}: a micro-batch goes through the stages once. Join the calls "
                "into one (chosen and rejected answers as rows of one tensor, say), or use pipeline_model_parallel_size=1"
            )
        self._last = call.pack, model.chunk

    def _seeded(self, call: RegionCall, **arguments: Any) -> Any:
        """Run the chunk with random states that follow from the call, the stage and the chunk."""
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        seed_states(seed_of(call.seed, stage, self.module.chunk_number))
        return call.forward(**arguments)
