"""``lightning-dcp bench attention``: how fast attention over a CP group is, against one rank's kernel."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from lightning_dcp.commands.bench_attention.check import TOLERANCE
from lightning_dcp.commands.bench_attention.measure import Plan, Ranks, Row, measure
from lightning_dcp.commands.bench_attention.options import Sweep, number_problems, read_sweep, usable_cores
from lightning_dcp.commands.bench_attention.played import PlayedRanks
from lightning_dcp.commands.bench_attention.processes import ProcessRanks
from lightning_dcp.commands.bench_attention.tables import attention_table, same_everywhere
from lightning_dcp.errors import ConfigurationError, DCPError, Problem, UnsupportedAttentionError
from lightning_dcp.parallel.links import Link
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.cost_file import load_cost_model
from lightning_dcp.schedule.hardware import preset

Device = Literal["auto", "cpu", "cuda"]
Way = Literal["auto", "processes", "played"]


def bench_attention(
    lengths: list[str] | None = None,
    *,
    cp_sizes: list[int] | None = None,
    schemes: list[str] | None = None,
    kernels: list[str] | None = None,
    dtypes: list[str] | None = None,
    kinds: list[str] | None = None,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    layout: str = "zigzag",
    repeats: int = 5,
    warmup: int = 1,
    ranks: Way = "auto",
    device: Device = "auto",
    cost_model: str | None = None,
    latency: float = 1.5e-5,
    bandwidth: float = 3.6e11,
    check: bool = False,
    json: str | None = None,
) -> None:
    """Time attention over a context-parallel group, forward and backward, and compare with one rank's kernel.

    A scheme's share of ideal is the time that one rank takes for the whole pack with the same kernel, over the number
    of ranks, over the scheme's time. The blocks of a pack are made before: a model makes them once for all its layers.

    Args:
        lengths: packs: 8192 is one sample; 512,512,8192 are three; mixed:16384 is a fixed draw of very unequal samples
            with so many tokens in all (median 512, longest 8192). By default 8192 and mixed:16384.
        cp_sizes: ranks of a group. By default 2 and its powers up to 8; processes on CPU up to the number of cores.
        schemes: ring, all_gather, ulysses; by default all.
        kernels: names of kernels; auto, the default, is the fastest that there is.
        dtypes: float32, bfloat16, float16, float64; by default float32 on CPU and bfloat16 on CUDA.
        kinds: causal, bidirectional, window:N (N tokens with the token itself), softcap:X, sinks, or several joined by
            "+" such as window:128+sinks; by default causal.
        heads: query heads.
        kv_heads: key and value heads; by default as many as query heads.
        head_dim: width of a head.
        layout: how tokens lie on ranks: zigzag or contiguous.
        repeats: timed rounds; medians over them are shown.
        warmup: runs of each scheme before those; the first of them is watched for bytes and memory.
        ranks: processes (they really communicate: by gloo with one thread and core each, or by NCCL with a GPU each), or
            played (one device computes for one rank after another, and communication is modelled). By default
            processes, on CUDA only if there are GPUs enough.
        device: by default cuda where there is any.
        cost_model: from which attention="auto" would choose a scheme: a preset (a100, h100, h200, cpu), or a YAML file that
            `calibrate` wrote. By default cpu or h100, by the device.
        latency: seconds of a message between played ranks; the default is one of NCCL inside a node.
        bandwidth: bytes/s between played ranks each way; the default is that of NVLink 4.
        check: also compare outputs and gradients with the reference kernel on one rank; fail if any is wrong.
        json: file for all numbers.

    Raises:
        ConfigurationError: bad options, all at once.
        UnsupportedAttentionError: no kernel can compute any of this.
        PeerFailureError: a process failed.
        DCPError: with check, wrong results.
    """
    others = number_problems(repeats, warmup, latency, bandwidth) + (
        [] if json is None else folder_problems(json, "--json")
    )
    cost, wrong = _cost_model(cost_model)
    sweep = read_sweep(
        lengths=lengths,
        cp_sizes=cp_sizes,
        schemes=schemes,
        kernels=kernels,
        dtypes=dtypes,
        kinds=kinds,
        heads=(heads, heads if kv_heads is None else kv_heads, head_dim),
        layout=layout,
        ranks=ranks,
        device=device,
        others=[*others, *wrong],
    )
    cost = cost or preset("cpu" if sweep.device == "cpu" else "h100")
    plan, link = Plan(sweep.schemes, repeats, warmup, check, cost), Link(latency, bandwidth)
    rows, refused, links = _run(sweep, plan, link)
    if json is not None:
        text = jsonlib.dumps(_values(sweep, plan, link, links, rows, refused), indent=1)
        Path(json).write_text(text + "\n", encoding="utf-8")
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    _show(console, sweep, plan, link, rows, refused)
    _fail_if_wrong(rows)


def _cost_model(source: str | None) -> tuple[CostModel | None, list[Problem]]:
    """The cost model that was asked for, if any, and what is wrong with it."""
    try:
        return (None if source is None else load_cost_model(source)), []
    except ConfigurationError as error:
        return None, list(error.problems)


def _run(sweep: Sweep, plan: Plan, link: Link) -> tuple[list[Row], dict[str, str], dict[int, Link]]:
    """All rows, which combinations are refused, and the link in groups of each size."""
    by_size = {size: sweep.settings(size) for size in sweep.sizes}
    refused = {what: why for _, reasons in by_size.values() for what, why in reasons.items()}
    count = sum(len(settings) for settings, _ in by_size.values())
    if not count:
        raise UnsupportedAttentionError("; ".join(f"{what}: {why}" for what, why in refused.items()))
    rows: list[Row] = []
    links: dict[int, Link] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count * plan.runs)
        for size, (settings, _) in by_size.items():
            progress.update(task, description=f"CP {size}: starting")
            with _ranks(size, sweep, link) as group:
                links[size] = group.link()
                for setting in settings:
                    progress.update(task, description=f"CP {size}: {setting.kind.name} {setting.pack.name}")
                    rows += measure(group, links[size], setting, plan, lambda runs: progress.advance(task, runs))
    return rows, refused, links


def _ranks(size: int, sweep: Sweep, link: Link) -> Ranks:
    return ProcessRanks(size, sweep.device) if sweep.processes else PlayedRanks(size, sweep.device, link)


def _show(console: Console, sweep: Sweep, plan: Plan, link: Link, rows: Sequence[Row], refused: dict[str, str]) -> None:
    title = (
        f"Attention on {sweep.device}: {same_everywhere(rows)}\n{_way(sweep, link)}; median of {plan.repeats} rounds"
    )
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)  # may be wider than the table
    console.print(attention_table(rows))
    for pack in sweep.packs:
        if len(pack.lengths) > 1:
            console.print(str(pack), markup=False, soft_wrap=True)
    console.print(
        "of ideal: the time of one rank with the whole pack, over CP, over the scheme's time. sent: by the rank that "
        "sends most, forward and backward. auto expects: by the cost model and the link, and what it picks. memory: tensors "
        "of the rank that takes most, the call's inputs included.",
        soft_wrap=True,
    )
    for what, why in refused.items():
        console.print(f"refused: {what}: {why}", markup=False, soft_wrap=True)


def _way(sweep: Sweep, link: Link) -> str:
    """How the ranks are run, in words."""
    if not sweep.processes:
        threads = ", one thread" if sweep.device == "cpu" else ""
        model = f"{link.latency_s * 1e6:g} us + bytes / {link.bandwidth / 1e9:g} GB/s"
        return f"ranks played one after another{threads}: compute measured, communication MODELLED as {model}"
    if sweep.device == "cuda":
        return "ranks are processes, one GPU each"
    shared = "; where ranks are more than the cores, they share them" if max(sweep.sizes) > usable_cores() else ""
    return f"ranks are processes, one thread each{shared}"


def _values(
    sweep: Sweep, plan: Plan, link: Link, links: dict[int, Link], rows: Sequence[Row], refused: dict[str, str]
) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "device": sweep.device,
        "ranks": "processes" if sweep.processes else "played",
        "communication": "measured" if sweep.processes else "modelled",
        "link": None if sweep.processes else _link_values(link),
        "measured_links": {str(size): _link_values(own) for size, own in links.items()} if sweep.processes else None,
        "repeats": plan.repeats,
        "warmup": plan.warmup,
        "tolerance": TOLERANCE if plan.check else None,
        "packs": {pack.name: list(pack.lengths) for pack in sweep.packs},
        "rows": [row.to_dict() for row in rows],
        "refused": refused,
    }


def _link_values(link: Link) -> dict[str, float]:
    return {"latency": link.latency_s, "bandwidth": link.bandwidth}


def _fail_if_wrong(rows: Sequence[Row]) -> None:
    wrong = [
        f"{row.scheme}, {row.setting.kernel}, {row.setting.kind.name}, {row.setting.pack.name}, CP {row.setting.size}, "
        f"{row.setting.dtype}: {row.error:.1e} (tolerance {TOLERANCE[row.setting.dtype]:g})"
        for row in rows
        if row.is_wrong
    ]
    if wrong:
        raise DCPError("results differ from the reference kernel's:\n  " + "\n  ".join(wrong))
