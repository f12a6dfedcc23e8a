"""Hugging Face models as regions: their loss on whole samples, their attention over the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from lightning_dcp.errors import Problem, RegionError, UnsupportedAttentionError
from lightning_dcp.models.adapter import ModelAdapter
from lightning_dcp.models.call import RegionCall
from lightning_dcp.models.compiled import is_compiled, uncompiled
from lightning_dcp.models.huggingface.attention import our_attention
from lightning_dcp.models.huggingface.first_position import first_position
from lightning_dcp.models.huggingface.fused import check_fused_head, fused_head, fused_loss
from lightning_dcp.models.huggingface.loss import Labels, check_divisor, check_targets, model_loss, take_labels
from lightning_dcp.models.huggingface.refusals import configuration_problems, mixes_tokens
from lightning_dcp.models.mixing import mixing_layers
from lightning_dcp.models.positions import POSITIONS, positions_argument

_CACHES = ("past_key_values", "cache", "cache_params")
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position")
"""What tells other implementations of attention where samples begin; here the plan does."""


class TransformerAdapter(ModelAdapter):
    """A Hugging Face model. Labels, and what belongs to them, stay with the caller's whole samples.

    Args:
        module: the model, compiled or not.
        fused: compute the loss from hidden states, without logits.
    """

    all_ones = True  # without a mask, transformers looks for sample borders in the positions, which jump in a shard

    def __init__(self, module: nn.Module, *, fused: bool = False) -> None:
        # Not the parent's: a model without positions is among the problems below, with all else that stands against it.
        self.module = uncompiled(module)
        self.positions = positions_argument(module) or POSITIONS
        self.first_position = first_position(self.module)
        self.model = cast(PreTrainedModel, self.module)
        self.fused = fused
        self.compiled = is_compiled(module)

    @property
    def fuses_loss(self) -> bool:
        """Whether the loss is computed without logits: asked for, and there is a head."""
        return self.fused and self._has_head

    def mixing(self) -> dict[str, nn.Module]:
        """Layers that mix tokens by other means than self-attention: recurrences, convolutions, cross attention, ..."""
        return mixing_layers(self.model, mixes_tokens)

    def problems(self, name: str) -> Iterator[Problem]:
        """Settings that no rank can compute by itself."""
        yield from configuration_problems(name, self.model)
        if positions_argument(self.module) is None:
            yield Problem(
                f"{type(self.model).__name__} as the context-parallel region {name or 'forward'!r}",
                f"its forward has no {POSITIONS}, and a shard does not start at position 0",
                f"use a model whose forward takes {POSITIONS}; if only an override of forward hides it, name it there",
            )
        if self.fuses_loss:
            if self.compiled:
                yield self._fused_problem(name, "a model that is compiled as a whole")
            try:
                fused_head(self.model)
            except RegionError as error:
                yield self._fused_problem(name, str(error))

    def problems_on_device(
        self, name: str, forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Iterator[Problem]:
        """Logits that are made in another way than the fused loss makes them."""
        if self.fuses_loss:
            try:
                with our_attention(self.model):
                    check_fused_head(self.model, fused_head(self.model), forward_context)
            except RegionError as error:
                yield self._fused_problem(name, str(error))
            except UnsupportedAttentionError:  # dry runs say which layer's
                return

    def _fused_problem(self, name: str, found: str) -> Problem:
        asked = f"fused_linear_cross_entropy=True for region {name or 'forward'!r} ({type(self.model).__name__})"
        return Problem(asked, found, "leave fused_linear_cross_entropy off for this model (or compile only its layers)")

    @property
    def _has_head(self) -> bool:
        return self.model.get_output_embeddings() is not None

    def serving(self) -> AbstractContextManager[Any]:
        """Attention through transformers' interface."""
        return our_attention(self.model)

    def call(self, call: RegionCall) -> Any:
        """Run one call; with labels, ``.loss`` is that of whole samples."""
        as_tuple = not call.take("return_dict", self.model.config.return_dict)
        self._prepare(call)
        keep = call.take("logits_to_keep", 0)
        asked = take_labels(call) if self._has_head else None
        if asked is not None:
            check_divisor(call, asked)
            check_targets(call, asked)
        if asked is not None and self.fused:
            out = fused_loss(call, self.model, fused_head(self.model), asked)
        else:
            out = self._with_loss(call, _gathered(call, call.run(all_ones=self.all_ones)), asked)
        out = self._last_logits(call, out, keep)
        return out.to_tuple() if as_tuple else out

    def _prepare(self, call: RegionCall) -> None:
        """Leave out what would keep, or return, something that belongs to no token."""
        for name in _CACHES:
            if call.take(name) is not None:
                raise RegionError(
                    f"region {call.name!r} was called with {name}: a cache holds keys of other calls; leave it out. To "
                    "generate, call generate outside a step: in on_validation_epoch_end, or in a callback"
                )
        if call.take("use_cache", False):
            raise RegionError(
                f"region {call.name!r} was called with use_cache=True: keys of a shard are no cache; leave it out"
            )
        for name in _BORDERS:
            call.take(name)
        for name in ("output_router_logits", "output_attentions"):
            if call.take(name, False):
                raise RegionError(
                    f"region {call.name!r} was called with {name}=True, which no rank has as a whole; leave it out"
                )
        call.give("use_cache", False)
        call.give("return_dict", True)

    def _last_logits(self, call: RegionCall, out: Any, keep: Any) -> Any:
        """As ``logits_to_keep`` asks: the last logits of each row, of a padded batch in whole samples."""
        if not isinstance(keep, int) or (keep and call.pack.sharded):
            raise RegionError(
                f"region {call.name!r} was called with logits_to_keep={keep!r}; give a number, and whole samples"
            )
        if keep and getattr(out, "logits", None) is not None:
            out["logits"] = out.logits[:, -keep:]
        return out

    def _with_loss(self, call: RegionCall, out: Any, asked: Labels | None) -> Any:
        if asked is None:
            return out
        return with_loss(out, model_loss(self.model, out.logits, asked))


def _gathered(call: RegionCall, out: ModelOutput) -> ModelOutput:
    """Local outputs made whole; as a dict, because not every transformers tells torch the names of an output's parts."""
    return type(out)(**call.gathered(dict(out)))


def with_loss(out: ModelOutput, loss: Tensor) -> ModelOutput:
    """The output with a loss, in its usual place: the first."""
    return type(out)(**({"loss": loss} | {name: value for name, value in out.items() if name != "loss"}))
