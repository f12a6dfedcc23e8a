"""Attention on ranks, on groups played by one process, and both compared with the dense one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dcp.attention import context_parallel_attention
from lightning_dcp.attention.kernels import KERNELS as OWN_KERNELS
from lightning_dcp.attention.kernels import Kernel
from lightning_dcp.attention.schemes import SCHEMES as OWN_SCHEMES
from lightning_dcp.parallel.context import CPContext, make_context
from lightning_dcp.parallel.exchange import Exchange
from lightning_dcp.parallel.groups import ParallelGroups
from lightning_dcp.parallel.layout import PackLayout
from lightning_dcp.parallel.played import PlayedGroup
from tests.attention.dense import CAUSAL, Inputs, Kind, dense_attention, make_inputs, make_sinks
from tests.attention.varlen import PlainVarlenKernel
from tests.parallel.support import join_world, layout_of_pieces, random_layout, sample_slices
from tests.support.ranks import RankPool

SCHEMES = tuple(OWN_SCHEMES)
KERNELS: dict[str, Kernel] = {
    "cpu_flash": OWN_KERNELS["cpu_flash"],
    "reference": OWN_KERNELS["reference"],
    "varlen": PlainVarlenKernel(),
}
"""Those that run on CPU."""
LAYOUTS = ("zigzag", "contiguous", "random", "one rank holds all")


@dataclass(frozen=True)
class Case:
    """One attention call, forward and backward, on one group.

    Attributes:
        inputs: what is attended to.
        size: ranks of the group.
        layout: one of ``LAYOUTS``.
        kernel: a name in ``KERNELS``, or ``auto``.
        scheme: an exchange scheme's name.
        kind: of attention.
        view: of what q, k, v and the gradient of the output are views, in ``VIEWS``.
        ring: the order in which hops visit the ranks; None: by rank.
    """

    inputs: Inputs
    size: int
    layout: str = "zigzag"
    kernel: str = "auto"
    scheme: str = "ring"
    kind: Kind = CAUSAL
    view: str = "contiguous"
    ring: tuple[int, ...] | None = None

    def pack_layout(self) -> str | PackLayout:
        lengths = self.inputs.lengths
        if self.layout == "random":
            return random_layout(lengths, self.size, seed=sum(lengths))
        if self.layout == "one rank holds all":
            return layout_of_pieces(self.size, [[(length, self.size // 2)] for length in lengths])
        return self.layout


@dataclass(frozen=True)
class Attended:
    """Output and gradients of a whole pack, by the names ``out``, ``dq``, ``dk``, ``dv`` (``dsinks``); their dtypes."""

    arrays: dict[str, np.ndarray]
    dtypes: frozenset[torch.dtype]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "heads first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "numbers apart": lambda t: torch.stack([t, -t], -1)[..., 0],
    "numbers before tokens": lambda t: t.permute(2, 1, 0).contiguous().permute(2, 1, 0),
}
"""The same numbers, otherwise in memory."""


Round = dict[int, Case]
"""What groups do at one time, by their first rank; ranks in none of them are idle."""


# --- on one rank


def local_leaves(inputs: Inputs, context: CPContext) -> tuple[list[Tensor], Tensor]:
    """q, k and v of this rank, to differentiate, and the gradient of the output."""
    *parts, grad = (t[context.pack_index] for t in make_inputs(inputs))
    return [part.requires_grad_() for part in parts], grad


def attend(case: Case, context: CPContext) -> dict[str, Any]:
    """This rank's share of a case, and where it lies in the pack."""
    q, k, v, grad = (t[context.pack_index] for t in make_inputs(case.inputs))
    q, k, v, grad = (VIEWS[case.view](t) for t in (q, k, v, grad))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    sinks = make_sinks(case.inputs).requires_grad_() if case.kind.sinks else None
    kind = case.kind.attention_kind(case.inputs, sinks)
    kernel = KERNELS.get(case.kernel, "auto")
    out = context_parallel_attention(*leaves, context, kind, scheme=case.scheme, kernel=kernel)
    wanted = leaves if sinks is None else [*leaves, sinks]
    return share_of(context, out, torch.autograd.grad(out, wanted, grad))


