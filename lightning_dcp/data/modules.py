"""Lightning data modules over documents: Python's standard library, or one's own text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_dcp.data.arguments import argument_problems, suffix_problems
from lightning_dcp.data.collate import COLLATORS, BatchFormat
from lightning_dcp.data.dataset import DocumentDataset, TokenDataset
from lightning_dcp.data.documents import TEXT_SUFFIXES, Document, python_library_documents, text_documents
from lightning_dcp.data.sampler import EpochSampler
from lightning_dcp.data.split import pick_documents, split_of
from lightning_dcp.data.tokenizer import ByteTokenizer
from lightning_dcp.errors import DataError, Problem, raise_problems


class DocumentDataModule(L.LightningDataModule):
    """Documents, byte-level tokens, a stable split, and one loader for each stage.

    Training is shuffled by :class:`EpochSampler`; validation, test and prediction all go over the validation
    documents in order. The loaders are plain ``DataLoader`` objects, for the trainer's strategy to prepare.

    Args:
        batch_size: samples a batch.
        max_length: tokens a sample is cut at.
        format: ``packed`` (PackedBatch), ``padded`` (dict with ``attention_mask``) or ``jagged`` (nested tensors).
        val_fraction: share of the documents kept for validation; 0 trains on all and validates on none.
        seed: of the shuffle.
        shuffle: whether training draws another order each epoch.
        num_workers: worker processes a loader.
        limit: at most that many documents before the split, chosen by hash; ``None`` takes all.
        drop_last: leave out a last training batch that is not full.
        pin_memory: batches in page-locked memory.
        persistent_workers: keep the workers from epoch to epoch.

    Raises:
        ConfigurationError: all bad arguments at once.
    """

    def __init__(
        self,
        *,
        batch_size: int = 8,
        max_length: int = 4096,
        format: BatchFormat = "packed",
        val_fraction: float = 0.1,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        limit: int | None = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.max_length = max_length
        self.format: BatchFormat = format
        self.val_fraction = val_fraction
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.limit = limit
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.train_dataset: DocumentDataset | None = None
        self.val_dataset: DocumentDataset | None = None
        raise_problems(self.problems())

    @cached_property
    def tokenizer(self) -> Any:
        """What makes tokens of text."""
        return ByteTokenizer()

    def documents(self) -> Sequence[Document]:
        """All documents there are, before ``limit`` and the split; a subclass says which."""
        raise NotImplementedError(f"{type(self).__name__} must define documents()")

    def problems(self) -> list[Problem]:
        """What is wrong with the arguments."""
        return argument_problems(
            batch_size=self.batch_size,
            max_length=self.max_length,
            format=self.format,
            val_fraction=self.val_fraction,
            num_workers=self.num_workers,
            limit=self.limit,
            persistent_workers=self.persistent_workers,
        )

    def setup(self, stage: str | None = None) -> None:
        """Find the documents and split them; the same for every stage, and done once.

        Raises:
            DataError: data that cannot be read, or a split that leaves one side without documents.
        """
        if self.train_dataset is not None:
            return
        documents = pick_documents(self.documents(), limit=self.limit)
        sides: dict[str, list[Document]] = {"train": [], "val": []}
        for document in documents:
            sides[split_of(document.id, self.val_fraction)].append(document)
        self._check_split(len(sides["train"]), len(sides["val"]))
        self.val_dataset = self.dataset(sides["val"])
        self.train_dataset = self.dataset(sides["train"])

    def _check_split(self, train: int, val: int) -> None:
        counts = f"{train + val} document(s) at val_fraction={self.val_fraction} (limit={self.limit})"
        split = f"gave {train} for training and {val} for validation"
        if train == 0 or (val == 0 and self.val_fraction > 0):
            raise DataError(f"{counts} {split}: change val_fraction, raise limit, or bring more documents")
        if self.drop_last and train < self.batch_size:
            remedy = "lower batch_size or set drop_last=False"
            raise DataError(f"{counts} {split}: drop_last=True leaves no batch of {self.batch_size}; {remedy}")

    def dataset(self, documents: Sequence[Document]) -> DocumentDataset:
        """The data set of one side of the split."""
        return TokenDataset(documents, max_length=self.max_length, tokenizer=self.tokenizer)

    def train_dataloader(self) -> DataLoader[Any]:
        """Training documents, in the order of an :class:`EpochSampler`."""
        dataset = _ready(self.train_dataset)
        sampler = EpochSampler(dataset, seed=self.seed, shuffle=self.shuffle)
        return self._loader(dataset, sampler=sampler, drop_last=self.drop_last)

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Validation documents in order; no loader at all with ``val_fraction=0``."""
        dataset = _ready(self.val_dataset)
        return self._loader(dataset) if len(dataset) else []

    def test_dataloader(self) -> DataLoader[Any]:
        """The validation documents, in order.

        Raises:
            DataError: there are none, with ``val_fraction=0``.
        """
        dataset = _ready(self.val_dataset)
        if not len(dataset):
            raise DataError("val_fraction=0 leaves no documents to test on or predict: raise it")
        return self._loader(dataset)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The validation documents, in order."""
        return self.test_dataloader()

    def _loader(self, dataset: DocumentDataset, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            collate_fn=COLLATORS[self.format],
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
            **options,
        )


class PythonLibraryDataModule(DocumentDataModule):
    """The running Python's standard library: real text of very mixed lengths, and nothing to download.

    Args:
        **options: those of :class:`DocumentDataModule`.
    """

    def documents(self) -> list[Document]:
        """The ``.py`` files of the standard library."""
        return python_library_documents()


class TextDataModule(DocumentDataModule):
    """One's own text files and JSON Lines.

    Args:
        path: a folder (searched recursively), one file, or a glob pattern.
        text_field: where a ``.jsonl`` line holds its text.
        suffixes: what to take from a folder.
        **options: those of :class:`DocumentDataModule`.
    """

    def __init__(
        self, path: str, *, text_field: str = "text", suffixes: Sequence[str] = TEXT_SUFFIXES, **options: Any
    ) -> None:
        self.path = path
        self.text_field = text_field
        self.suffixes = tuple(suffixes)
        super().__init__(**options)

    def problems(self) -> list[Problem]:
        """What is wrong with the arguments."""
        return suffix_problems(self.suffixes) + super().problems()

    def documents(self) -> list[Document]:
        """The files and lines found at ``path``."""
        return text_documents(self.path, text_field=self.text_field, suffixes=self.suffixes)


def _ready(dataset: DocumentDataset | None) -> DocumentDataset:
    if dataset is None:
        raise DataError("the data module is not set up yet: call setup() first (the trainer does)")
    return dataset
