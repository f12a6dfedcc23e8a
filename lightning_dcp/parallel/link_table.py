"""How fast each rank of the plane reaches each other one: measured pair by pair, kept in a file, the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_dcp.errors import DataError
from lightning_dcp.parallel.links import Link

Rows = tuple[tuple[float, ...], ...]

_KIND = "links between ranks"


@dataclass(frozen=True)
class MeasuredOn:
    """Where links were measured; those of another machine, or of other ranks of it, are not these.

    Attributes:
        hosts: for each place in the plane the host that its rank is on, or with several planes the hosts of its ranks.
        backend: of the process group, e.g. ``nccl``.
        device: kind of device that messages lie on, e.g. ``cpu``.
    """

    hosts: tuple[tuple[str, ...], ...]
    backend: str
    device: str


@dataclass(frozen=True)
class LinkTable:
    """Directed links between the ranks of a plane, by their places in it.

    Attributes:
        latency_s: seconds of a hop that carries next to nothing, ``[source][target]``; on the diagonal 0.
        bandwidth: bytes/s that a large hop carries, ``[source][target]``; on the diagonal 0.
        measured_on: where; None for links that are told.

    Raises:
        DataError: tables that are no squares of one size, or a link without a latency and a bandwidth above 0.
    """

    latency_s: Rows
    bandwidth: Rows
    measured_on: MeasuredOn | None = None

    def __post_init__(self) -> None:
        size = len(self.latency_s)
        for name in ("latency_s", "bandwidth"):
            rows = getattr(self, name)
            if len(rows) != size or any(len(row) != size for row in rows):
                raise DataError(f"{name} of links between {size} ranks must have {size} rows of {size} numbers")
            links = [rows[i][j] for i in range(size) for j in range(size) if i != j]
            if not all(math.isfinite(value) and value > 0 for value in links):
                raise DataError(f"{name} of links between ranks must be above 0")

    @property
    def ranks(self) -> int:
        """Ranks of the plane."""
        return len(self.latency_s)

    @property
    def nodes(self) -> tuple[tuple[str, ...], ...] | None:
        """What tells the node of each place; None where it is not known."""
        return None if self.measured_on is None else self.measured_on.hosts

    def link(self, source: int, target: int) -> Link:
        """The link from one place to another one."""
        return Link(self.latency_s[source][target], self.bandwidth[source][target])

    def seconds(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds of a hop with so many bytes; none from a rank to itself."""
        return 0.0 if source == target else self.link(source, target).seconds(num_bytes)

    @classmethod
    def of_links(cls, links: Mapping[tuple[int, int], Link], ranks: int, measured_on: MeasuredOn | None) -> LinkTable:
        """A table from all its links."""
        rows = [[links.get((i, j)) for j in range(ranks)] for i in range(ranks)]
        latency = tuple(tuple(0.0 if link is None else link.latency_s for link in row) for row in rows)
        bandwidth = tuple(tuple(0.0 if link is None else link.bandwidth for link in row) for row in rows)
        return cls(latency, bandwidth, measured_on)

    def to_json(self) -> dict[str, Any]:
        """JSON-able values; :meth:`from_json` reads them back."""
        return {"kind": _KIND, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> LinkTable:
        """Read what :meth:`to_json` wrote.

        Raises:
            DataError: something else.
        """
        if not isinstance(data, Mapping) or data.get("kind") != _KIND:
            raise DataError(f"no {_KIND}")
        try:
            where = data["measured_on"]
            hosts = where and tuple(tuple(map(str, hosts)) for hosts in where["hosts"])
            measured_on = where and MeasuredOn(hosts, str(where["backend"]), str(where["device"]))
            return cls(_rows(data["latency_s"]), _rows(data["bandwidth"]), measured_on)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{_KIND}, but not as they are written: {error!r}") from error


def _rows(values: Sequence[Sequence[float]]) -> Rows:
    return tuple(tuple(float(value) for value in row) for row in values)