def share_of(context: CPContext, out: Tensor, grads: Sequence[Tensor]) -> dict[str, Any]:
    """Output and gradients of q, k and v (and sinks) of one rank, to be joined with those of the others."""
    tensors = dict(zip(("out", "dq", "dk", "dv", "dsinks"), (out, *grads), strict=False))
    return {
        "index": context.pack_index.numpy(),
        "arrays": {name: t.detach().double().numpy() for name, t in tensors.items()},
        "dtypes": {t.dtype for t in tensors.values()},
    }


def join_shares(inputs: Inputs, shares: Sequence[dict[str, Any]]) -> Attended:
    """What the ranks of one group computed together, in the pack's order; the sinks' gradients are added up."""
    index = np.concatenate([share["index"] for share in shares])
    order = np.argsort(index)
    assert (index[order] == np.arange(sum(inputs.lengths))).all()
    arrays = {}
    for name in shares[0]["arrays"]:
        parts = [share["arrays"][name] for share in shares]
        arrays[name] = sum(parts) if name == "dsinks" else np.concatenate(parts)[order]
    return Attended(arrays, frozenset().union(*(share["dtypes"] for share in shares)))


# --- on a group played by this process


def played_contexts(case: Case) -> tuple[PlayedGroup, Any]:
    """A played group, and what makes a rank's context in it."""
    played = PlayedGroup(case.size, ring=case.ring)
    layout = case.pack_layout()

    def context(exchange: Exchange) -> CPContext:
        return make_context(played.group, exchange.rank, case.inputs.lengths, layout=layout, exchange=exchange)

    return played, context


def attend_played(case: Case) -> Attended:
    """What all ranks compute, one at a time in this process."""
    played, context = played_contexts(case)
    return join_shares(case.inputs, played.run(lambda exchange: attend(case, context(exchange))))


# --- on ranks of their own


def attend_in_rounds(rounds: Sequence[Round]) -> list[dict[str, Any] | None]:
    """A job: this rank's share of each round, None where it was idle."""
    groups = join_world()
    return [_attend_in(round_, groups) for round_ in rounds]


def _attend_in(round_: Round, groups: ParallelGroups) -> dict[str, Any] | None:
    for first, case in round_.items():
        if first <= groups.rank < first + case.size:
            group = groups.cp_group(first, case.size)
            layout, place = case.pack_layout(), groups.rank - first
            return attend(case, make_context(group, place, case.inputs.lengths, layout=layout, ring=case.ring))
    return None


def attend_on(ranks: RankPool, world: int, rounds: Sequence[Round]) -> Iterator[tuple[Case, Attended]]:
    """Run rounds; give each case with what its ranks computed together."""
    shares = ranks.run(attend_in_rounds, world, rounds)
    for i, round_ in enumerate(rounds):
        for first, case in round_.items():
            yield case, join_shares(case.inputs, [shares[rank][i] for rank in range(first, first + case.size)])


def rounds_off_rank_0(cases: Iterable[Case], world: int) -> list[Round]:
    """One case after another on each group's last block of ranks, so that no group smaller than the world has rank 0."""
    return [{world - case.size: case} for case in cases]


# --- compared


def assert_as_dense(case: Case, got: Attended, tolerance: float = 1e-10) -> None:
    """Output and gradients are those of plain softmax attention, sample by sample."""
    expected = dense_attention(case.inputs, case.kind)
    assert got.arrays.keys() == expected.keys()
    for name, whole in expected.items():
        assert got.arrays[name].shape == whole.shape, (name, case)
        for sample, where in enumerate(sample_slices(case.inputs.lengths)):
            rows = slice(None) if name == "dsinks" else where
            error = np.abs(got.arrays[name][rows] - whole[rows]).max()
            assert error <= tolerance, f"{name} of sample {sample} is off by {error}: {case}"
