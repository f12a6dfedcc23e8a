import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_dcp.batch import PackedBatch
from lightning_dcp.batch.labels import shifted_labels
from lightning_dcp.batch.view import view
from lightning_dcp.errors import BatchError
from lightning_dcp.loss import next_token_loss
from tests.batch.formats import FORMATS, in_format, make_samples

VOCAB = 90
every_format = pytest.mark.parametrize("fmt", FORMATS)


def samples_of(*documents):
    return [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in documents]


def logits_of(samples, *, seed=0):
    """One row of logits a token, in float64, that depends on the document only."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=generator)
    return [table[sample["input_ids"]] + table[sample["input_ids"].sum() % VOCAB] for sample in samples]


def loss_of_batch(samples, fmt):
    batch = in_format(samples, fmt)
    logits = view(batch).unflatten(torch.cat(logits_of(samples)))
    return next_token_loss(logits, batch)


def loss_of_loop(samples):
    """Each sample alone, token by token: per-token losses added, then divided once."""
    losses = []
    for sample, logits in zip(samples, logits_of(samples), strict=True):
        for place in range(len(logits) - 1):
            label = int(sample["labels"][place + 1])
            if label != -100:
                losses.append(-torch.log_softmax(logits[place], 0)[label])
    return torch.stack(losses).sum() / len(losses)


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        ("packed", [[6, 7, -100, 9, -100]]),
        ("padded", [[6, 7, -100], [9, -100, -100]]),
        ("padded-left", [[6, 7, -100], [-100, 9, -100]]),
        ("padded-wide", [[6, 7, -100, -100, -100, -100], [9, -100, -100, -100, -100, -100]]),
    ],
)
def test_labels_are_shifted_inside_each_document(fmt, expected):
    assert shifted_labels(in_format(samples_of([5, 6, 7], [8, 9]), fmt)).tolist() == expected


def test_jagged_labels_are_shifted_inside_each_document():
    shifted = shifted_labels(in_format(samples_of([5, 6, 7], [8, 9]), "jagged"))
    assert [part.tolist() for part in shifted.unbind()] == [[6, 7, -100], [9, -100]]


@every_format
def test_the_pairs_of_one_document(fmt):
    batch = in_format(samples_of([1, 2, 3]), fmt)
    seen = view(batch)
    targets = seen.flatten(shifted_labels(batch)).tolist()
    pairs = [pair for pair in zip(seen.flatten(batch["input_ids"]).tolist(), targets, strict=True) if pair[1] != -100]
    assert pairs == [(1, 2), (2, 3)]


@every_format
@pytest.mark.parametrize("documents", [[[3], [4], [5]], [[3], [4, 5]], [[4, 5], [3]]])
def test_a_document_of_one_token_has_no_target(fmt, documents):
    batch = in_format(samples_of(*documents), fmt)
    found = view(batch).flatten(shifted_labels(batch)).tolist()
    assert [target for target in found if target != -100] == [ids[1] for ids in documents if len(ids) > 1]


@every_format
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 999))
@settings(max_examples=25, deadline=None)
def test_no_target_lies_in_padding_and_none_is_a_first_token(fmt, lengths, seed):
    """First tokens are marked; none may be predicted, from anywhere."""
    samples = make_samples(lengths, seed=seed)
    for sample in samples:
        sample["labels"] = sample["input_ids"].clone()
        sample["labels"][0] = 9999
    batch = in_format(samples, fmt)
    shifted = shifted_labels(batch)
    values = shifted.values() if shifted.is_nested else shifted
    assert not (values == 9999).any()
    assert int((values != -100).sum()) == sum(lengths) - len(lengths)
    if "attention_mask" in batch:
        assert (shifted[batch["attention_mask"] == 0] == -100).all()


@every_format
def test_labels_of_the_next_document_change_nothing(fmt):
    samples = make_samples([3, 4])
    before = view(in_format(samples, fmt)).flatten(shifted_labels(in_format(samples, fmt)))[:3].clone()
    samples[1]["labels"] = (samples[1]["labels"] + 1).clamp(min=1)
    after = view(in_format(samples, fmt)).flatten(shifted_labels(in_format(samples, fmt)))[:3]
    assert torch.equal(before, after)


@every_format
def test_labels_are_not_modified(fmt):
    batch = in_format(make_samples([3, 1, 4]), fmt)
    labels = batch["labels"].values() if fmt == "jagged" else batch["labels"]
    before, version = labels.clone(), labels._version
    shifted_labels(batch)
    assert torch.equal(labels, before)
    assert labels._version == version


@every_format
def test_shift_labels_pass_as_they_are(fmt):
    samples = [{"input_ids": s["input_ids"], "shift_labels": s["labels"]} for s in make_samples([3, 1, 4])]
    batch = in_format(samples, fmt)
    assert shifted_labels(batch) is batch["shift_labels"]


@every_format
def test_labels_and_the_same_already_shifted_give_one_loss(fmt):
    samples = make_samples([5, 2, 4])
    shifted = []
    for sample in samples:
        ahead = torch.cat([sample["labels"][1:], torch.tensor([-100])])
        shifted.append({"input_ids": sample["input_ids"], "shift_labels": ahead})
    assert torch.equal(loss_of_batch(samples, fmt), loss_of_batch(shifted, fmt))


@every_format
def test_both_or_neither_are_refused(fmt):
    batch = in_format([sample | {"shift_labels": sample["labels"]} for sample in make_samples([3])], fmt)
    with pytest.raises(BatchError, match="both labels and shift_labels"):
        next_token_loss(torch.zeros(1, 3, VOCAB), batch)
    batch = in_format([{"input_ids": sample["input_ids"]} for sample in make_samples([3])], fmt)
    with pytest.raises(BatchError, match="neither labels nor shift_labels"):
        next_token_loss(torch.zeros(1, 3, VOCAB), batch)


@every_format
@pytest.mark.parametrize("lengths", [[7], [5, 1, 3], [2, 3, 5], [1, 1, 6, 2]])
def test_next_token_loss_is_that_of_a_loop_over_documents(fmt, lengths):
    samples = make_samples(lengths, seed=sum(lengths))
    torch.testing.assert_close(loss_of_batch(samples, fmt), loss_of_loop(samples), rtol=1e-14, atol=0)


def test_all_formats_give_one_loss():
    samples = make_samples([6, 1, 4, 3])
    losses = [loss_of_batch(samples, fmt) for fmt in FORMATS]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-14, atol=0)


@every_format
def test_gradients_of_the_loss_are_those_of_a_loop(fmt):
    samples = make_samples([4, 2, 3])
    targets = [torch.cat([sample["labels"][1:], torch.tensor([-100])]) for sample in samples]
    rows = torch.cat(logits_of(samples)).requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(rows, torch.cat(targets)), rows)[0]
    batch = in_format(samples, fmt)
    next_token_loss(view(batch).unflatten(rows), batch).backward()
    torch.testing.assert_close(rows.grad, expected, rtol=1e-14, atol=1e-16)


@every_format
def test_the_order_of_documents_does_not_change_the_loss(fmt):
    samples = samples_of([5, 6, 7], [8, 9], [4])
    losses = [loss_of_batch(list(order), fmt) for order in itertools.permutations(samples)]
    for loss in losses:
        torch.testing.assert_close(loss, loss_of_loop(samples), rtol=1e-14, atol=0)


@every_format
def test_the_mean_is_over_targets_and_not_over_samples_or_tokens(fmt):
    """Two documents: 2 targets of loss 4 and 6 targets of loss 1 give 14 / 8."""
    samples = [{"input_ids": torch.full((n,), n), "labels": torch.zeros(n, dtype=torch.int64)} for n in (3, 7)]
    batch = in_format(samples, fmt)

    def row(loss):
        """Two logits whose cross-entropy for class 0 is this."""
        return torch.tensor([0.0, math.log(math.expm1(loss))], dtype=torch.float64)

    packed = torch.stack([row(4.0)] * 3 + [row(1.0)] * 7)
    loss = next_token_loss(view(batch).unflatten(packed), batch)
    assert float(loss) == pytest.approx(1.75, rel=1e-14)


def test_a_batch_without_targets_has_no_mean():
    batch = PackedBatch.from_samples(samples_of([5], [8]))
    assert torch.isnan(next_token_loss(torch.zeros(1, 2, VOCAB), batch))
