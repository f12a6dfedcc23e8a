"""``lightning-dcp bench boundaries``: how steady steps are with uniform cuts, a ring order of measured links, and budgets."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.budgeted import budgeted
from lightning_dcp.boundaries.greedy import greedy
from lightning_dcp.commands.bench_boundaries_chats import ChatPack, draw_packs
from lightning_dcp.commands.bench_boundaries_steps import Case, Machine, Steadiness, simulate_steps
from lightning_dcp.commands.bench_tables import milliseconds
from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.parallel.layout import PackLayout, build_layout
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.report.figure import folder_problems
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.cost_file import load_cost_model

AUDITED = "audited cuts"


def bench_boundaries(
    steps: int = 400,
    *,
    ranks: int = 16,
    max_tokens: int = 4096,
    dense_limit: int = 2048,
    density: float = 3.0,
    tolerance: float = 0.1,
    slow_share: float = 0.1,
    slowdown: float = 2.0,
    jitter: float = 0.1,
    cost_model: str = "h100",
    seed: int = 0,
    json: str | None = None,
) -> list[Steadiness]:
    """Simulate steps on made-up chats with dense tool returns: uniform cuts against budgets, rank order against the best ring.

    A step is one pack of chats on one ring; all ways have the same packs, the same links and the same luck with them. The
    layouts and the search for the ring are those that training uses.

    Args:
        steps: how many are simulated.
        ranks: of the ring.
        max_tokens: most tokens of a rank.
        dense_limit: most tokens of tool returns on a rank.
        density: of tool returns: a token of theirs costs so many times what others do in linear layers.
        tolerance: how much more work than with zigzag the heaviest rank may have, as a share.
        slow_share: share of the steps in which one link of the ring in rank order is slow.
        slowdown: how many times slower it is then.
        jitter: mean of the random part by which each hop takes longer, as a share of its time.
        cost_model: a preset (a100, h100, h200, cpu) or a YAML file as `lightning-dcp calibrate` writes it.
        seed: of chats and jitter.
        json: file for all numbers.

    Returns:
        What came of each way.

    Raises:
        ConfigurationError: bad options, all at once.
    """
    raise_problems(_problems(steps, ranks, density, slow_share, slowdown, jitter, seed, json))
    cost, budget = load_cost_model(cost_model), BoundaryBudget(max_tokens, dense_limit, tolerance=tolerance)
    machine = Machine(ranks, cost, (ranks // 2 - 1, ranks // 2), slow_share, slowdown, jitter)
    packs = draw_packs(steps, ranks * max_tokens, density, seed)
    cases = cases_of(machine, budget)
    console = Console(stderr=True)
    results = [
        simulate_steps(case, packs, machine, budget, seed)
        for case in track(cases, description="simulating", console=console, transient=True)
    ]
    _show(results, packs, machine)
    if json is not None:
        values = [result.to_dict() for result in results]
        Path(json).write_text(jsonlib.dumps(values, indent=1) + "\n", encoding="utf-8")
    return results


def cases_of(machine: Machine, budget: BoundaryBudget) -> list[Case]:
    """The ways that are compared."""
    by_rank = RingOrders.by_rank(machine.size)
    hop_bytes = int(machine.cost.hop_bytes * (budget.max_tokens or 1))
    measured = RingOrders.measured(machine.measured, max(hop_bytes, 1))
    named = {name: partial(_named, name, machine.size) for name in ("contiguous", "zigzag")}
    audited = partial(_budgeted, machine.size, budget, machine.cost)
    return [
        Case("uniform cuts", named["contiguous"], by_rank),
        Case("uniform cuts, fixed ring order", named["contiguous"], measured),
        Case("zigzag, fixed ring order", named["zigzag"], measured),
        Case("greedy shards, fixed ring order", partial(_greedy, machine.size, budget), measured),
        Case(AUDITED, audited, measured),
    ]


def _named(name: str, size: int, pack: ChatPack) -> PackLayout:
    return build_layout(name, pack.lengths, size)


def _greedy(size: int, budget: BoundaryBudget, pack: ChatPack) -> PackLayout:
    return greedy(pack.lengths, size, pack.segments, budget)


def _budgeted(size: int, budget: BoundaryBudget, cost: CostModel, pack: ChatPack) -> PackLayout:
    return budgeted(pack.lengths, size, pack.segments, budget, cost)


def _problems(
    steps: int,
    ranks: int,
    density: float,
    slow_share: float,
    slowdown: float,
    jitter: float,
    seed: int,
    json: str | None,
) -> list[Problem]:
    wrong = [
        ("steps", steps, steps < 1, "give 1 or more"),
        ("ranks", ranks, ranks < 2, "give 2 or more"),
        ("density", density, not 0.0 < density < float("inf"), "give a number above 0"),
        ("slow-share", slow_share, not 0.0 <= slow_share <= 1.0, "give a share from 0 to 1"),
        ("slowdown", slowdown, not 1.0 <= slowdown < float("inf"), "give 1 or more"),
        ("jitter", jitter, not 0.0 <= jitter < float("inf"), "give 0 or more"),
        ("seed", seed, seed < 0, "give 0 or more"),
    ]
    problems = [
        Problem(f"--{name} {value}", "out of range", remedy) for name, value, is_wrong, remedy in wrong if is_wrong
    ]
    return problems + ([] if json is None else folder_problems(json, "--json"))


def _show(results: Sequence[Steadiness], packs: Sequence[ChatPack], machine: Machine) -> None:
    table = Table(title=f"{len(packs)} simulated steps on a ring of {machine.size} ranks", title_justify="left")
    table.add_column("")
    for heading in ("p50 ms", "p99 ms", "p99/p50", "effective throughput", "of the ideal"):
        table.add_column(heading, justify="right")
    audited = next(result for result in results if result.name == AUDITED)
    for result in results:
        times = [milliseconds(result.quantile(share)) for share in (0.5, 0.99)]
        relative = f"{result.throughput / audited.throughput:.2f}x"
        table.add_row(result.name, *times, f"{result.ratio:.2f}", relative, f"{result.share_of_ideal:.0%}")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(table)
    chats = sum(len(pack.lengths) for pack in packs) / len(packs)
    console.print(
        f"A step: {chats:.0f} chats, {sum(pack.num_tokens for pack in packs) / len(packs):,.0f} tokens on average. Effective "
        "throughput: tokens a second over all steps, beside that of audited cuts. The ideal: even work, and no hop that "
        "anyone waits for.",
        soft_wrap=True,
    )
