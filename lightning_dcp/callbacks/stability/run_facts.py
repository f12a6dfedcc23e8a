"""What a run is, as its record on disk says it."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import Any

import torch
from lightning.pytorch import Trainer

_VERSIONS = ("lightning-dcp", "lightning", "torch")


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """JSON-able facts of a run with a DCPStrategy that is set up.

    ``plane_size``, ``cp_sizes``, ``topology``, ``dynamic_context_parallel``, ``context_parallel_size``,
    ``max_seqlen_per_dp_cp_rank``, ``loss_normalization``, ``accumulate_grad_batches``, ``layout``, ``budget`` (None: shards
    are held to none), ``on_violation``, ``ring_order`` (as asked for), ``ring`` (places of the whole plane in the order of
    its ring), ``hop_timing``, ``alarms``, ``fallback``, ``cost_model``, ``link_table`` (None: not measured), ``device``,
    ``settings`` (the strategy in words) and ``versions``.
    """
    strategy: Any = trainer.strategy
    return {
        **_sizes(strategy),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        **_governed(strategy),
        "cost_model": strategy.cost_model.to_dict(),
        "device": _device(strategy.root_device),
        "settings": strategy.describe(),
        "versions": {name: version(name) for name in _VERSIONS} | {"python": platform.python_version()},
    }


def _sizes(strategy: Any) -> dict[str, Any]:
    topology = strategy.topology
    return {
        "dynamic_context_parallel": strategy.dynamic_context_parallel,
        "plane_size": topology.plane_size,
        "cp_sizes": topology.cp_sizes,
        "context_parallel_size": strategy.context_parallel_size,
        "max_seqlen_per_dp_cp_rank": strategy.max_seqlen_per_dp_cp_rank,
        "loss_normalization": strategy.loss_normalization,
        "topology": dataclasses.asdict(topology),
    }


def _governed(strategy: Any) -> dict[str, Any]:
    """Boundaries, ring order, timing."""
    boundaries, steadiness, control = strategy.boundaries, strategy.steadiness, strategy.control
    budget, table = boundaries.in_force, control.table
    links = None if table is None else {"latency_s": table.latency_s, "bandwidth": table.bandwidth}
    return {
        "layout": boundaries.layout,
        "budget": None if budget is None else dataclasses.asdict(budget),
        "on_violation": boundaries.on_violation,
        "ring_order": steadiness.ring_order,
        "ring": list(control.state.orders.for_group(0, strategy.topology.plane_size)),
        "hop_timing": steadiness.hop_timing,
        "alarms": None if steadiness.alarms is None else dataclasses.asdict(steadiness.alarms),
        "fallback": steadiness.fallback,
        "link_table": links,
    }


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
