"""``python -m lightning_dcp`` is ``lightning-dcp``."""

from lightning_dcp.cli import main

main()
