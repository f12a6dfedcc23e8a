"""What a pack costs: the linear part, attention, and what it takes to cut samples over ranks."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_dcp.errors import ConfigurationError, Problem, raise_problems

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """Seconds of one pack on each rank of its group, forward and backward.

    For a pack of samples of lengths L_s on c ranks::

        pack_overhead
        + sum(linear * L_s / c)
        + sum(attention * L_s^2 / (c * efficiency(L_s / c)))
        + (c - 1) * max(0, hop_latency + hop_bytes * sum(L_s) / c / bandwidth - overlap * attention part / c)

    The last line is what c - 1 hops of a ring cost beyond the attention that hides them: each hop carries the keys and
    values (and their gradients) of a rank's shard while the rank computes 1/c of its attention. The efficiency applies
    to attention only, since all other layers see the pack as one sequence, however many samples it holds.

    Only arithmetic that IEEE 754 defines exactly is used (no logarithms), so that all machines plan alike.

    What is left out is not counted: hops are free unless ``hop_latency``, or ``hop_bytes`` with a ``bandwidth``, is given,
    and those between nodes are like those inside one. :func:`~lightning_dcp.schedule.hardware.preset` has whole models for common
    hardware, and ``lightning-dcp calibrate`` measures one.

    Attributes:
        linear: seconds a token: matrix products, norms, loss.
        attention: seconds a token^2 of causal attention, at full efficiency.
        efficiency: pairs (tokens of a sample on one rank, share of the kernel's full speed), ascending; linear in
            between, constant beyond the ends.
        pack_overhead: seconds a pack, whatever its length: kernel launches, the scheduler's and the trainer's own work.
        hop_latency: seconds a hop, over all layers, forward and backward.
        hop_bytes: bytes that one hop carries for each token of a rank's shard, over all layers, forward and backward.
        bandwidth: bytes/s between ranks of a node; must be given with ``hop_bytes``.
        internode_latency: as ``hop_latency``, for a group that spans nodes: its ring is as slow as its slowest hop;
            ``None``: as inside a node.
        internode_bandwidth: as ``bandwidth``, for a group that spans nodes; ``None``: as inside a node.
        overlap: share of a hop's attention time behind which transfers disappear, 0 to 1.
        ranks_per_node: ranks of the plane in one node; ``None``: all of them.

    Raises:
        ConfigurationError: all bad values at once.
    """

    linear: float
    attention: float
    efficiency: tuple[tuple[int, float], ...] = ((1, 1.0),)
    pack_overhead: float = 0.0
    hop_latency: float = 0.0
    hop_bytes: float = 0.0
    bandwidth: float | None = None
    internode_latency: float | None = None
    internode_bandwidth: float | None = None
    overlap: float = 0.0
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        raise_problems(_problems(self))
        pairs = tuple((int(tokens), float(share)) for tokens, share in self.efficiency)
        object.__setattr__(self, "efficiency", pairs)

    # ------------------------------------------------------------- the formula

    def attention_seconds(self, lengths: Sequence[int] | NDArray[np.int64], cp_size: int) -> FloatArray:
        """Attention of each sample on each rank of its group, in seconds."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.attention * tokens * tokens / (cp_size * self._efficiency_of(tokens / cp_size))

    def exposed_seconds(self, cp_size: int, tokens: float, attention: float, *, spans_nodes: bool = False) -> float:
        """What the hops of one pack cost beyond the attention that hides them.

        Args:
            cp_size: ranks of the group.
            tokens: of the whole pack.
            attention: seconds of attention on each rank, the sum of :meth:`attention_seconds`.
            spans_nodes: whether the group's ranks are in more than one node.
        """
        if cp_size == 1:
            return 0.0
        transfer = self._transfer_seconds(tokens / cp_size, spans_nodes)
        return (cp_size - 1) * max(0.0, transfer - self.overlap * attention / cp_size)

    def sample_seconds(
        self, lengths: Sequence[int] | NDArray[np.int64], cp_size: int, *, spans_nodes: bool = False
    ) -> FloatArray:
        """Seconds of each sample on each rank of its group, if it were alone in its pack."""
        tokens = np.asarray(lengths, dtype=np.float64)
        attention = self.attention_seconds(lengths, cp_size)
        compute = self.pack_overhead + self.linear * tokens / cp_size + attention
        transfer = self._transfer_seconds(tokens / cp_size, spans_nodes)
        return compute + (cp_size - 1) * np.maximum(0.0, transfer - self.overlap * attention / cp_size)

    def pack_seconds(self, lengths: Sequence[int], cp_size: int = 1, first_rank: int = 0, *, padding: int = 0) -> float:
        """Seconds of one pack on each rank of the group that starts at ``first_rank``.

        ``padding`` tokens beside the samples cost as much as others in all layers but attention.
        """
        tokens = float(sum(lengths) + padding)
        attention = math.fsum(self.attention_seconds(lengths, cp_size).tolist())
        exposed = self.exposed_seconds(cp_size, tokens, attention, spans_nodes=self.spans_nodes(first_rank, cp_size))
        return self.pack_overhead + self.linear * tokens / cp_size + attention + exposed

    def spans_nodes(self, first_rank: int, cp_size: int) -> bool:
        """Whether a group has ranks in more than one node."""
        if self.ranks_per_node is None:
            return False
        return first_rank // self.ranks_per_node != (first_rank + cp_size - 1) // self.ranks_per_node

    def unhidden_seconds(
        self, tokens: FloatArray | NDArray[np.int64], attention: FloatArray, cp_size: int, *, spans_nodes: bool = False
    ) -> FloatArray:
        """What samples add to the transfers of a pack less what their attention hides of them; may be negative.

        Without the latency, which is the pack's.
        """
        token_s = self.hop_seconds(spans_nodes=spans_nodes)[1]
        return (cp_size - 1) / cp_size * (token_s * tokens - self.overlap * attention)

    def _transfer_seconds(self, shard: Any, spans_nodes: bool) -> Any:
        """One hop that carries this many tokens, a number or an array."""
        latency_s, token_s = self.hop_seconds(spans_nodes=spans_nodes)
        return latency_s + token_s * shard

    def hop_seconds(self, *, spans_nodes: bool) -> tuple[float, float]:
        """Seconds of one hop: its latency, and what each token of a rank's shard adds."""
        latency, bandwidth = self.hop_latency, self.bandwidth
        if spans_nodes:
            latency = latency if self.internode_latency is None else self.internode_latency
            bandwidth = self.internode_bandwidth or bandwidth
        return latency, 0.0 if bandwidth is None else self.hop_bytes / bandwidth

    def _efficiency_of(self, shard: FloatArray) -> FloatArray:
        """Share of full speed at these many tokens a rank, linear between the table's points."""
        at = np.array([tokens for tokens, _ in self.efficiency], dtype=np.float64)
        share = np.array([value for _, value in self.efficiency])
        if len(at) == 1:
            return np.full(shard.shape, share[0])
        inside = np.clip(shard, at[0], at[-1])
        left = np.clip(np.searchsorted(at, inside, side="right") - 1, 0, len(at) - 2)
        # numpy's own interp may fuse a multiplication with an addition, which not every machine does
        part = (inside - at[left]) / (at[left + 1] - at[left])
        return share[left] + part * (share[left + 1] - share[left])

    # ----------------------------------------------------------------- as data

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML; :meth:`from_dict` reads them back."""
        values = dataclasses.asdict(self)
        values["efficiency"] = [[tokens, share] for tokens, share in self.efficiency]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "a cost model") -> CostModel:
        """Read what :meth:`to_dict` wrote; ``linear`` and ``attention`` must be there, the rest has defaults.

        Raises:
            ConfigurationError: unknown names and bad values, all at once.
        """
        if not isinstance(values, Mapping):
            found = f"{type(values).__name__}, not a mapping of names to numbers"
            raise ConfigurationError([Problem(source, found, "write lines such as `linear: 6.8e-5`")])
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        missing = [name for name in ("linear", "attention") if name not in values]
        problems = [Problem(source, f"no {name!r}", "give its coefficient in seconds") for name in missing]
        problems += [
            Problem(f"{name!r} in {source}", "an unknown name", f"use one of {', '.join(known)}")
            for name in values
            if name not in known
        ]
        given = {name: _freeze(values[name]) for name in known if name in values}
        for name, value in _wrong(known | dict.fromkeys(missing, 1.0) | given):
            problems.append(_problem_of(name, value, f" in {source}"))
        raise_problems(problems)
        return cls(**given)


def _freeze(value: Any) -> Any:
    """Lists, as YAML and JSON have them, as tuples; ``6e-5``, which YAML 1.1 takes for text, as the number it is."""
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    if isinstance(value, str) and (number := re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value.strip())):
        return float(number.group())
    return value


_POSITIVE = ("bandwidth", "internode_bandwidth")
_NON_NEGATIVE = ("linear", "attention", "pack_overhead", "hop_latency", "hop_bytes", "internode_latency")
_OPTIONAL = ("bandwidth", "internode_latency", "internode_bandwidth")


def _is_number(value: Any) -> bool:
    # a comparison, since math.isfinite raises for integers beyond all floats
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_table(value: Any) -> bool:
    """Whether pairs (tokens, share) are a table of efficiencies: tokens ascending, shares above 0 and not over 1."""
    if not isinstance(value, list | tuple) or not value:
        return False
    pairs = [pair for pair in value if isinstance(pair, list | tuple) and len(pair) == 2]
    if len(pairs) != len(value) or not all(_is_number(n) and _is_number(share) for n, share in pairs):
        return False
    tokens = [n for n, _ in pairs]
    ascending = all(a < b for a, b in pairwise(tokens))
    return ascending and all(n == int(n) and n > 0 for n in tokens) and all(0 < share <= 1 for _, share in pairs)


def _wrong(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The values that a cost model cannot have."""
    good = {name: _is_number(values[name]) and values[name] >= 0 for name in _NON_NEGATIVE}
    good |= {name: _is_number(values[name]) and values[name] > 0 for name in _POSITIVE}
    good |= {name: True for name in _OPTIONAL if values[name] is None}
    good["overlap"] = _is_number(values["overlap"]) and 0 <= values["overlap"] <= 1
    good["efficiency"] = _is_table(values["efficiency"])
    ranks = values["ranks_per_node"]
    good["ranks_per_node"] = ranks is None or (isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > 0)
    wrong = [(name, values[name]) for name, is_good in good.items() if not is_good]
    if not wrong and values["linear"] + values["attention"] == 0:
        wrong.append(("linear + attention", 0))
    if not wrong and values["hop_bytes"] > 0 and values["bandwidth"] is None:
        wrong.append(("bandwidth", None))
    return wrong


def _problem_of(name: str, value: Any, where: str = "") -> Problem:
    found, remedy = {
        "efficiency": (
            "not a table of pairs (tokens, share), tokens ascending, shares above 0 and at most 1",
            "give pairs such as [[256, 0.4], [8192, 1.0]]",
        ),
        "overlap": ("not a share from 0 to 1", "give 0 if nothing is hidden, 1 if all is"),
        "ranks_per_node": ("not a positive whole number", "give the plane's ranks in one node, or leave it out"),
        "linear + attention": ("a model by which work costs nothing", "give at least one of them"),
    }.get(
        name,
        ("not a finite number above 0", "give bytes/s")
        if name in _POSITIVE
        else ("not a finite number of 0 or more", "give seconds (hop_bytes: bytes)"),
    )
    return Problem(f"{name}={value!r}{where}", found, remedy)


def _problems(model: CostModel) -> list[Problem]:
    return [_problem_of(name, value) for name, value in _wrong(vars(model))]
