"""``lightning-dcp bench plan``: how good the schedulers' plans are, and how long planning takes."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from lightning_dcp.commands.bench_contenders import Peer, PeerLimit
from lightning_dcp.commands.bench_measure import Quality, Speed, measure_quality, measure_speed
from lightning_dcp.commands.bench_tables import quality_table, speed_table
from lightning_dcp.commands.bench_workloads import Size, Workload, find_workloads, parse_sizes
from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.cost_file import load_cost_model
from lightning_dcp.schedule.megatron import available_megatron_scheduler

SPEED_SIZES = ["32x512", "256x4096", "1024x16384", "64x1024", "64x4096", "64x16384", "64x65536"]
"""As users have them, and growing on one plane."""
MILLION = "1024x1000000"


def bench_plan(
    workloads: list[str] | None = None,
    *,
    files: list[str] | None = None,
    sizes: list[str] | None = None,
    draws: int = 10,
    seed: int = 0,
    cost_model: str = "h100",
    peers: Sequence[Peer] = ("static", "megatron"),
    peer_limit_s: float = 5.0,
    speed_sizes: list[str] | None = None,
    million: bool = False,
    json: str | None = None,
) -> None:
    """Compare schedulers on random batches: predicted step time over its lower bound, and planning time.

    Args:
        workloads: names of distributions (megatron-mock, rl, longalign, llama3-sft) and of files; by default all.
        files: files of real lengths, each as NAME=PATH (one length a line, or .npy) or NAME=PATH:FIELD (JSON lines).
        sizes: RANKSxSAMPLES or RANKSxSAMPLES@LIMIT (tokens a rank), such as 8x64@4096; by default some for each workload.
        draws: random batches for each workload and size.
        seed: of the draws.
        cost_model: a preset (a100, h100, h200, cpu), or a YAML file that `calibrate` wrote.
        peers: what is compared with the dynamic scheduler: static (the smallest CP size that holds the batch's longest
            sample), megatron (the scheduler of the Megatron-Core that is installed).
        peer_limit_s: a peer that would plan a batch for longer than this is skipped.
        speed_sizes: sizes whose planning time is measured, on the first workload; [] for none.
        million: also measure a million samples on 1,024 ranks.
        json: file for all numbers.

    Raises:
        ConfigurationError: bad options, all of a kind at once.
        DataError: a file with what is no length.
    """
    raise_problems(_problems(draws, seed, peer_limit_s, json))
    cost = load_cost_model(cost_model)
    found = find_workloads(workloads, files, sizes)
    speeds = parse_sizes(SPEED_SIZES if speed_sizes is None else speed_sizes, "--speed-sizes")
    speeds += parse_sizes([MILLION] if million else [], "--million")
    schedulers = ["dynamic", *dict.fromkeys(peers)]
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        quality = _run_quality(progress, found, schedulers, draws, seed, cost, peer_limit_s)
        speed = _run_speed(progress, found[0], speeds, schedulers, seed, cost, peer_limit_s)
    megatron = available_megatron_scheduler() if "megatron" in peers else None
    _show(console, quality, speed, found[0].name, megatron, peer_limit_s)
    if json is not None:
        values: dict[str, Any] = {
            "cost_model": cost.to_dict(),
            "draws": draws,
            "seed": seed,
            "peer_limit_s": peer_limit_s,
            "megatron_scheduler": megatron,
            "quality": [result.to_dict() for result in quality],
            "speed_workload": found[0].name,
            "speed": [result.to_dict() for result in speed],
        }
        Path(json).write_text(jsonlib.dumps(values, indent=1) + "\n", encoding="utf-8")


def _problems(draws: int, seed: int, peer_limit_s: float, json: str | None) -> list[Problem]:
    problems = []
    if draws < 1:
        problems.append(Problem(f"--draws {draws}", "no batch", "give at least 1"))
    if seed < 0:
        problems.append(Problem(f"--seed {seed}", "a negative number", "give 0 or more"))
    if not peer_limit_s > 0:
        problems.append(Problem(f"--peer-limit-s {peer_limit_s}", "no time at all", "give seconds, or leave peers out"))
    if json is not None and not Path(json).parent.is_dir():
        problems.append(Problem(f"--json {json}", "a folder that does not exist", "make it first"))
    return problems


def _run_quality(
    progress: Progress,
    workloads: Sequence[Workload],
    schedulers: Sequence[str],
    draws: int,
    seed: int,
    cost: CostModel,
    peer_limit_s: float,
) -> list[Quality]:
    results: list[Quality] = []
    task = progress.add_task("", total=sum(len(workload.sizes) for workload in workloads) * len(schedulers))
    for workload in workloads:
        limit = PeerLimit(peer_limit_s)
        for size in workload.sizes:
            progress.update(task, description=f"{workload.name} {size}")
            for result in measure_quality(workload, size, schedulers, draws, seed, cost, limit):
                results.append(result)
                progress.advance(task)
    progress.remove_task(task)
    return results


def _run_speed(
    progress: Progress,
    workload: Workload,
    sizes: Sequence[Size],
    schedulers: Sequence[str],
    seed: int,
    cost: CostModel,
    peer_limit_s: float,
) -> list[Speed]:
    results: list[Speed] = []
    limit = PeerLimit(peer_limit_s)
    task = progress.add_task("", total=len(sizes) * len(schedulers))
    for size in sizes:
        for name in schedulers:
            progress.update(task, description=f"planning time of {name} on {size}")
            results.append(measure_speed(workload, size, name, seed, cost, limit, results))
            progress.advance(task)
    progress.remove_task(task)
    return results


def _show(
    console: Console,
    quality: Sequence[Quality],
    speed: Sequence[Speed],
    speed_workload: str,
    megatron: str | None,
    peer_limit_s: float,
) -> None:
    console.print(quality_table(quality))
    console.print("size: ranks x samples of a batch @ tokens that a rank may hold")
    if speed:
        console.print(speed_table(speed, speed_workload))
        console.print("growth: p of planning time ~ samples^p, from the row before on as many ranks")
    if megatron is not None:
        console.print(f"megatron: Megatron-Core's {megatron}; in lock-step with a barrier after each of its rounds.")
    skipped = [result for result in quality if result.planned < result.draws]
    if skipped or any(result.skipped for result in speed):
        console.print(f"skipped: would plan a batch for more than {peer_limit_s:g} s.")
    for refusal in _refusals(quality):
        console.print(f"refused: {refusal}", markup=False)


def _refusals(quality: Sequence[Quality]) -> list[str]:
    """The first refusal of each scheduler."""
    first: dict[str, str] = {}
    for result in quality:
        for mode in result.modes.values():
            for refusal in mode.refusals:
                first.setdefault(
                    result.scheduler, f"{result.scheduler}, first on {result.workload} {result.size}: {refusal}"
                )
    return list(first.values())
