"""Nothing of the size of all logits is ever made (CASES M12.1)."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_dcp.loss import linear_cross_entropy, linear_log_probs
from lightning_dcp.loss.linear_cross_entropy.statistics import automatic_chunk

TOKENS, VOCABULARY, WIDTH = 4096, 32768, 4
CHUNK = automatic_chunk(VOCABULARY, torch.float32, torch.device("cpu"), TOKENS)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has: of its storage, so that views do not hide it."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor):
                size = made.untyped_storage().nbytes() // made.element_size()
                self.elements = max(self.elements, made.numel(), size)
        return result


def backward_of(compute, tokens, vocabulary=VOCABULARY, dtype=torch.float32):
    """The largest tensor of forward and backward, and all elements that were saved in between."""
    hidden = torch.randn(tokens, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    saved = {}

    def keep(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = compute(hidden, weight, targets)
        loss.backward()
    assert hidden.grad.isfinite().all() and weight.grad.abs().max() > 0
    return largest.elements, sum(saved.values())


def every_statistic(hidden, weight, targets):
    bias = torch.zeros(len(weight), requires_grad=True)
    loss = linear_cross_entropy(
        hidden, weight, targets, bias=bias, label_smoothing=0.1, z_loss=1e-3, softcap=30.0, temperature=0.9,
        token_weights=torch.rand(len(targets)),
    )  # fmt: skip
    found = linear_log_probs(hidden, weight, targets, bias=bias, softcap=30.0, with_entropy=True)
    return loss + 0.01 * found.entropy.mean()


@pytest.mark.parametrize(
    "compute",
    [linear_cross_entropy, pytest.param(every_statistic, marks=pytest.mark.slow)],
)
def test_no_tensor_of_all_logits_is_made(compute):
    largest, saved = backward_of(compute, TOKENS)
    assert CHUNK * 8 <= TOKENS  # an eighth of all logits at the most
    assert largest == CHUNK * VOCABULARY
    assert saved <= 16 * TOKENS + (WIDTH + 1) * (TOKENS + VOCABULARY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_as_large_as_asked(dtype):
    def log_probs(hidden, weight, targets):
        found = linear_log_probs(hidden, weight, targets, chunk_tokens=24, with_entropy=True)
        return (found.log_prob + found.entropy).sum()

    assert backward_of(log_probs, 100, 1024, dtype)[0] == 24 * 1024


def test_the_sensor_sees_all_logits():
    def unfused(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, fused=False)

    largest, saved = backward_of(unfused, 100, 1024)
    assert largest == 100 * 1024 and saved >= 100 * 1024


def test_the_budget_counts_bytes():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert automatic_chunk(32768, torch.float32, cpu, 10**6) == 256
    assert automatic_chunk(32768, torch.bfloat16, cpu, 10**6) == 256  # its logits are float32
    assert automatic_chunk(32768, torch.float64, cpu, 10**6) == 128
    assert automatic_chunk(131072, torch.bfloat16, cuda, 10**6) == 512
    assert automatic_chunk(10**9, torch.float32, cpu, 10**6) == 1
    assert automatic_chunk(32768, torch.float32, cpu, 2048) == 128  # a sixteenth of the tokens
    assert automatic_chunk(32768, torch.float32, cpu, 100) == 64
