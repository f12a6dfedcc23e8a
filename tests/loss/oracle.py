"""Cross-entropy of a head by all logits at once, as in a textbook."""

import torch
from torch.nn import functional as F


def textbook_logits(hidden, weight, bias=None, softcap=None, logit_scale=1.0, temperature=1.0):
    """Scale, cap, divide."""
    logits = F.linear(hidden, weight, bias) * logit_scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits / temperature


def textbook_loss(
    hidden, weight, targets, bias=None, token_weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    reduction="mean", **transform,
):  # fmt: skip
    logits = textbook_logits(hidden, weight, bias, **transform).flatten(0, -2)
    valid = targets.reshape(-1) != ignore_index
    losses = F.cross_entropy(
        logits, targets.reshape(-1), reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    losses = losses + z_loss * logits.logsumexp(-1) ** 2 * valid
    weights = valid.to(losses) if token_weights is None else token_weights.reshape(-1) * valid
    losses = losses * weights
    if reduction == "none":
        return losses.reshape(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def gradients(value, inputs):
    """Of a fixed mixture of a tensor's elements, which gives each of them another weight."""
    mixture = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
    wanted = [x for x in inputs if x is not None]
    return torch.autograd.grad((value * mixture).sum(), wanted, retain_graph=True, allow_unused=True)


def head(*shape, width=5, vocabulary=11, dtype=torch.float64, seed=0, ignored=True, bias=True):
    """Hidden states, weight, bias and targets, of which some are ignored."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=random, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    targets = torch.randint(vocabulary, shape, generator=random)
    if ignored:
        targets = torch.where(torch.rand(shape, generator=random) < 0.3, -100, targets)
    return draw(*shape, width), draw(vocabulary, width), draw(vocabulary) if bias else None, targets
