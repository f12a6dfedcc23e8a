"""Links that rings go around, and when these are tried."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lightning_dcp.stability.settings import AlarmSettings

Link = tuple[int, int]
SOON = 10
"""A link that turns slow again within so many windows has to be sound for twice as long before it is used again."""
MOST = 6
"""Doublings at most."""


@dataclass
class Detour:
    """One link that is avoided.

    Attributes:
        since_step: when that began.
        num_bytes: of the messages that it is tried with.
        sound: tries in a row that it passed.
    """

    since_step: int
    num_bytes: int
    sound: int = 0


class Detours:
    """The links that are avoided now.

    Args:
        settings: how often and how long links are tried.

    Attributes:
        due: links to be tried before the next step, with bytes of a message.
    """

    def __init__(self, settings: AlarmSettings) -> None:
        self._settings = settings
        self._open: dict[Link, Detour] = {}
        self._relapses: dict[Link, int] = {}
        self._ended: dict[Link, int] = {}
        self.due: tuple[tuple[Link, int], ...] = ()

    @property
    def open(self) -> Collection[Link]:
        """The links that are avoided now."""
        return frozenset(self._open)

    def begin(self, link: Link, detour: Detour) -> None:
        """Avoid a link from now on."""
        soon = link in self._ended and detour.since_step - self._ended[link] <= SOON * self._settings.window
        self._relapses[link] = min(MOST, self._relapses.get(link, 0) + 1) if soon else 0
        self._open[link] = detour

    def step(self, step: int, slow: Mapping[Link, bool]) -> list[Link]:
        """The links that may be used again, at the end of a step; they are no longer avoided.

        Args:
            step: its number.
            slow: what tries gave that were told in this step.
        """
        back = []
        for link in sorted(self._open):
            detour = self._open[link]
            if link in slow:
                detour.sound = 0 if slow[link] else detour.sound + 1
            if detour.sound >= self._settings.probes_needed << self._relapses[link]:
                back.append(link)
                del self._open[link]
                self._ended[link] = step
        self.due = tuple(
            (link, self._open[link].num_bytes)
            for link in sorted(self._open)
            if (step - self._open[link].since_step) % self._settings.probe_every == self._settings.probe_every - 1
        )
        return back
