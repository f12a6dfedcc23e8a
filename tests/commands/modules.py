"""Data modules as users write them, for `--data`."""

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

LENGTHS = [5, 9, 2, 7, 40, 3, 8, 1]


def padded(samples):
    rows = [torch.ones(length, dtype=torch.long) for length in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": ids}


class PaddedModule(LightningDataModule):
    """Batches as padded dicts, from a data set that does not know its lengths."""

    def __init__(self, batch_size: int = 2, samples: int = 8) -> None:
        super().__init__()
        self.batch_size, self.samples = batch_size, samples

    def train_dataloader(self):
        return DataLoader(LENGTHS[: self.samples], batch_size=self.batch_size, collate_fn=padded)


class SeveralLoaders(PaddedModule):
    def train_dataloader(self):
        return {"a": super().train_dataloader(), "b": super().train_dataloader()}


class SegmentedModule(LightningDataModule):
    """Eight chats of 60 tokens of a user, a dense return of a tool, 80 tokens of a user; ids from ``first`` on.

    ``longer`` tokens are added to the return in chat 103, as another template would.
    """

    def __init__(self, first: int = 100, longer: int = 0, user_density: float = 1.0) -> None:
        super().__init__()
        self.first, self.longer, self.user_density = first, longer, user_density

    def train_dataloader(self):
        ids = [n for n in range(self.first, self.first + 8) if n < 108 or self.first > 108]
        return DataLoader(ids, batch_size=4, collate_fn=self.batch)

    def batch(self, ids):
        returns = [self.longer * (n == 103) + [40, 90, 130, 250][n % 4] for n in ids]
        lengths = [140 + tokens for tokens in returns]
        segments = [
            [
                (0, 60, "user", self.user_density),
                (60, 60 + n, "tool", 3.0),
                (60 + n, 140 + n, "user", self.user_density),
            ]
            for n in returns
        ]
        return padded(lengths) | {"sample_ids": list(ids), "segments": segments}
