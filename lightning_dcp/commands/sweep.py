"""Step times over CP sizes and token limits, and which setting to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_dcp.commands.comparison import Lengths, Setting
from lightning_dcp.errors import ConfigurationError, PlanError, Problem
from lightning_dcp.schedule.plan import Scheduler, divisors
from lightning_dcp.schedule.simulate import simulate

AS_FAST = 1.01
"""Settings within this factor of the fastest count as equally fast."""
REASONS = 2
"""Most reasons told why settings have no time."""


@dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes:
        context_parallel_size: of static plans; ``None``: of the compared scheduler, each pack its own.
        max_seqlen_per_dp_cp_rank: most tokens of a rank.
        step_s: mean predicted seconds of a step; ``None``: some batch cannot be planned so.
        why_not: the reason, if it cannot.
    """

    context_parallel_size: int | None
    max_seqlen_per_dp_cp_rank: int
    step_s: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Sweep:
    """All settings.

    Attributes:
        cells: one a setting; limits ascending, then static CP sizes ascending, then the compared scheduler.
        dynamic: name of the compared scheduler.
    """

    cells: tuple[Cell, ...]
    dynamic: str

    @property
    def recommended(self) -> Cell:
        """The fastest; of those as fast within 1 % the smallest limit, since it needs the least memory.

        Of these a static one is preferred, since it is simpler, then the fastest.

        Raises:
            ConfigurationError: no setting can run all batches.
        """
        times = {cell: cell.step_s for cell in self.cells if cell.step_s is not None}
        if not times:
            limits = sorted({cell.max_seqlen_per_dp_cp_rank for cell in self.cells})
            found = f"no limit of {', '.join(map(str, limits))} with which all batches can be planned"
            raise ConfigurationError([Problem("a sweep", found, "give larger --sweep-limits, or cut with --longest")])
        fastest = min(times.values())
        good = [cell for cell, step_s in times.items() if step_s <= fastest * AS_FAST]
        return min(good, key=lambda c: (c.max_seqlen_per_dp_cp_rank, c.context_parallel_size is None, times[c]))

    def name(self, cell: Cell) -> str:
        """What a cell's way to plan is called."""
        return self.dynamic if cell.context_parallel_size is None else f"static CP {cell.context_parallel_size}"

    @property
    def choice(self) -> tuple[str, int]:
        """The recommended setting's row and token limit in :meth:`times`."""
        return self.name(self.recommended), self.recommended.max_seqlen_per_dp_cp_rank

    def times(self) -> dict[str, dict[int, float | None]]:
        """Seconds of a step by way to plan and token limit."""
        rows: dict[str, dict[int, float | None]] = {}
        for cell in self.cells:
            rows.setdefault(self.name(cell), {})[cell.max_seqlen_per_dp_cp_rank] = cell.step_s
        return rows

    def advice(self) -> str:
        """What to set, and why some settings have no time."""
        name, limit = self.choice
        lines = [
            f"Recommended: {name} at max_seqlen_per_dp_cp_rank={limit}, the smallest limit within 1 % of the fastest."
        ]
        reasons = list(dict.fromkeys(cell.why_not for cell in self.cells if cell.step_s is None))
        if reasons:
            lines.insert(0, f"-: {'; or '.join(reasons[:REASONS])}.")
        static = self._fastest_static()
        if static is not None and self.recommended.context_parallel_size is None:
            where = f"{self.name(static)} at {static.max_seqlen_per_dp_cp_rank}"
            share = (static.step_s or 0.0) / (self.recommended.step_s or 1.0)
            lines.append(f"The fastest static setting, {where}, takes {share:.2f} times as long.")
        return "\n".join(lines)

    def _fastest_static(self) -> Cell | None:
        static = [cell for cell in self.cells if cell.context_parallel_size is not None and cell.step_s is not None]
        return min(static, key=lambda cell: cell.step_s or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"cells": [asdict(cell) for cell in self.cells], "recommended": asdict(self.recommended)}


def default_limits(limit: int) -> tuple[int, ...]:
    """Half, once, twice and four times the limit given."""
    return tuple(sorted({max(limit // 2, 1), limit, 2 * limit, 4 * limit}))


def sweep_settings(setting: Setting, batches: Sequence[Lengths], limits: Sequence[int], *, dynamic: str) -> Sweep:
    """Plan the batches under every limit, at every static CP size and by the compared scheduler.

    Args:
        setting: what to plan for; its own limit is not used.
        batches: tokens of each sample, one sequence a batch.
        limits: token limits of a rank.
        dynamic: name of the compared scheduler.

    Raises:
        ConfigurationError: no setting can run all batches.
    """
    sizes = divisors(setting.ranks)
    cells = []
    for limit in sorted(set(limits)):
        own = replace(setting, max_seqlen_per_dp_cp_rank=limit)
        cells += [_cell(own.static(c), c, own, batches) for c in sizes]
        cells.append(_cell(own.compared(), None, own, batches))
    swept = Sweep(tuple(cells), dynamic)
    _ = swept.recommended  # refuses a sweep in which nothing fits
    return swept


def _cell(scheduler: Scheduler, size: int | None, setting: Setting, batches: Sequence[Lengths]) -> Cell:
    limit = setting.max_seqlen_per_dp_cp_rank
    largest = setting.sizes[-1] if size is None else size
    if max(map(max, batches)) > largest * limit:
        return Cell(size, limit, None, "the longest sample does not fit")
    try:
        steps = [simulate(scheduler.schedule(lengths), setting.cost).step_s for lengths in batches]
    except PlanError as error:
        return Cell(size, limit, None, str(error))
    return Cell(size, limit, sum(steps) / len(steps))
