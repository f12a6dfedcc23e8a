"""The audit of a plan's boundaries: a pure function, before anything is communicated."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_dcp.boundaries.budget import BoundaryBudget
from lightning_dcp.boundaries.findings import Audit, Finding, Kind, Level
from lightning_dcp.boundaries.layouts import pack_layouts, pack_segments
from lightning_dcp.boundaries.pieces import ROUNDING, PackSegments, Piece, ShardLoad, Work, pieces_of, shard_loads
from lightning_dcp.errors import PlanError
from lightning_dcp.parallel.layout import PackLayout, zigzag
from lightning_dcp.schedule.cost import CostModel
from lightning_dcp.schedule.plan import Pack, StepPlan


def audit(
    plan: StepPlan,
    segments: PackSegments,
    budget: BoundaryBudget,
    layouts: Sequence[PackLayout] | None = None,
    *,
    cost: CostModel | None = None,
    sample_ids: Sequence[Any] | None = None,
    rings: Sequence[Sequence[int]] | None = None,
) -> Audit:
    """Look at each shard of a plan before it is run.

    A shard over a budget is refused, whatever the reason: a pack that holds more than all its shards may is told so, with
    the size that would do. A dense segment on several ranks is a warning, unless it is larger than a budget by itself: then
    that is. A pack whose heaviest shard has more than ``1 + tolerance`` times the work of zigzag's heaviest is a warning.

    Args:
        plan: a valid plan.
        segments: of each sample of the batch; None: plain samples.
        budget: of each shard.
        layouts: of each pack, in the plan's order; None: by the names in the plan.
        cost: how much linear layers and attention cost.
        sample_ids: of the batch's samples; None: their places in the batch.
        rings: the places of each pack's group in ring order, which decides how far keys travel; None: rank order.

    Raises:
        PlanError: layouts, segments or rings of another plan.
    """
    packs = list(plan.packs())
    made = pack_layouts(plan, segments, budget, cost) if layouts is None else layouts
    orders = [range(pack.cp_size) for pack in packs] if rings is None else rings
    if not len(packs) == len(made) == len(orders):
        raise PlanError(f"{len(made)} layout(s) and {len(orders)} ring(s) for a plan of {len(packs)} pack(s)")
    within, work = budget.within(plan.max_seqlen_per_dp_cp_rank), Work.of(cost)
    ids = range(len(plan.lengths)) if sample_ids is None else sample_ids
    findings: list[Finding] = []
    for number, (pack, layout, ring) in enumerate(zip(packs, made, orders, strict=True)):
        if layout.size != pack.cp_size or layout.lengths != tuple(plan.lengths[s] for s in pack.samples):
            raise PlanError(f"pack {number}: the layout is of other samples or ranks than {pack}")
        pieces = pieces_of(layout.lengths, pack_segments(pack, segments), within)
        seen = _AuditedPack(
            number, pack, layout, pieces, within, work, [ids[s] for s in pack.samples], ring, plan.ranks
        )
        findings += seen.findings()
    return Audit(tuple(findings))


@dataclass(frozen=True)
class _AuditedPack:
    """One pack with what its findings are made from."""

    number: int
    pack: Pack
    layout: PackLayout
    pieces: Sequence[Piece]
    budget: BoundaryBudget
    work: Work
    ids: Sequence[Any]
    ring: Sequence[int]
    plane_size: int

    @cached_property
    def loads(self) -> list[ShardLoad]:
        return shard_loads(self.layout, self.pieces, self.work)

    @cached_property
    def dense(self) -> list[Piece]:
        return [piece for piece in self.pieces if piece.dense]

    def findings(self) -> Iterator[Finding]:
        yield from self._over("tokens", [load.tokens for load in self.loads], self.budget.max_tokens)
        yield from self._over("dense", [load.dense_tokens for load in self.loads], self.budget.dense_limit)
        for piece in self.pieces:
            yield from self._oversized(piece)
        if self.pack.cp_size > 1:
            yield from self._cut()
            yield from self._imbalance()
        if self.dense:
            yield from self._dense_runs()

    def _finding(
        self, level: Level, kind: Kind, text: str, value: float, limit: float | None = None, **at: Any
    ) -> Finding:
        piece: Piece | None = at.pop("piece", None)
        if piece is not None:
            at |= {"sample": self.ids[piece.sample], "segment": piece.segment if piece.segment >= 0 else None}
        return Finding(level, kind, self.number, f"pack {self.number}: {text}", value=value, limit=limit, **at)

    def _name(self, piece: Piece) -> str:
        kind = "tokens" if piece.segment < 0 else f"segment {piece.segment}, tokens"
        return f"sample {self.ids[piece.sample]}, {kind} {piece.start}..{piece.end} of density {piece.density:g}"

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        return [(piece.sample, piece.end) for piece in self.pieces]

    def _whole(self, part: Piece) -> Piece:
        """The piece that a part on one rank is of."""
        return self.pieces[bisect_left(self.ends, (part.sample, part.end))]

    def _part_name(self, part: Piece) -> str:
        whole = self._whole(part)
        here = "" if part == whole else f", of which tokens {part.start}..{part.end} here"
        return f"{self._name(whole)}{here}"

    # ----------------------------------------------------------------- budgets

    def _over(self, kind: Kind, held: Sequence[int], limit: int | None) -> Iterator[Finding]:
        """A finding for each shard over a budget; else one for the fullest."""
        what = "dense tokens" if kind == "dense" else "tokens"
        if limit is None or (kind == "dense" and not self.dense):
            return
        over = [place for place, count in enumerate(held) if count > limit]
        for place in over:
            parts = [part for part in self.loads[place].parts if part.dense or kind == "tokens"]
            largest = max(parts, key=lambda part: part.num_tokens)
            rank = self.pack.first_rank + place
            text = f"rank {rank} holds {held[place]} {what}, over the budget of {limit}; most in {self._part_name(largest)}"
            text += self._remedy(sum(held), limit, what)
            yield self._finding("refuse", kind, text, held[place], limit, rank=rank, piece=largest)
        if not over:
            place = max(range(len(held)), key=lambda p: (held[p], -p))
            rank = self.pack.first_rank + place
            yield self._finding(
                "ok", kind, f"at most {held[place]} of {limit} {what} on a rank", held[place], limit, rank=rank
            )

    def _remedy(self, total: int, limit: int, what: str) -> str:
        size = self.pack.cp_size
        if total <= size * limit:
            return "; the budgeted layout keeps to it"
        needed, held = -(-total // limit), f". The pack has {total} {what}, more than"
        if needed <= self.plane_size:
            return f"{held} {size} rank(s) may hold: a CP size of {needed} or more would do"
        name = "dense_limit" if what == "dense tokens" else "max_tokens"
        most = f"{held} all {self.plane_size} rank(s) of the plane may hold: {name}={-(-total // self.plane_size)} would do"
        return most if size == self.plane_size else f"{most} there, {name}={-(-total // size)} on {size} rank(s)"

    def _least_room(self, piece: Piece) -> tuple[int, str] | None:
        """The tightest budget that a piece has, and of what."""
        limits = [
            (self.budget.dense_limit if piece.dense else None, "dense tokens"),
            (self.budget.max_tokens, "tokens"),
        ]
        return min(
            ((limit, what) for limit, what in limits if limit is not None), default=None, key=lambda room: room[0]
        )

    def _is_oversized(self, piece: Piece) -> bool:
        room = self._least_room(piece)
        return room is not None and piece.num_tokens > room[0]

    def _oversized(self, piece: Piece) -> Iterator[Finding]:
        room = self._least_room(piece)
        if piece.segment < 0 or room is None or piece.num_tokens <= room[0]:
            return
        limit, what = room
        text = f"{self._name(piece)} is larger than the budget of {limit} {what} on a rank by itself"
        text += ", so it lies on several ranks" if self.pack.cp_size > 1 else ""
        yield self._finding("warn", "oversized", text, piece.num_tokens, limit, piece=piece)

    # ---------------------------------------------------------- cuts and balance

    def _cut(self) -> Iterator[Finding]:
        """Each dense segment on several ranks, and how many plain ones are."""
        holders: dict[tuple[int, int], list[int]] = {}
        whole = {(piece.sample, piece.end): piece for piece in self.pieces}
        for place, load in enumerate(self.loads):
            for part in load.parts:
                piece = self._whole(part)
                holders.setdefault((piece.sample, piece.end), []).append(place)
        cut = [(whole[at], places) for at, places in sorted(holders.items()) if len(set(places)) > 1]
        for piece, places in cut:
            if piece.dense and not self._is_oversized(piece):
                ranks = ", ".join(str(self.pack.first_rank + place) for place in sorted(set(places)))
                text = f"dense {self._name(piece)} is cut over ranks {ranks}"
                rank = self.pack.first_rank + min(places)
                yield self._finding("warn", "cut", text, len(set(places)), 1, rank=rank, piece=piece)
        plain = sum(not piece.dense for piece, _ in cut)
        if plain:
            yield self._finding("ok", "cut", f"{plain} plain segment(s) lie on several ranks", plain)

    def _imbalance(self) -> Iterator[Finding]:
        seconds = [load.work_s for load in self.loads]
        mean = sum(seconds) / len(seconds)
        other = shard_loads(zigzag(self.layout.lengths, self.layout.size), self.pieces, self.work)
        limit = (1.0 + self.budget.tolerance) * max(load.work_s for load in other) / mean
        place = max(range(len(seconds)), key=lambda p: (seconds[p], -p))
        value, rank = seconds[place] / mean, self.pack.first_rank + place
        level: Level = "warn" if value > limit * (1.0 + ROUNDING) else "ok"
        largest = max(self.loads[place].parts, key=self.work.of_piece)
        text = f"rank {rank} has {value:.2f} times the mean work"
        if level == "warn":
            text += f", over the {limit:.2f} that zigzag and the tolerance allow; most in {self._part_name(largest)}"
            yield self._finding(level, "imbalance", text, value, limit, rank=rank, piece=largest)
        else:
            yield self._finding(level, "imbalance", text, value, limit, rank=rank)

    # -------------------------------------------------------------- information

    def _dense_runs(self) -> Iterator[Finding]:
        for place, load in enumerate(self.loads):
            longest, run, last = 0, 0, (-1, -1)
            for part in load.parts:
                touches = part.dense and last == (part.sample, part.start)
                run = (run if touches else 0) + part.num_tokens if part.dense else 0
                last = (part.sample, part.end) if part.dense else (-1, -1)
                longest = max(longest, run)
            rank = self.pack.first_rank + place
            text = f"at most {longest} dense tokens in a row on rank {rank}"
            yield self._finding("ok", "dense_run", text, longest, rank=rank)
        if self.pack.cp_size > 1:
            hops = self._dense_hops()
            yield self._finding(
                "ok", "distance", f"dense keys travel {hops} tokens x hops to the ranks that need them", hops
            )

    def _dense_hops(self) -> int:
        """Over all dense parts: tokens x hops in the ring to the last rank with later tokens of the same sample."""
        size = self.pack.cp_size
        at = {place: step for step, place in enumerate(self.ring)}
        last: list[dict[int, int]] = [{} for _ in self.layout.lengths]  # of each sample: place -> end of its last chunk
        for place, chunks in enumerate(self.layout.ranks):
            for chunk in chunks:
                last[chunk.sample][place] = max(chunk.end, last[chunk.sample].get(place, 0))
        hops = 0
        for place, load in enumerate(self.loads):
            for part in load.parts:
                if part.dense:
                    needy = [q for q, end in last[part.sample].items() if end > part.start and q != place]
                    hops += part.num_tokens * max([(at[q] - at[place]) % size for q in needy], default=0)
        return hops
