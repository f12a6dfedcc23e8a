"""The same samples in every batch format."""

import torch

from lightning_dcp.batch import PackedBatch, packed_to_jagged, packed_to_padded

FORMATS = ("packed", "padded", "padded-left", "padded-wide", "jagged")


def make_samples(lengths, *, seed=0, masked=0.3, dtype=torch.int64):
    """Samples with input_ids, labels (some -100), a bool, a float [T, 3] and each token's own number."""
    generator = torch.Generator().manual_seed(seed)
    samples, start = [], 0
    for n in lengths:
        ids = torch.randint(1, 90, (n,), generator=generator)
        samples.append(
            {
                "input_ids": ids,
                "labels": ids.masked_fill(torch.rand(n, generator=generator) < masked, -100),
                "flag": torch.rand(n, generator=generator) < 0.5,
                "vector": torch.rand(n, 3, generator=generator) + 1,
                "index": torch.arange(start, start + n),
            }
        )
        start += n
    return samples


def in_format(samples, fmt):
    """A batch of these samples; "padded-wide" has columns that are padding in every row."""
    packed = PackedBatch.from_samples(samples)
    if fmt == "packed":
        return packed
    if fmt == "jagged":
        return packed_to_jagged(packed)
    if fmt == "padded-wide":
        return packed_to_padded(packed, length=packed.max_seqlen + 3)
    return packed_to_padded(packed, padding_side="left" if fmt == "padded-left" else "right")


def same_batch(ours, expected):
    """Whether two batches of one format hold the same, bit for bit."""
    if isinstance(expected, PackedBatch):
        return (
            set(ours) == set(expected)
            and all(
                torch.equal(ours[name], expected[name]) and ours[name].dtype == expected[name].dtype for name in ours
            )
            and torch.equal(ours.cu_seqlens, expected.cu_seqlens)
            and ours.sample_ids == expected.sample_ids
            and ours.segments == expected.segments
        )
    return set(ours) == set(expected) and all(_same(ours[name], expected[name]) for name in expected)


def _same(ours, expected):
    if not isinstance(expected, torch.Tensor):
        return list(ours) == list(expected)
    if expected.is_nested:
        return torch.equal(ours.offsets(), expected.offsets()) and torch.equal(ours.values(), expected.values())
    return ours.dtype == expected.dtype and torch.equal(ours, expected)
