"""Static against dynamic context parallelism: same model, seed, samples and global batch; only one flag differs.

    python examples/compare_static_dynamic.py                 # two CPU ranks, the demo's model and data
    python examples/compare_static_dynamic.py --devices 4 --context-parallel-size 4

Static and dynamic runs alternate inside one set of processes, so that noise of the machine meets both; the first steps
of each run are left out. Prints a table and writes the same numbers as JSON to stdout's last line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.table import Table

import lightning_dcp.data
import lightning_dcp.lm  # noqa: F401

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo_cpu.yaml"


class StepTimer(L.Callback):
    """Times whole steps, optimizer included, and keeps losses and token counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(outputs["loss"]))
        self.tokens.append(batch.num_tokens)


def run(dynamic: bool, options: argparse.Namespace) -> StepTimer:
    """One training run of the demo's configuration."""
    strategy = {
        "class_path": "lightning_dcp.DCPStrategy",
        "init_args": {
            "dynamic_context_parallel": dynamic,
            "context_parallel_size": options.context_parallel_size,
            "max_seqlen_per_dp_cp_rank": options.max_seqlen_per_dp_cp_rank,
            "cost_model": yaml.safe_load(DEMO.read_text())["trainer"]["strategy"]["init_args"]["cost_model"],
        },
    }
    overrides: dict[str, Any] = {
        "trainer.devices": options.devices,
        "trainer.strategy": strategy,
        "trainer.max_steps": options.steps,
        "trainer.limit_val_batches": 0,
        "trainer.logger": False,
        "trainer.callbacks": [],
        "trainer.enable_checkpointing": False,
        "trainer.enable_progress_bar": False,
        "trainer.enable_model_summary": False,
        "data.init_args.batch_size": options.batch_size,
        "data.init_args.max_length": options.max_length,
    }
    args = ["--config", str(DEMO)] + [f"--{key}={json.dumps(value)}" for key, value in overrides.items()]
    cli = LightningCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        run=False,
        args=args,
    )
    timer = StepTimer()
    cli.trainer.callbacks.append(timer)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return timer


def trimmed_mean(values: np.ndarray, share: float = 0.1) -> float:
    """The mean without the lowest and highest tenth."""
    cut = int(len(values) * share)
    return float(np.sort(values)[cut : len(values) - cut].mean())


def figures(timers: list[StepTimer], warmup: int) -> dict[str, float]:
    """Step times and throughput over all runs of one kind, without their first steps."""
    seconds = np.array([s for t in timers for s in t.seconds[warmup:]])
    tokens = sum(n for t in timers for n in t.tokens[warmup:])
    return {
        "trimmed_mean_s": trimmed_mean(seconds),
        "mean_s": float(seconds.mean()),
        "p50_s": float(np.percentile(seconds, 50)),
        "p99_s": float(np.percentile(seconds, 99)),
        "tokens_per_s": tokens / float(seconds.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="CPU ranks")
    parser.add_argument("--context-parallel-size", type=int, default=2, help="CP size of the static runs")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--warmup", type=int, default=3, help="first steps of each run that do not count")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each kind")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=512, help="longer files are cut, tokens")
    parser.add_argument(
        "--max-seqlen-per-dp-cp-rank", type=int, default=512, help="limit of both kinds of runs, tokens"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    runs: dict[bool, list[StepTimer]] = {False: [], True: []}
    for _ in range(options.repeats):
        for dynamic in (False, True):
            runs[dynamic].append(run(dynamic, options))
    if torch.distributed.get_rank() == 0:
        report(runs, options)


def report(runs: dict[bool, list[StepTimer]], options: argparse.Namespace) -> None:
    static, dynamic = (figures(runs[kind], options.warmup) for kind in (False, True))
    losses = [np.array([t.losses for t in runs[kind]]) for kind in (False, True)]
    difference = float(np.abs(losses[0] - losses[1]).max())
    table = Table(title=f"{options.devices} CPU ranks, one thread each; static CP {options.context_parallel_size}")
    for heading in ("", "static", "dynamic", "dynamic is better by"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in static.items():
        ratio = dynamic[name] / value if name == "tokens_per_s" else value / dynamic[name]
        digits = 0 if name == "tokens_per_s" else 3
        table.add_row(name, f"{value:,.{digits}f}", f"{dynamic[name]:,.{digits}f}", f"{ratio:.2f}x")
    table.add_row("largest difference in loss", "", f"{difference:.1e}", "")
    Console().print(table)
    print(json.dumps({"static": static, "dynamic": dynamic, "largest_loss_difference": difference}))


if __name__ == "__main__":
    main()
