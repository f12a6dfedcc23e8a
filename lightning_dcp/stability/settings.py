"""When a link or a rank counts as slow, and when again as sound."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dcp.errors import Problem, raise_problems
from lightning_dcp.segments import is_number

HOST_FLOOR_S, DEVICE_FLOOR_S = 0.010, 0.001
"""Where hops are timed by the host, its processes hold each other up by milliseconds; a device's stream does not."""


@dataclass(frozen=True)
class AlarmSettings:
    """What makes an alarm, what ends it, and how links that carry nothing are tried.

    A step is slow for a link, or for a rank, if it took more than ``factor`` times what was expected, and more than the
    floor above that. One slow step says nothing: there is an alarm when ``needed`` of the last ``window`` steps are slow, of
    those in which the link carried something or the rank had work.

    Attributes:
        window: steps that are looked at.
        needed: slow ones among them that make an alarm; it ends when no more than ``window - needed`` are left.
        link_factor: for one hop; expected is what the table of links says, or else what the others take.
        link_floor_s: seconds of one hop; None: 10 ms where hops are timed by the host, 1 ms on a device.
        rank_factor: for the seconds that a rank computes; expected is what the other ranks would need for its work.
        rank_floor_s: seconds of one step.
        probe_every: steps from one try of an avoided link to the next.
        probes_needed: sound tries in a row until it is used again. Each time that it turns slow again soon, twice as many.

    Raises:
        ConfigurationError: all bad values at once.
    """

    window: int = 12
    needed: int = 8
    link_factor: float = 2.0
    link_floor_s: float | None = None
    rank_factor: float = 1.4
    rank_floor_s: float = 0.005
    probe_every: int = 5
    probes_needed: int = 2

    def __post_init__(self) -> None:
        problems = [
            Problem(f"{name}={getattr(self, name)!r}", "not a whole number of 1 or more", f"give {name} of 1 or more")
            for name in ("window", "needed", "probe_every", "probes_needed")
            if not _is_count(getattr(self, name))
        ]
        problems += [
            Problem(f"{name}={getattr(self, name)!r}", f"not a finite number above {least}", f"give such a {name}")
            for name, least in (("link_factor", 1), ("rank_factor", 1))
            if not is_number(getattr(self, name)) or getattr(self, name) <= least
        ]
        floors = {} if self.link_floor_s is None else {"link_floor_s": self.link_floor_s}
        floors["rank_floor_s"] = self.rank_floor_s
        problems += [
            Problem(f"{name}={value!r}", "not a finite number of 0 or more", f"give {name} in seconds")
            for name, value in floors.items()
            if not is_number(value) or value < 0
        ]
        if not problems and not self.window < 2 * self.needed <= 2 * self.window:
            found = f"needed={self.needed}: an alarm must need more than half of the window, and at most all of it"
            problems.append(Problem(f"window={self.window}", found, "give a needed between these"))
        raise_problems(problems)

    def link_floor(self, device_type: str) -> float:
        """The floor of a hop, where packs are computed on such a device."""
        if self.link_floor_s is not None:
            return self.link_floor_s
        return DEVICE_FLOOR_S if device_type == "cuda" else HOST_FLOOR_S


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
