"""What the configuration of a run says of its plans and budgets, for ``lightning-dcp audit``."""

from __future__ import annotations

import pydoc
from argparse import ArgumentError
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lightning_dcp.boundaries.budget import DEFAULT_BUDGET
from lightning_dcp.commands.options import cause_of, instantiate
from lightning_dcp.errors import ConfigurationError, Problem
from lightning_dcp.schedule.choice import DEFAULTS
from lightning_dcp.strategy.dcp import DCPStrategy

NAMES = ("dcp", "dcp_notebook", "DCPStrategy")
"""The strategy as a configuration may name it in short."""


@dataclass(frozen=True)
class RunSettings:
    """What a run's configuration decides of an audit.

    Attributes:
        values: for fields of :class:`~lightning_dcp.commands.audit_settings.AuditSettings`, by name.
        left_out: what plans follow in the run and not in the audit, in words.
    """

    values: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    def told(self, path: str, instead: Mapping[str, Any]) -> str:
        """What was taken from the file, in words, beside what was given ``instead``."""
        taken = [
            "cost model" if name == "cost" else f"{name} {value}"
            for name, value in self.values.items()
            if name not in instead and value is not None
        ]
        missing = "" if not self.left_out else f"; not taken: {', '.join(self.left_out)}"
        return f"settings from {path}: {', '.join(taken) or 'none'}{missing}"


def run_settings(path: str) -> RunSettings | None:
    """The settings of a whole configuration whose trainer has a :class:`~lightning_dcp.DCPStrategy`; None for other files.

    Raises:
        ConfigurationError: the strategy's arguments are wrong.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # told where the data module is read
    trainer = values.get("trainer") if isinstance(values, Mapping) else None
    described = trainer.get("strategy") if isinstance(trainer, Mapping) else None
    if not isinstance(trainer, Mapping) or not _is_ours(described):
        return None
    strategy = _strategy(path, described)
    taken, left_out = _scheduling(strategy)
    ranks = _plane(trainer, strategy)
    if ranks is None:
        left_out.append(f"ranks, as devices are {trainer.get('devices', 'auto')!r} (--ranks)")
    return RunSettings(({} if ranks is None else {"ranks": ranks}) | taken, tuple(left_out))


def _is_ours(described: Any) -> bool:
    name = described.get("class_path") if isinstance(described, Mapping) else described
    if not isinstance(name, str):
        return False
    found = pydoc.locate(name) if "." in name else None
    return name in NAMES or (isinstance(found, type) and issubclass(found, DCPStrategy))


def _strategy(path: str, described: Any) -> DCPStrategy:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=DCPStrategy, required=True)
    named = {"class_path": "lightning_dcp.DCPStrategy"} if described in NAMES else described
    try:
        strategy: DCPStrategy = instantiate(parser, parser.parse_object({"strategy": named})).strategy
    except ArgumentError as error:
        problem = Problem(f"the strategy of {path}", str(error), "correct class_path and init_args")
        raise ConfigurationError([problem]) from None
    except ValueError as error:
        raise cause_of(error) or error from None
    return strategy


def _scheduling(strategy: DCPStrategy) -> tuple[dict[str, Any], list[str]]:
    """What of the strategy the audit follows, and what it does not."""
    choice, budget = strategy.scheduler_choice, strategy.boundaries.budget or DEFAULT_BUDGET
    nodes = choice.ranks_per_node
    taken = {
        "max_seqlen_per_dp_cp_rank": strategy.max_seqlen_per_dp_cp_rank,
        "max_tokens": budget.max_tokens,
        "dense_limit": budget.dense_limit,
        "dense_from": budget.dense_from,
        "tolerance": budget.tolerance,
        "layout": strategy.layout,
        "context_parallel_size": choice.context_parallel_size if choice.kind == "static" else None,
        "mode": choice.schedule_mode,
        "min_context_parallel_size": choice.min_context_parallel_size,
        "max_context_parallel_size": choice.max_context_parallel_size,
        "replan": strategy.boundaries.on_violation == "replan",
        "cost": choice.cost_model if nodes is None else replace(choice.cost_model, ranks_per_node=nodes),
    }
    left_out = [name for name in ("microbatch_multiple", "rank_speeds") if getattr(choice, name) != DEFAULTS[name]]
    if choice.kind not in ("dynamic", "static"):
        left_out.append(f"the scheduler, {choice.name}: plans here are dynamic")
    return taken, left_out


def _plane(trainer: Mapping[str, Any], strategy: DCPStrategy) -> int | None:
    """Ranks of the DPxCP plane; None where only the machine says how many devices there are."""
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, str):
        parts = [part for part in devices.split(",") if part.strip()]
        devices = parts if "," in devices else int(devices) if devices.strip().isdigit() else None
    count = len(devices) if isinstance(devices, list) else devices
    if not isinstance(count, int) or count < 1 or not isinstance(nodes, int):
        return None
    return count * nodes // (strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size) or None
