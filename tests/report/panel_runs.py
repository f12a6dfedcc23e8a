"""Made-up runs for the panel's tests: ranks in a ring, with a slow link, heavy batches and a slow rank where they are wanted."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_dcp.stability.record import Event, Interval, LinkTime, PackTime, RankTime, StepRecord
from lightning_dcp.stability.run_folder import Run

HOSTILE = "<script>alert(1)</script>"
KINDS = ("assistant", "user", "tool", "system")
HOP_S, WORK_S = 0.002, 0.08


@dataclass
class MadeUp:
    """How a run is made up; a step has two rounds of packs, each over groups of a CP size."""

    steps: int = 300
    ranks: int = 8
    seed: int = 0
    jitter: float = 0.06
    slow_link: tuple[int, int] | None = (2, 3)
    slow_steps: tuple[int, int] = (120, 180)
    heavy_steps: tuple[int, ...] = (40, 230)
    keep_every: int = 10
    hops_a_pack: int = 6
    ids: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    meta: dict = field(default_factory=dict)

    def run(self, path="logs/version_0/stability"):
        random = np.random.default_rng(self.seed)
        meta = {
            "format": 1,
            "starts": ["2025-01-01T10:00:00+00:00"],
            "topology": f"world {self.ranks} / TP 1 / PP 1",
            "layout": "budgeted",
            "ring_order": "measured",
            "max_seqlen_per_dp_cp_rank": 8192,
            "budget": {"max_tokens": 8192, "dense_limit": 2048, "dense_from": 1.5, "tolerance": 0.1},
            "cost_model": {"name": "h100", "linear": 1.2e-6},
            "dynamic_context_parallel": True,
        }
        return Run(Path(path), meta | self.meta, tuple(self.step(n, random) for n in range(self.steps)))

    def is_slow(self, number):
        return self.slow_link is not None and self.slow_steps[0] <= number < self.slow_steps[1]

    def step(self, number, random):
        sizes = [int(random.choice([c for c in (1, 2, 4, 8) if self.ranks % c == 0])) for _ in range(2)]
        work = np.full(self.ranks, WORK_S) * random.lognormal(0, self.jitter, self.ranks)
        work *= 1.8 if number in self.heavy_steps else 1.0
        expected = work * 0.9
        packs, clock = [], np.zeros(self.ranks)
        totals = {kind: np.zeros(self.ranks) for kind in ("compute", "transfer", "wait")}
        for place, size in enumerate(sizes):
            packs += self.round(number, place, size, work / 2, clock, totals, random)
        keep = number % self.keep_every == 0 or number in self.heavy_steps or (self.is_slow(number) and number % 5 == 0)
        ranks = tuple(
            RankTime(
                r,
                *(float(totals[k][r]) for k in ("compute", "wait", "transfer")),
                float(expected[r]),
                3_000_000_000 + r * 10**8,
            )
            for r in range(self.ranks)
        )
        links = self.links(number, max(sizes), random)
        return StepRecord(
            number, float(clock.max()), int(30_000 * random.lognormal(0, 0.1)), float(expected.max()) * 1.1,
            ranks, links, tuple(packs) if keep else (), self.events(number),
        )  # fmt: skip

    def round(self, number, place, size, work, clock, totals, random):
        packs = []
        for first in range(0, self.ranks, size):
            group = range(first, first + size)
            begin = max(clock[r] for r in group) if size > 1 else clock[first]
            tokens = int(random.integers(2000, 8100))
            dense = int(random.beta(2, 5) * 2600)
            heavy = " heavy" if number in self.heavy_steps else ""
            ids = tuple(self.ids) or tuple(
                f"chat-{int(random.integers(0, 4000)):05d}{heavy}" for _ in range(1 + size // 2)
            )
            for r in group:
                intervals, end = self.intervals(number, r, group, clock[r], float(begin), work[r])
                for interval in intervals:
                    totals[interval.kind][r] += interval.end_s - interval.start_s
                kinds = dict(zip(self.kinds, (tokens - dense, dense // 2, dense - dense // 2, 0), strict=False))
                pack = PackTime(
                    place * self.ranks + first,
                    r,
                    first,
                    size,
                    float(clock[r]),
                    end,
                    tokens,
                    dense,
                    ids,
                    intervals,
                    kinds,
                )
                packs.append(pack)
                clock[r] = end
        return packs

    def intervals(self, number, rank, group, start, begin, work):
        found, at = [], float(start)

        def add(kind, seconds):
            nonlocal at
            if seconds > 0:
                found.append(Interval(kind, at, at + seconds))
                at += seconds

        add("wait", begin - at)
        hops = self.hops_a_pack if len(group) > 1 else 0
        before = group[(rank - group[0] - 1) % len(group)]
        slow = self.is_slow(number) and (before, rank) == self.slow_link
        for _ in range(hops):
            add("compute", work / (hops + 1))
            add("transfer", HOP_S * (8 if slow else 1))
        add("compute", work / (hops + 1))
        return tuple(found), at

    def links(self, number, size, random):
        if size == 1:
            return ()
        found = []
        for r in range(self.ranks):
            source = r // size * size + (r - 1) % size
            slow = 8 if self.is_slow(number) and (source, r) == self.slow_link else 1
            typical = HOP_S * slow * float(random.lognormal(0, 0.05))
            found.append(LinkTime(source, r, 12, 12 << 20, 12 * typical, typical, HOP_S))
        return tuple(sorted(found, key=lambda link: (link.source, link.target)))

    def events(self, number):
        if self.slow_link is None:
            return ()
        first, last = self.slow_steps
        subject = "link {}->{}".format(*self.slow_link)
        made = {
            first + 8: ("alarm", f"{subject} takes 8.0 times its expected time since step {first}", 8.0, 1.1),
            first + 9: ("action", f"the ring's order no longer crosses {subject}", 8.0, 1.2),
            last + 10: ("cleared", f"{subject} is back to 1.0 times its expected time", 1.0, 1.9),
            last + 30: ("undone", "the ring's order is the measured one again", 1.0, 1.9),
        }
        if number not in made:
            return ()
        kind, text, slowdown, cost = made[number]
        return (Event(number, kind, subject, text, slowdown, first, cost),)


def tiny():
    """Three steps on one rank: no links, no segments, no memory."""
    steps = tuple(
        StepRecord(n, 0.1 + 0.01 * n, 500, None, (RankTime(0, 0.09 + 0.01 * n, 0.0, 0.0, 0.08),)) for n in range(3)
    )
    return Run(Path("logs/tiny/stability"), {"format": 1, "starts": []}, steps)


def hostile():
    """Text that would be markup, in every place where a run's text can be."""
    made = MadeUp(
        steps=60, ranks=4, slow_steps=(20, 30), heavy_steps=(7,), ids=(HOSTILE, '"><img src=x onerror=alert(2)>')
    )
    made.kinds = (HOSTILE, "</title></svg><b>bold</b>", "{{ 7 * 7 }}", "&amp;")
    made.meta = {"name": f"run {HOSTILE}", HOSTILE: HOSTILE, "note": {"</dl>": ["</style>", HOSTILE]}}
    run = made.run()
    event = Event(59, "alarm", f"link {HOSTILE}", f"{HOSTILE} and </td></table>", 3.0, 50, 1.0)
    last = run.steps[-1]
    steps = (*run.steps[:-1], StepRecord(**{**last.__dict__, "events": (event,)}))
    return Run(run.path, run.meta, steps)
