"""The public functions: linear cross-entropy, and log-probabilities of targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_dcp.batch.labels import IGNORE_INDEX
from lightning_dcp.loss.linear_cross_entropy import cut_cross_entropy, liger
from lightning_dcp.loss.linear_cross_entropy.inputs import Arguments, Inputs, prepare
from lightning_dcp.loss.linear_cross_entropy.kernels import AUTO
from lightning_dcp.loss.linear_cross_entropy.objective import Objective, Reduction, reduced, token_losses
from lightning_dcp.loss.linear_cross_entropy.plain import plain_statistics
from lightning_dcp.loss.linear_cross_entropy.statistics import Statistics, fused_statistics
from lightning_dcp.loss.linear_cross_entropy.vocabulary import enter_vocabulary, join_vocabulary, own_labels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TokenLogProbs(NamedTuple):
    """Log-probabilities of targets, ``[...]`` each like the targets, in nats, float32 or better, differentiable.

    Attributes:
        log_prob: of each target; 0 where there is none (``ignore_index``).
        logsumexp: of the logits of each token, with a target or not; None unless asked for.
        entropy: of each token's distribution, with a target or not; None unless asked for.
    """

    log_prob: Tensor
    logsumexp: Tensor | None
    entropy: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    token_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    fused: bool = True,
    chunk_tokens: int | None = None,
    kernel: str = AUTO,
    tp_group: ProcessGroup | None = None,
) -> Tensor:
    """Cross-entropy of a language-model head, from hidden states, without ever holding the logits of all tokens.

    Values and gradients are those of ``torch.nn.functional.cross_entropy(linear(hidden, weight, bias), targets)``.
    Targets are **already shifted**: ``targets[t]`` is what token ``t`` predicts. Take
    :func:`lightning_dcp.batch.labels.shifted_labels` of the whole samples, before anything is cut into shards.

    Logits are made for a chunk of tokens, and made again in the backward; nothing of size T x V is kept. Half-precision
    operands (autocast included, which acts as on ``torch.nn.functional.linear``) give logits, statistics, losses and
    gradient sums in float32; gradients come back in the dtype of each input. Differentiable once.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``, as of ``nn.Linear``; with ``tp_group`` this rank's ``[V / size, H]`` rows.
        targets: ``[...]``, ids from 0 to V - 1 (of the whole vocabulary), or ``ignore_index``. Their range is checked,
            for which a GPU is waited for.
        bias: ``[V]``; with ``tp_group`` this rank's share.
        temperature: what logits are divided by, above 0: a number, or a tensor of one element, of the shape of the
            targets, or of its first dimensions (``[B]``, one a sample, for ``[B, T]``). ``fused=True`` takes tensors
            whose elements are equal, and gives no gradient to them.
        token_weights: ``[...]``, factors of token losses; a copy is taken, so that changing them after the forward
            changes nothing. May require a gradient.
        ignore_index: the target of tokens that do not count.
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1 (arXiv:1512.00567).
        z_loss: factor of ``logsumexp**2``, added to each token's loss (PaLM, arXiv:2204.02311).
        softcap: bound of the logits (Gemma 2, arXiv:2408.00118). In this order:
            ``logits = softcap * tanh(logit_scale * linear(hidden) / softcap) / temperature``.
        logit_scale: a factor of the head's outputs.
        reduction: ``none``: ``[...]``, 0 where there is no target. ``sum``. ``mean``: the sum over the number of targets
            that count, or over the sum of their ``token_weights``; NaN, with gradients of 0, if no target counts.
        fused: False makes all T x V logits at once, which also serves temperatures that differ between tokens.
        chunk_tokens: tokens whose logits exist at a time; None fills 256 MiB of logits on CUDA, 32 MiB elsewhere, but
            takes no more than a sixteenth of the tokens (64 at least). The backward holds two tensors of this size,
            three with ``softcap``.
        kernel: ``auto``: on CUDA Liger, then Cut Cross-Entropy, if the package is installed and can serve the call; else
            ``torch``, our own. Or one of these by name. The two packages were tested through stand-ins only; see
            :mod:`~lightning_dcp.loss.linear_cross_entropy.liger` and ``cut_cross_entropy`` for how precise they are.
        tp_group: ranks that share out the vocabulary, equal shares in the order of the ranks. Each holds the same hidden
            states and targets and gets the same loss. In the backward, the gradient of ``hidden`` is summed over the
            group, as by Megatron's ``ColumnParallelLinear``: nothing before may sum it again. The gradients of weight
            and bias are those of this rank's rows.

    Returns:
        The loss in float32 or better: a scalar, or ``[...]`` like the targets with ``reduction="none"``.

    Raises:
        ConfigurationError: shapes, dtypes or values that do not fit, options that exclude each other, or a kernel asked
            for by name that cannot serve the call, with all its reasons; all problems at once. With ``tp_group`` every
            rank raises if one has a problem.
    """
    objective = Objective(label_smoothing, z_loss, reduction)
    inputs = prepare(
        Arguments(
            hidden, weight, targets, bias, temperature, token_weights, ignore_index, softcap, logit_scale, objective,
            fused, chunk_tokens, kernel, tp_group, entropy=False, logsumexp=False,
        )
    )  # fmt: skip
    if inputs.kernel == liger.NAME:
        return _by_liger(inputs, objective)
    statistics = _statistics(inputs, fused=fused)
    valid = inputs.labels >= 0
    losses = token_losses(statistics, valid, objective)
    weights = None if token_weights is None else token_weights.reshape(-1).to(losses.dtype)
    loss = reduced(losses, valid, weights, reduction)
    return loss.reshape(targets.shape) if reduction == "none" else loss


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    fused: bool = True,
    chunk_tokens: int | None = None,
    kernel: str = AUTO,
    tp_group: ProcessGroup | None = None,
    with_entropy: bool = False,
    with_logsumexp: bool = False,
) -> TokenLogProbs:
    """Log-probabilities of targets from hidden states, without ever holding the logits of all tokens.

    For DPO, PPO, GRPO and the like. Targets are **already shifted**
    (:func:`lightning_dcp.batch.labels.shifted_labels`): ``targets[t]`` is what token ``t`` predicts.

    Args:
        hidden: ``[..., H]``.
        weight: ``[V, H]``; with ``tp_group`` this rank's rows.
        targets: ``[...]``, ids from 0 to V - 1, or ``ignore_index``.
        with_entropy: also give the entropy of each token's distribution.
        with_logsumexp: also give the log-sum-exp of each token's logits.
        bias: As all that follow, see :func:`linear_cross_entropy`. Liger gives no log-probabilities.
        temperature: see there; log-probabilities, log-sum-exps and entropies are of the divided logits.
        ignore_index: see there.
        softcap: see there.
        logit_scale: see there.
        fused: see there.
        chunk_tokens: see there.
        kernel: see there.
        tp_group: see there.

    Returns:
        Tensors of the shape of ``targets``.

    Raises:
        ConfigurationError: as :func:`linear_cross_entropy`.
    """
    inputs = prepare(
        Arguments(
            hidden, weight, targets, bias, temperature, None, ignore_index, softcap, logit_scale,
            Objective(reduction="none"), fused, chunk_tokens, kernel, tp_group, with_entropy, with_logsumexp,
        )
    )  # fmt: skip
    found = _statistics(inputs, fused=fused)
    shaped = (None if x is None else x.reshape(targets.shape) for x in (found.logsumexp, found.entropy))
    logsumexp, entropy = shaped
    return TokenLogProbs(found.log_prob.reshape(targets.shape), logsumexp if with_logsumexp else None, entropy)


def _statistics(inputs: Inputs, *, fused: bool) -> Statistics:
    hidden, weight, labels, group = inputs.hidden, inputs.weight, inputs.labels, inputs.group
    if inputs.kernel == cut_cross_entropy.NAME:
        return Statistics(_by_cut_cross_entropy(inputs), None, None, None)
    if group is not None:
        hidden, labels = enter_vocabulary(hidden, group), own_labels(labels, len(weight), group)
    if fused:
        local = fused_statistics(hidden, weight, inputs.bias, labels, inputs.head)
    else:
        local = plain_statistics(hidden, weight, inputs.bias, labels, inputs.head, inputs.temperatures)
    return local if group is None else join_vocabulary(local, inputs.labels, len(weight), group)


def _by_liger(inputs: Inputs, objective: Objective) -> Tensor:
    dtype, bias = inputs.head.dtype, inputs.bias
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        return liger.liger_loss(
            inputs.hidden.to(dtype),
            inputs.weight.to(dtype),
            None if bias is None else bias.to(dtype),
            inputs.labels,
            inputs.head.transform.softcap,
            objective,
        )


def _by_cut_cross_entropy(inputs: Inputs) -> Tensor:
    dtype = inputs.head.dtype
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        return cut_cross_entropy.cut_log_probs(
            inputs.hidden.to(dtype), inputs.weight.to(dtype), inputs.labels, inputs.head.transform.softcap
        )
