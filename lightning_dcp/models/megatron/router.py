"""Megatron-Core's router for packs: auxiliary losses that do not depend on how a batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lightning_dcp.errors import RegionError
from lightning_dcp.models.megatron import moe_auxiliary as auxiliary
from lightning_dcp.models.megatron.moe_rows import RouterRows, rows_of
from lightning_dcp.models.megatron.scope import Scope

_IN_FLOAT32 = ("local_tokens_per_expert", "expert_bias")
"""A router's buffers."""


@cache
def context_parallel_router() -> type:
    """The class, made on first use: its base belongs to Megatron-Core."""
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        topk_routing_with_score_function,
    )
    from megatron.core.transformer.moe.router import TopKRouter

    class ContextParallelRouter(TopKRouter):
        """``TopKRouter`` that knows the pack that a call is about.

        Which experts a token goes to is Megatron-Core's business. Its auxiliary losses depend on how a batch is cut into
        micro-batches and over ranks: it takes statistics of a micro-batch. Here they are of a sample, since a pack is an
        arbitrary cut and a sample is not. For a sample s of L_s tokens, each on k of E experts,

            aux_s = E / (L_s^2 k) * sum over experts i of count_i(s) * (sum over tokens t of s of p_i(t)),

        with ``count_i`` the tokens that have expert i among their k best and ``p_i`` the normalised scores: what
        Megatron-Core's ``switch_load_balancing_loss_func`` gives for that sample on one rank (Fedus et al., 2021, eq. 4).
        To the objective is added, for each layer,

        - ``aux_loss``: coefficient * mean over the batch's samples of aux_s, weighted by their tokens;
        - ``seq_aux_loss``: coefficient * mean over the batch's samples of aux_s;
        - ``moe_z_loss_coeff`` * mean over the batch's tokens of logsumexp(logits)^2.

        They are means over the batch whatever ``loss_normalization`` says of the step's loss. Samples are the
        sequences of the call; a sample that is called on twice in a step counts twice. Fill tokens are in no statistic.
        Outside a region each row is a sample, and the rows are the batch.

        With ``moe_router_enable_expert_bias`` the tokens of each expert are counted (where the tokens went, fill tokens left
        out), and ``finalize_model_grads`` moves the biases once an optimizer step.

        Attributes:
            scope: the model's; set by it.
            auxiliary: values since they were last taken: this rank's parts, without coefficients
                (:func:`~lightning_dcp.models.megatron.moe_auxiliary.auxiliary_losses`).
        """

        scope: Scope | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.auxiliary: dict[str, Tensor] = {}

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
            """Leave counts and biases in float32 when the model is put into another dtype: bfloat16 counts to 256.

            Megatron-Core's router brings back the biases' dtype at its next call, but not what rounding took.
            """
            before = {name: self._buffers.get(name) for name in _IN_FLOAT32}
            super()._apply(fn, recurse)
            for name, own in before.items():
                moved = self._buffers.get(name)
                if own is not None and moved is not None and moved.dtype != torch.float32:
                    self._buffers[name] = moved.float() if own.is_meta else own.to(moved.device, torch.float32)
            return self

        def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
            """Weights and choice of experts, ``[T * B, experts]`` each, for logits ``[T, B, experts]``.

            Raises:
                RegionError: a ``padding_mask``.
            """
            if padding_mask is not None:
                raise RegionError(
                    "padding_mask was given to a Megatron-Core model: padding is left out of a region's call, and of every "
                    "statistic of its routers, if the call is given attention_mask"
                )
            scope = None if self.scope is None else self.scope.current
            rows = rows_of(scope, logits, self.tp_group if self._deals_out_tokens() else None)
            logits = logits.view(-1, self.num_experts)
            # A pack that runs a second time, to fill a round of a pipeline, has no share in anything.
            learning = self.training and torch.is_grad_enabled() and rows.gradient_scale != 0
            if learning and self.config.moe_z_loss_coeff:
                value = auxiliary.z_loss_part(logits, rows)
                logits = self._attached(logits, rows, {auxiliary.Z_LOSS: (self.config.moe_z_loss_coeff, value)})
            probs, routing_map = topk_routing_with_score_function(
                logits,
                self.topk,
                use_pre_softmax=self.config.moe_router_pre_softmax,
                num_groups=self.config.moe_router_num_groups,
                group_topk=self.config.moe_router_group_topk,
                scaling_factor=self.config.moe_router_topk_scaling_factor,
                score_function=self.score_function,
                expert_bias=self.expert_bias,
                fused=self.config.moe_router_fusion,
                router_replay=self.router_replay,
            )
            if learning:
                probs = self._balanced(probs, logits, rows)
                probs = self._counted(probs, routing_map, rows)
            return probs, routing_map

        def _deals_out_tokens(self) -> bool:
            return bool(self.config.sequence_parallel) and self.tp_group.size() > 1

        def _balanced(self, probs: Tensor, logits: Tensor, rows: RouterRows) -> Tensor:
            """Attach the load-balancing losses."""
            coefficients = auxiliary.balancing_coefficients(self.config)
            if not coefficients:
                return probs
            chosen, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, fused=self.config.moe_router_fusion, padding_mask=~rows.real
            )
            scores = scores.to(torch.promote_types(scores.dtype, logits.dtype))  # sums in the router's precision
            parts = auxiliary.load_balancing_parts(coefficients, scores, chosen, rows, self.topk)
            return self._attached(
                probs, rows, {auxiliary.BALANCING[kind]: (coefficients[kind], part) for kind, part in parts.items()}
            )

        def _attached(self, carrier: Tensor, rows: RouterRows, parts: dict[str, tuple[float, Tensor]]) -> Tensor:
            objective = torch.stack([coefficient * part for coefficient, part in parts.values()]).sum()
            values = {name: part.detach() for name, (_, part) in parts.items()}
            return auxiliary.attach(carrier, objective, rows.gradient_scale, partial(self._record, values))

        def _record(self, values: dict[str, Tensor]) -> None:
            for name, value in values.items():
                self.auxiliary[name] = self.auxiliary.get(name, 0.0) + value.double()

        def _counted(self, probs: Tensor, routing_map: Tensor, rows: RouterRows) -> Tensor:
            """Count tokens of experts when the backward comes through."""
            # A backward reaches frozen layers on some layouts only: on stages that hidden states are sent to.
            if not self.enable_expert_bias or not self.weight.requires_grad:
                return probs
            counts = (routing_map & rows.real.unsqueeze(1)).sum(0)
            return auxiliary.attach(probs, probs.new_zeros(()), 0.0, partial(self._count, counts))

        def _count(self, counts: Tensor) -> None:
            self.local_tokens_per_expert += counts

    return ContextParallelRouter
