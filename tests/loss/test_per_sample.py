"""Log-probabilities of tokens, and sums and means of samples, in every batch format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dcp.batch.convert import is_jagged
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError
from lightning_dcp.loss import (
    expand_samples,
    family,
    last_tokens,
    linear_log_probs,
    sample_means,
    sample_sums,
    token_log_probs,
    token_mean,
)
from tests.batch.formats import FORMATS, in_format, make_samples

VOCAB = 90
every_format = pytest.mark.parametrize("fmt", FORMATS)


def in_shape(batch: Any, flat: Tensor, fmt: str) -> Tensor:
    """Per-token values of a batch, with garbage in padding."""
    whole = view(batch).unflatten(flat)
    if not fmt.startswith("padded"):
        return whole
    padding = (batch["attention_mask"] == 0).reshape(*whole.shape[:2], *[1] * (whole.dim() - 2))
    return whole.masked_fill(padding, torch.nan if whole.is_floating_point() else 1)


def values_of(lengths: list[int], fmt: str) -> tuple[Any, Tensor, Tensor]:
    """A batch, one float64 value a token, flat, and the same in the batch's shape."""
    batch = in_format(make_samples(lengths), fmt)
    flat = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return batch, flat.requires_grad_(), in_shape(batch, flat, fmt)


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), fmt=st.sampled_from(FORMATS))
def test_sums_and_means_are_those_of_each_sample(lengths: list[int], fmt: str) -> None:
    batch, flat, values = values_of(lengths, fmt)
    parts = flat.split(lengths)
    kept = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(2)) < 0.6
    mask = in_shape(batch, kept, "packed" if fmt == "packed" else "jagged")
    counted = [part[k] for part, k in zip(parts, kept.split(lengths), strict=True)]
    means = torch.stack([part.mean() if len(part) else part.sum() for part in counted])
    torch.testing.assert_close(sample_sums(values, batch), torch.stack([part.sum() for part in parts]))
    torch.testing.assert_close(sample_means(values, mask, batch), means)
    torch.testing.assert_close(last_tokens(values, batch), torch.stack([part[-1] for part in parts]))
    everything = flat[kept].mean() if kept.any() else flat.sum() * 0
    torch.testing.assert_close(token_mean(values, mask), everything)


@every_format
def test_gradients_reach_only_what_counts(fmt: str) -> None:
    batch, flat, values = values_of([3, 1, 4], fmt)
    mask = view(batch).unflatten(torch.tensor([1, 0, 1, 0, 1, 1, 1, 1], dtype=torch.bool))
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((sample_means(values, mask, batch) * weights).sum(), flat)
    assert gradient.tolist() == [0.5, 0, 0.5, 0, 0.75, 0.75, 0.75, 0.75]
    batch, flat, values = values_of([3, 1, 4], fmt)
    (gradient,) = torch.autograd.grad((sample_sums(values, batch) * weights).sum(), flat)
    assert gradient.tolist() == [1, 1, 1, 2, 3, 3, 3, 3]


@every_format
def test_values_of_samples_at_their_tokens(fmt: str) -> None:
    batch = in_format(make_samples([3, 1, 2]), fmt)
    given = torch.tensor([5.0, 6.0, 7.0])
    expanded = expand_samples(given, batch)
    assert view(batch).flatten(expanded).tolist() == [5, 5, 5, 6, 7, 7]
    assert expand_samples(expanded, batch) is expanded
    if fmt.startswith("padded"):  # so that nothing is divided by 0 there
        assert (expanded == given.unsqueeze(1)).all()


@every_format
@pytest.mark.parametrize("temperature", [1.0, 0.5, "per sample"])
def test_log_probs_of_tokens(fmt: str, temperature: Any) -> None:
    samples = make_samples([4, 1, 6])
    batch = in_format(samples, fmt)
    flat = torch.randn(11, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    targets = shifted_labels(batch)
    each = [0.5, 2.0, 3.0] if temperature == "per sample" else [temperature] * 3
    given = expand_samples(torch.tensor(each), batch) if temperature == "per sample" else temperature
    found = token_log_probs(view(batch).unflatten(flat), targets, temperature=given)
    wanted = []
    rows = zip(flat.split([4, 1, 6]), view(batch).flatten(targets).split([4, 1, 6]), each, strict=True)
    for logits, labels, divisor in rows:
        wanted += [
            row.div(divisor).softmax(0)[t].log() if t != -100 else row[0] * 0
            for row, t in zip(logits, labels, strict=True)
        ]
    right = torch.stack(wanted)
    torch.testing.assert_close(view(batch).flatten(found), right)
    assert found.shape == targets.shape or is_jagged(found)
    ours, theirs = (
        torch.autograd.grad(x.sum(), flat, retain_graph=True)[0] for x in (view(batch).flatten(found), right)
    )
    torch.testing.assert_close(ours, theirs)


def test_log_probs_agree_with_those_from_hidden_states() -> None:
    batch = in_format(make_samples([4, 1, 6]), "padded")
    hidden, weight = torch.randn(3, 6, 8, dtype=torch.float64), torch.randn(VOCAB, 8, dtype=torch.float64)
    targets = shifted_labels(batch)
    fused = linear_log_probs(hidden, weight, targets, temperature=0.7).log_prob
    torch.testing.assert_close(token_log_probs(hidden @ weight.T, targets, temperature=0.7), fused)


def test_a_temperature_of_zero_in_padding_spoils_no_gradient() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    targets, temperature = torch.tensor([[2, -100, 4]]), torch.tensor([[1.0, 0.0, 2.0]])
    token_log_probs(logits, targets, temperature=temperature).sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert not logits.grad[0, 1].any()


def test_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.tensor([[1, 2, -100], [3, 4, 0]])
    found = token_log_probs(logits, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, token_log_probs(logits.float(), targets), rtol=0, atol=0)


def test_a_family_is_a_batch_of_its_own() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    batch = {"chosen_input_ids": ids, "chosen_labels": ids, "rejected_input_ids": ids, "score": torch.ones(2)}
    chosen = family(batch, "chosen_")
    assert set(chosen) == {"input_ids", "labels"}
    assert chosen["input_ids"] is ids  # regions know the tensor again


REFUSED = {
    "logits of other tokens": lambda b: token_log_probs(torch.zeros(2, 4, 5), torch.zeros(2, 3)),
    "temperature of other tokens": lambda b: token_log_probs(
        torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), temperature=torch.ones(2)
    ),
    "values of other samples": lambda b: expand_samples(torch.zeros(5), b),
    "values of other tokens": lambda b: sample_sums(torch.zeros(2, 9), b),
    "mask of other tokens": lambda b: sample_means(torch.zeros(2, 3), torch.ones(2, 9, dtype=torch.bool), b),
    "no such family": lambda b: family(b, "chosen_"),
    "which family": lambda b: sample_sums(torch.zeros(2, 3), {"chosen_input_ids": b["input_ids"]}),
    "no last token": lambda b: last_tokens(
        torch.zeros(2, 3), b | {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(call: Any) -> None:
    batch = {"input_ids": torch.ones(2, 3, dtype=torch.int64)}
    with pytest.raises(BatchError):
        call(batch)
