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
