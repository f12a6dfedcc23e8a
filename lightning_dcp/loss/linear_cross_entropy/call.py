"""What a call asks of a kernel, and whether a kernel's package is there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dcp.loss.linear_cross_entropy.logits import LogitTransform
from lightning_dcp.loss.linear_cross_entropy.objective import Objective


@dataclass(frozen=True)
class LossCall:
    """One call, as far as it decides which kernels can serve it.

    Attributes:
        device: type of the tensors' device.
        dtype: of the operands of the product (under autocast: its dtype).
        transform: from the head's outputs to logits.
        objective: the loss; for log-probabilities ``Objective(reduction="none")``.
        bias: whether the head has one.
        token_weights: whether tokens have weights.
        entropy: whether entropies are wanted.
        logsumexp: whether log-sum-exps are wanted.
        chunk_tokens: whether the size of chunks is given.
        tp_group: whether the vocabulary is shared out.
        hidden_grad: whether hidden states need a gradient.
        head_grad: whether weight or bias need a gradient.
    """

    device: str
    dtype: torch.dtype
    transform: LogitTransform
    objective: Objective
    bias: bool = False
    token_weights: bool = False
    entropy: bool = False
    logsumexp: bool = False
    chunk_tokens: bool = False
    tp_group: bool = False
    hidden_grad: bool = True
    head_grad: bool = True

    def common_refusals(self, dtypes: tuple[torch.dtype, ...]) -> list[str]:
        """Why a kernel of another package cannot serve: what holds for all of them.

        Args:
            dtypes: operands that the kernel takes.
        """
        transform = self.transform
        reasons = {
            f"it runs on cuda, the tensors are on {self.device}": self.device != "cuda",
            f"it has no operands of {self.dtype}": self.dtype not in dtypes,
            f"it has no temperature, asked is {transform.temperature:g}": transform.temperature != 1,
            f"it has no logit_scale, asked is {transform.logit_scale:g}": transform.logit_scale != 1,
            "it gives no entropy": self.entropy,
            "it gives no logsumexp": self.logsumexp,
            "it takes the whole vocabulary, not a share of it (tp_group)": self.tp_group,
            "it chooses the size of its chunks by itself (chunk_tokens)": self.chunk_tokens,
        }
        return [reason for reason, holds in reasons.items() if holds]


def entry_point(package: str, module: str, name: str) -> Callable[..., Any] | str:
    """A function of a package that may be missing, or why there is none.

    Args:
        package: as pip names it.
        module: where the function is.
        name: of the function.
    """
    if importlib.util.find_spec(module.split(".")[0]) is None:
        return f"the package {package} is not installed"
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # no Triton, or of another torch or CUDA
        return f"the package {package} cannot be used: {type(error).__name__}: {error}"
