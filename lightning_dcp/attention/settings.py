"""The user's settings of attention, checked, and turned into what a run uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lightning_dcp.attention.choice import SchemeChooser
from lightning_dcp.attention.kernels import KERNELS
from lightning_dcp.attention.options import AttentionOptions
from lightning_dcp.attention.schemes import SCHEMES
from lightning_dcp.errors import Problem
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.links import Link, measure_links
from lightning_dcp.schedule.cost import CostModel

AUTO = "auto"
LINKS = (AUTO, "measured", "cost_model")


@dataclass(frozen=True)
class AttentionSettings:
    """What was asked for.

    Attributes:
        scheme: an exchange scheme's name, or ``auto``.
        kernel: a kernel's name, or ``auto``.
        links: where ``auto`` knows from how fast ranks reach each other: ``measured`` at set-up, the ``cost_model``, or
            ``auto``: measured on accelerators, unless deterministic algorithms are asked for.
    """

    scheme: str = AUTO
    kernel: str = AUTO
    links: str = AUTO

    def problems(self) -> list[Problem]:
        """Values that there are not."""
        choices = {
            "attention": (self.scheme, (AUTO, *SCHEMES)),
            "attention_kernel": (self.kernel, (AUTO, *KERNELS)),
            "links": (self.links, LINKS),
        }
        problems = [
            Problem(f"{name}={value!r}", "an unknown value", f"use one of {list(allowed)}")
            for name, (value, allowed) in choices.items()
            if value not in allowed
        ]
        if not problems and self.links == "measured" and self.scheme != AUTO:
            remedy = "leave links out, or use attention='auto'"
            problems.append(Problem(f"links='measured' with attention={self.scheme!r}", "nothing to choose", remedy))
        return problems

    def build(
        self, cost: CostModel, groups: ParallelGroups, device: torch.device, say: Callable[[str], None]
    ) -> AttentionOptions:
        """What the run uses; ``say`` is told what is picked. Collective over the plane where links are measured."""
        if self.scheme != AUTO:
            return AttentionOptions(self.scheme, self.kernel)
        measured = measure_links(groups, device) if self._measures(device) else None
        return AttentionOptions(SchemeChooser(cost, measured, say), self.kernel)

    def _measures(self, device: torch.device) -> bool:
        if self.links == AUTO:
            # Timings differ from run to run, and so may the choice and the last bits of results.
            return device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()
        return self.links == "measured"


def describe(options: AttentionOptions) -> str:
    """The settings in force, in words."""
    if isinstance(options.scheme, str):
        return f"attention by {options.scheme}, kernel {options.kernel}"
    links = options.scheme.links if isinstance(options.scheme, SchemeChooser) else None
    known = "links as in the cost model" if links is None else f"links measured: {_links_text(links)}"
    return f"attention scheme chosen for each call ({known}), kernel {options.kernel}"


def _links_text(links: Mapping[int, Link]) -> str:
    texts = (f"CP {c} {1e6 * link.latency_s:.0f} us and {link.bandwidth / 1e9:.2g} GB/s" for c, link in links.items())
    return "; ".join(texts) or "none"
