"""Batches of very unequal samples for every kind of loss, in every format that can hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp.batch.labels import shift_packed
from lightning_dcp.data import COLLATORS
from tests.support.training import VOCAB

# Two batches of six. At 16 tokens a rank, 60 needs four ranks of four, 30 needs two, 7 needs one.
LENGTHS = (60, 3, 30, 7, 1, 12, 5, 29, 2, 61, 16, 9)
CHOSEN = (30, 3, 16, 7, 1, 5, 2, 29, 1, 31, 8, 9)
REJECTED = (30, 2, 14, 4, 2, 20, 9, 12, 2, 30, 8, 3)
LIMIT = {2: 32, 4: 16, 6: 13}

Sample = dict[str, Tensor]


def document(length: int, generator: torch.Generator, *, supervised: bool = True) -> Sample:
    """Random tokens, of which four in five are targets, or none."""
    ids = torch.randint(1, VOCAB, (length,), generator=generator)
    unlearnt = torch.rand(length, generator=generator) < 0.2
    return {"input_ids": ids, "labels": ids.masked_fill(unlearnt | (not supervised), -100)}


def documents(generator: torch.Generator, lengths: Sequence[int], without_targets: Sequence[int] = ()) -> list[Sample]:
    return [document(n, generator, supervised=i not in without_targets) for i, n in enumerate(lengths)]


def rollouts(generator: torch.Generator, lengths: Sequence[int], without_targets: Sequence[int] = ()) -> list[Sample]:
    """With an advantage and a temperature a sample, and log-probabilities near those of a fresh policy."""
    samples = documents(generator, lengths, without_targets)
    for sample in samples:
        real = partial(torch.randn, generator=generator, dtype=torch.float64)
        sample["old_log_probs"] = -2.8 + 0.5 * real(len(sample["input_ids"]))
        sample["advantages"], sample["temperature"] = real(()), 0.7 + 0.5 * real(()).abs()
    return samples


def valued(generator: torch.Generator, lengths: Sequence[int], without_targets: Sequence[int] = ()) -> list[Sample]:
    """With advantages, values and returns of each token."""
    samples = rollouts(generator, lengths, without_targets)
    for sample in samples:
        del sample["temperature"]
        for name in ("advantages", "old_values", "returns"):
            sample[name] = torch.randn(len(sample["input_ids"]), generator=generator, dtype=torch.float64)
    return samples


def taught(generator: torch.Generator, lengths: Sequence[int], without_targets: Sequence[int] = ()) -> list[Sample]:
    """With the four likeliest tokens of a teacher that ran before."""
    samples = documents(generator, lengths, without_targets)
    for sample in samples:
        logits = torch.randn(len(sample["input_ids"]), VOCAB, generator=generator, dtype=torch.float64)
        sample["teacher_log_probs"], sample["teacher_ids"] = logits.log_softmax(-1).topk(4)
    return samples


def collate(samples: Sequence[Sample], fmt: str = "padded") -> Any:
    """A batch with per-token fields, and values of whole samples as ``[B]``, or once a token where it is packed."""
    single = [name for name, value in samples[0].items() if value.dim() == 0]
    if fmt == "packed":
        return COLLATORS["packed"](
            [{n: v.expand(len(s["input_ids"])) if n in single else v for n, v in s.items()} for s in samples]
        )
    batch = COLLATORS[fmt]([{n: v for n, v in sample.items() if n not in single} for sample in samples])
    return batch | {name: torch.stack([sample[name] for sample in samples]) for name in single}


Pair = dict[str, Any]


def pairs(generator: torch.Generator, lengths: Sequence[int], without_targets: Sequence[int] = ()) -> list[Pair]:
    """A chosen and a rejected answer each, with the log-probabilities that a reference gave them before."""
    chosen = documents(generator, CHOSEN[: len(lengths)], without_targets)
    rejected = documents(generator, REJECTED[: len(lengths)], without_targets)
    logps = 3 * torch.randn(len(lengths), 2, generator=generator, dtype=torch.float64) - 30
    return [
        {"chosen": c, "rejected": r, "ref_chosen_logps": a, "ref_rejected_logps": b}
        for c, r, (a, b) in zip(chosen, rejected, logps, strict=True)
    ]


def collate_pairs(samples: Sequence[Pair], fmt: str = "padded", *, with_reference: bool = False) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for kind in ("chosen", "rejected"):
        batch |= {f"{kind}_{name}": value for name, value in collate([s[kind] for s in samples], fmt).items()}
    if with_reference:
        batch |= {name: torch.stack([s[name] for s in samples]) for name in ("ref_chosen_logps", "ref_rejected_logps")}
    return batch


Making = Callable[..., list[Any]]
KINDS: dict[str, tuple[Making, Callable[..., Any]]] = {
    "documents": (documents, collate),
    "rollouts": (rollouts, collate),
    "valued": (valued, collate),
    "taught": (taught, collate),
    "pairs": (pairs, collate_pairs),
    "pairs with reference": (pairs, partial(collate_pairs, with_reference=True)),
}


def samples_of(kind: str, *, lengths: Sequence[int] = LENGTHS, without_targets: Sequence[int] = ()) -> list[Any]:
    """The samples of one kind, always the same."""
    return KINDS[kind][0](torch.Generator().manual_seed(5), lengths, without_targets)


def batch_of(samples: Sequence[Any], kind: str, fmt: str = "padded") -> Any:
    return KINDS[kind][1](samples, fmt)


def loader(kind: str, fmt: str, precision: str, batch_size: int, **options: Any) -> DataLoader:
    """Batches of one kind; floating point as the trainer computes."""
    dtype = torch.float64 if precision == "64-true" else torch.float32
    return DataLoader(
        [_cast(sample, dtype) for sample in samples_of(kind, **options)],
        batch_size=batch_size,
        collate_fn=partial(KINDS[kind][1], fmt=fmt),
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast(entry, dtype) for name, entry in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


def targets_alone(sample: Sample) -> Tensor:
    """The targets of one sample, ``[L]``."""
    return shift_packed(sample["labels"], [len(sample["labels"])])
