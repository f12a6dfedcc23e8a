"""Whether attention over a group gives what the reference kernel gives on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dcp.attention.kernels.reference import ReferenceKernel
from lightning_dcp.commands.bench_attention.cases import Setting
from lightning_dcp.commands.bench_attention.work import ONE_RANK, Inputs, Work, alone

TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Largest error by dtype: some tens of roundings of the numbers that kernels multiply."""
_STRETCH = 64
"""Tokens whose error is taken together. Outputs of late tokens are far smaller than those of early ones: against the
largest of all they could be wrong and not be seen."""
_NEGLIGIBLE = 1e-3
"""Of a tensor's mean size: the gradient of queries that see one key only is nothing but rounding."""


@dataclass(frozen=True)
class Outcome:
    """What attention gave for some tokens: ``out``, ``dq``, ``dk`` and ``dv``, and the sinks' gradient by these."""

    tensors: Mapping[str, Tensor]
    dsinks: Tensor | None

    @classmethod
    def of(cls, work: Work, scheme: str) -> Outcome:
        """Compute it."""
        out, saved = work.forward(scheme)
        dq, dk, dv, dsinks = work.backward(scheme, saved)
        return cls({"out": out, "dq": dq, "dk": dk, "dv": dv}, dsinks)


def reference(setting: Setting, pack: Inputs, device: torch.device) -> Outcome:
    """The whole pack on one rank by the reference kernel, in float32 or float64."""
    narrow = Work.of(setting, alone(setting, device), pack)
    wide = dataclasses.replace(setting.shape, dtype=setting.shape.wide)
    call = dataclasses.replace(narrow.call, shape=wide, kernel=ReferenceKernel())
    return Outcome.of(Work(call, narrow.inputs.to(wide.dtype)), ONE_RANK)


def errors(found: Outcome, wanted: Outcome, index: Tensor) -> dict[str, float]:
    """The largest error of each tensor, relative to its size in the same stretch of the pack.

    Args:
        found: of some tokens.
        wanted: of the whole pack.
        index: where these tokens lie in the pack, ascending.
    """
    usual = max(float(_squares(whole).mean()) for whole in wanted.tensors.values())
    return {name: _error(found.tensors[name], whole, index, usual) for name, whole in wanted.tensors.items()}


def sink_error(parts: Sequence[Tensor], wanted: Tensor) -> float:
    """The error of the sinks' gradient, summed over the ranks."""
    total = torch.stack([part.to(wanted) for part in parts]).sum(0)
    return float((total - wanted).norm() / wanted.norm())


def _error(found: Tensor, whole: Tensor, index: Tensor, usual: float) -> float:
    """``usual`` is the mean square of the largest of all tensors."""
    if not len(index):
        return 0.0
    wanted = whole[index]
    stretches, where = (index // _STRETCH).unique_consecutive(return_inverse=True)
    off = wanted.new_zeros(len(stretches)).index_add_(0, where, _squares(found.to(wanted.dtype) - wanted))
    size = wanted.new_zeros(len(stretches)).index_add_(0, where, _squares(wanted))
    mean = float(_squares(whole).mean())
    # where every token sees one key, gradients of queries and keys are nothing but rounding of usual numbers
    least = (usual if mean < _NEGLIGIBLE**2 * usual else _NEGLIGIBLE**2 * mean) * where.bincount()
    least = least.to(whole.dtype) + torch.finfo(whole.dtype).tiny
    return float((off / torch.maximum(size, least)).max().sqrt())


def _squares(x: Tensor) -> Tensor:
    """Of each token, summed."""
    return x.pow(2).flatten(1).sum(1)
