"""Megatron-Core's router for packs: auxiliary losses that do not depend on how a batch is cut."""

from __future__ import annotations

from functools import cache

from lightning_dcp.models.megatron.scope import Scope


@cache
def context_parallel_router() -> type:
    """The class, made on first use: its base belongs to Megatron-Core."""
    from megatron.core.transformer.moe.router import TopKRouter

    class ContextParallelRouter(TopKRouter):
        """``TopKRouter`` that knows the pack that a call is about."""

        scope: Scope | None = None

    return ContextParallelRouter
