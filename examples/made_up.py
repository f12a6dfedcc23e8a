"""What the examples share when they are run as scripts: made-up data of very unequal lengths, and a trainer on CPU ranks.

All data are sequences that count: tokens ``a, a + d, a + 2 d, ...`` modulo the size of the vocabulary. A model can learn
from the first two tokens what follows, so losses fall within a few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dcp import DCPStrategy, RunSummary
from lightning_dcp.data import collate_padded

VOCAB = 32
PROMPT = 4
"""Tokens of a sample that are given and not learnt."""

Sample = dict[str, Tensor]
Collate = Callable[[Sequence[Sample]], Any]


def counting(length: int, generator: torch.Generator) -> Tensor:
    """A sequence that counts, int64 ``[length]``."""
    start, step = torch.randint(1, VOCAB, (2,), generator=generator)
    return (start + step * torch.arange(length)) % VOCAB


def lengths(generator: torch.Generator, *, longest: int = 480) -> Iterator[int]:
    """Lengths with a long tail: most are near 30 tokens, one in eight is ``longest``."""
    for number in count():
        normal = torch.randn((), generator=generator, dtype=torch.float64)
        yield longest if number % 8 == 3 else int((normal + 3.4).exp().clamp(8, longest))


def supervised(ids: Tensor) -> Sample:
    """A sample with its labels: all tokens but the prompt."""
    labels = ids.clone()
    labels[:PROMPT] = -100
    return {"input_ids": ids, "labels": labels}


def documents(number: int, seed: int = 0) -> list[Sample]:
    """Samples that count."""
    generator = torch.Generator().manual_seed(seed)
    wanted = lengths(generator)
    return [supervised(counting(next(wanted), generator)) for _ in range(number)]


def pairs(number: int, seed: int = 0) -> list[dict[str, Sample]]:
    """Two answers to a prompt: the chosen one counts on, the rejected one does not."""
    generator = torch.Generator().manual_seed(seed)
    wanted = lengths(generator, longest=240)
    samples = []
    for _ in range(number):
        chosen = counting(next(wanted), generator)
        noise = torch.randint(1, VOCAB, (next(wanted) - PROMPT,), generator=generator)
        rejected = torch.cat([chosen[:PROMPT], noise])
        samples.append({"chosen": supervised(chosen), "rejected": supervised(rejected)})
    return samples


def collate_pairs(samples: Sequence[dict[str, Sample]]) -> dict[str, Tensor]:
    """A padded batch with ``chosen_input_ids``, ``chosen_attention_mask``, ``chosen_labels``, and the same of the rejected."""
    batch = {}
    for kind in ("chosen", "rejected"):
        fields = collate_padded([sample[kind] for sample in samples])
        batch |= {f"{kind}_{name}": value for name, value in fields.items()}
    return batch


def rollouts(number: int, group: int = 4, seed: int = 0) -> list[Sample]:
    """Answers as a policy would have drawn them: ``group`` to a prompt, each with a reward, which gives its advantage.

    The reward is the share of tokens that count on from the token before; the advantage is the reward less its group's mean
    over its group's standard deviation (GRPO, arXiv:2402.03300). It is worked out before anything is cut, so answers to one
    prompt need not meet in one pack.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = lengths(generator)
    samples = []
    for _ in range(number // group):
        rewards = torch.rand(group, generator=generator)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        right = counting(480, generator)
        for reward, advantage in zip(rewards, advantages, strict=True):
            length = next(wanted)
            noise = torch.randint(1, VOCAB, (length,), generator=generator)
            counts_on = torch.rand(length, generator=generator) < reward
            counts_on[:PROMPT] = True
            sample = supervised(torch.where(counts_on, right[:length], noise))
            # an untrained policy finds all tokens about equally likely
            old = torch.full((length,), 1 / VOCAB).log() + 0.1 * torch.randn(length, generator=generator)
            samples.append(sample | {"old_log_probs": old, "advantages": advantage, "temperature": 0.8 + 0.4 * reward})
    return samples


def valued_rollouts(number: int, seed: int = 0) -> list[Sample]:
    """Answers with what a critic needs, per token: returns, old values, and advantages."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for sample in rollouts(number, seed=seed):
        reward = (sample["temperature"] - 0.8) / 0.4
        returns = reward.expand(len(sample["input_ids"]))
        values = returns + 0.3 * torch.randn(len(returns), generator=generator)
        kept = {name: sample[name] for name in ("input_ids", "labels", "old_log_probs")}
        samples.append(kept | {"returns": returns, "old_values": values, "advantages": returns - values})
    return samples


def collate_rollouts(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """A padded batch with per-token fields ``[B, T]``, and one value a sample in the others, ``[B]``."""
    single = [name for name, value in samples[0].items() if value.dim() == 0]
    batch = collate_padded([{n: value for n, value in sample.items() if n not in single} for sample in samples])
    return batch | {name: torch.stack([sample[name] for sample in samples]) for name in single}


class PrintLogs(L.Callback):
    """Prints what was logged, a line a step, on rank 0."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            shown = (f"{name} {float(value):.4f}" for name, value in trainer.callback_metrics.items())
            print(f"step {trainer.global_step}: {', '.join(shown)}", flush=True)


def train(
    module: L.LightningModule,
    samples: Sequence[Any],
    collate: Collate,
    *,
    devices: int,
    steps: int,
    batch_size: int = 8,
    **strategy: Any,
) -> None:
    """Train for some steps on CPU ranks; print losses, and a table that shows at which CP sizes packs ran."""
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PrintLogs(), RunSummary(warmup_steps=0)],
        # the longest samples have up to 512 tokens, and need all ranks
        strategy=DCPStrategy(max_seqlen_per_dp_cp_rank=512 // devices, cost_model="cpu", **strategy),
    )
    trainer.fit(module, DataLoader(samples, batch_size=batch_size, collate_fn=collate))  # type: ignore[arg-type]
