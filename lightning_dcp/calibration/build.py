"""A run for measuring, from the configuration of a training run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor

import lightning_dcp.data
import lightning_dcp.lm  # noqa: F401  (so that configurations can name its classes in short)
from lightning_dcp.errors import ConfigurationError, Problem, raise_problems
from lightning_dcp.strategy import DCPStrategy

_TRAINER = {
    "logger": False,
    "callbacks": [],
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "max_epochs": 1,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": 1.0,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "accumulate_grad_batches": 1,
}
"""Trainer settings under which nothing but the training steps runs, each of them once."""
_RUN_OPTIONS = ("ckpt_path", "weights_only")
"""Options of ``fit``, not of the objects, which a saved configuration holds too."""


@dataclass(frozen=True)
class Run:
    """What a configuration makes.

    Attributes:
        trainer: stripped of loggers, callbacks, checkpoints and validation.
        model: the user's module.
        datamodule: the user's data, or None if the module has its own loader.
        weights: of a checkpoint, to be loaded when the module is complete.
    """

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule | None
    weights: dict[str, Tensor] | None = None

    @property
    def strategy(self) -> DCPStrategy:
        """The trainer's strategy."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, DCPStrategy):
            raise RuntimeError("build_run makes no trainer without a DCPStrategy")
        return strategy

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of the plane in one node; None if there is only one node."""
        strategy = self.strategy
        if strategy.num_nodes == 1:
            return None
        return max(1, strategy.num_processes // strategy.topology.tensor_model_parallel_size)

    @property
    def loader_owner(self) -> LightningDataModule | LightningModule:
        """Who has ``train_dataloader``."""
        return self.model if self.datamodule is None else self.datamodule


class _MeasuringCLI(LightningCLI):
    """Builds everything of a configuration and runs nothing.

    Args:
        args: the configuration, as words of a command line.
        replaced: arguments of the strategy, in place of the configuration's.
    """

    def __init__(self, args: list[str], replaced: Mapping[str, Any]) -> None:
        self.replaced = replaced  # used by super().__init__, which does everything
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            run=False,
            args=args,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in _RUN_OPTIONS:
            parser.add_argument(f"--{name}", type=Any, default=None)

    def before_instantiate_classes(self) -> None:
        strategy = self.config.trainer.strategy
        settings = getattr(strategy, "init_args", None)
        for name, value in self.replaced.items():
            if settings is not None and name in settings:
                settings[name] = value


def build_run(
    config: Sequence[str],
    *,
    checkpoint: str | None = None,
    devices: int | None = None,
    replaced: Mapping[str, Any] | None = None,
) -> Run:
    """Build trainer, model and data as ``lightning-dcp fit --config ...`` would, for measuring.

    Args:
        config: YAML files of a training run, later ones overriding earlier ones; also the one that ``fit`` saves.
        checkpoint: a Lightning checkpoint whose weights are loaded. If it holds the module's hyperparameters (as
            ``save_hyperparameters()`` makes it do), the module is built by them rather than by the configuration.
        devices: ranks of a node, in place of the configuration's.
        replaced: arguments of the strategy, in place of the configuration's, where it gives the strategy any.

    Raises:
        ConfigurationError: files that cannot be read, weights of another model, no DCPStrategy.
    """
    raise_problems([_missing("config", path) for path in config if not Path(path).is_file()])
    if not config:
        remedy = "give the YAML of a training run: --config run.yaml"
        raise ConfigurationError([Problem("a run to measure", "no configuration", remedy)])
    saved = None if checkpoint is None else _read_checkpoint(checkpoint)
    overrides = {f"trainer.{name}": value for name, value in _TRAINER.items()}
    if devices is not None:
        overrides["trainer.devices"] = devices
    if saved is not None and "_class_path" in saved.get("hyper_parameters", {}):
        overrides["model"] = _model_of(saved["hyper_parameters"])
    args = [*(f"--config={path}" for path in config), *(f"--{k}={json.dumps(v)}" for k, v in overrides.items())]
    cli = _MeasuringCLI(args, replaced or {})
    run = Run(cli.trainer, cli.model, cli.datamodule, None if saved is None else saved["state_dict"])
    _check(run, str(checkpoint))
    return run


def _read_checkpoint(path: str) -> dict[str, Any]:
    """The checkpoint's content; hyperparameters and weights only, no code is run."""
    if not Path(path).is_file():
        raise ConfigurationError([_missing("checkpoint", path)])
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        found = f"cannot be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise ConfigurationError([Problem(f"checkpoint {path!r}", found, "give a file that Lightning saved")]) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ConfigurationError(
            [Problem(f"checkpoint {path!r}", "no 'state_dict'", "give a file that Lightning saved")]
        )
    return content


def _model_of(hyper_parameters: dict[str, Any]) -> dict[str, Any]:
    """The configuration's ``model`` section, as LightningCLI stores it in a checkpoint."""
    own = ("_class_path", "_instantiator")
    arguments = {name: value for name, value in hyper_parameters.items() if name not in own}
    return {"class_path": hyper_parameters["_class_path"], "init_args": arguments}


def _missing(what: str, path: str) -> Problem:
    return Problem(f"{what} {path!r}", "no such file", "check the path")


def _check(run: Run, checkpoint: str) -> None:
    problems, weights = [], run.weights
    if not isinstance(run.trainer.strategy, DCPStrategy):
        name = type(run.trainer.strategy).__name__
        remedy = "put `strategy: lightning_dcp.DCPStrategy`, with its max_seqlen_per_dp_cp_rank, into the configuration"
        problems.append(Problem("packs of a training run to measure", f"strategy {name}, which makes none", remedy))
    own = {name: tuple(value.shape) for name, value in run.model.state_dict().items()}
    if weights is not None and own:  # a module that is made in configure_model() is checked when it is loaded
        found = _differences(own, {name: tuple(value.shape) for name, value in weights.items()})
        if found:
            remedy = "give the configuration of the run that saved it"
            problems.append(Problem(f"checkpoint {checkpoint!r} in {type(run.model).__name__}", found, remedy))
    raise_problems(problems)


def _differences(own: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]]) -> str:
    """The first few weights that do not fit, in words; empty if all do."""
    lines = [f"{name}: {own.get(name, 'none')} in the model, {saved.get(name, 'none')} in the file"
             for name in sorted(own.keys() | saved.keys()) if own.get(name) != saved.get(name)]  # fmt: skip
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    return "; ".join(lines[:3]) + more
