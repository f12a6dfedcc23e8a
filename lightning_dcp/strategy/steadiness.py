"""Ring orders, timed hops and alarms in a strategy: what is asked for, what is wrong with it, and the watch made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_dcp.errors import Problem
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.link_file import load_or_measure
from lightning_dcp.parallel.link_table import LinkTable
from lightning_dcp.parallel.ring_order import ring_order_problems
from lightning_dcp.parallel.ring_orders import RingOrders
from lightning_dcp.stability.governor import Governor
from lightning_dcp.stability.settings import AlarmSettings
from lightning_dcp.stability.watch import StepWatch

RingOrderLike = Literal["rank", "measured"] | list[int]


@dataclass(frozen=True)
class SteadinessChoice:
    """What was asked for; the attributes are arguments of :class:`~lightning_dcp.DCPStrategy`, described there."""

    ring_order: RingOrderLike
    links_file: str | Path | None
    hop_timing: bool
    alarms: AlarmSettings | None
    fallback: bool

    def problems(self) -> list[Problem]:
        """What is wrong whatever the machine is."""
        problems = [
            Problem(f"{name}={getattr(self, name)!r}", "neither True nor False", "give one of them")
            for name in ("hop_timing", "fallback")
            if not isinstance(getattr(self, name), bool)
        ]
        if self.alarms is not None and not isinstance(self.alarms, AlarmSettings):
            remedy = "give a lightning_dcp.AlarmSettings(window=..., needed=...)"
            problems.append(Problem(f"alarms={self.alarms!r}", f"a {type(self.alarms).__name__}", remedy))
        elif self.alarms is not None and self.hop_timing is False:
            remedy = "use hop_timing=True, or leave alarms out"
            problems.append(Problem("alarms=... with hop_timing=False", "no times that an alarm could rest on", remedy))
        return problems + self._links_file_problems()

    def _links_file_problems(self) -> list[Problem]:
        path = self.links_file
        if path is None:
            return []
        asked = f"links_file={str(path)!r:.200}"
        if not isinstance(path, str | Path):
            return [Problem(f"links_file={path!r:.200}", f"a {type(path).__name__}", "give the path of a file")]
        if not Path(path).name or "\0" in str(path):
            return [Problem(asked, "no path of a file", "give the path of a file, one that is not there yet will do")]
        if not (isinstance(self.ring_order, str) and self.ring_order == "measured"):
            found = f"ring_order={self.ring_order!r}, for which no links are measured"
            return [Problem(asked, found, "use ring_order='measured', or leave links_file out")]
        return []

    def plane_problems(self, ranks: int) -> list[Problem]:
        """What is wrong on a plane of this many ranks."""
        return ring_order_problems(self.ring_order, ranks)

    def orders(
        self, groups: ParallelGroups, device: torch.device, say: Callable[[str], Any]
    ) -> tuple[RingOrders, LinkTable | None]:
        """Ring orders, and the links if they were measured. Collective over the world."""
        if self.ring_order == "measured":
            table = load_or_measure(self.links_file, groups, device, say)
            return RingOrders.measured(table), table
        if self.ring_order == "rank":
            return RingOrders.by_rank(len(groups.plane_ranks)), None
        return RingOrders.explicit(self.ring_order), None

    def watch(
        self,
        groups: ParallelGroups,
        device: torch.device,
        orders: RingOrders,
        table: LinkTable | None,
        *,
        takes_speeds: bool,
        rank_speeds: tuple[float, ...] | None,
        ring: bool,
        deterministic: bool,
    ) -> StepWatch | None:
        """What times training steps; None if they are not to be timed. Collective over the world.

        Args:
            groups: the process groups.
            device: where packs are computed.
            orders: rings while nothing is slow.
            table: links, if they were measured.
            takes_speeds: whether the scheduler can give a rank less work.
            rank_speeds: speeds that the user gave.
            ring: whether exchanges may be rings.
            deterministic: whether two runs must give the same bits, so that nothing may follow from times.
        """
        if not self.hop_timing:
            return None
        settings = self.alarms or AlarmSettings()
        governor = Governor(
            settings,
            orders,
            table=table,
            takes_speeds=takes_speeds,
            rank_speeds=rank_speeds,
            ring=ring,
            fallback=self.fallback and not deterministic,
            device_type=device.type,
        )
        return StepWatch(groups, device, governor, settings, table)
