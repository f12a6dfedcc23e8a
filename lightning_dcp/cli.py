"""``lightning-dcp``: Lightning's own command line (fit, validate, test, predict) with this package at hand."""

from __future__ import annotations

import sys

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import ArgsType, LightningCLI

import lightning_dcp.data
import lightning_dcp.lm  # noqa: F401  (so that configurations can name its classes in short)
from lightning_dcp.errors import DCPError


def main(args: ArgsType = None) -> None:
    """Run one command. A mistake of the user's ends with its message, not with a traceback.

    Args:
        args: arguments instead of those of the process, such as ``["fit", "--config", "run.yaml"]``.
    """
    try:
        LightningCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            args=args,
        )
    except DCPError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
