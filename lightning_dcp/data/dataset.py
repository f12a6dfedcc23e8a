"""A map-style data set of tokenised documents, whose lengths are known before anything is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypedDict

from torch import Tensor
from torch.utils.data import Dataset

from lightning_dcp.data.documents import Document
from lightning_dcp.data.tokenizer import ByteTokenizer


class TokenSample(TypedDict):
    """One item of a :class:`TokenDataset`.

    Attributes:
        input_ids: token ids, int64 ``[L]``.
        labels: the same ids at the same positions (Hugging Face's convention: the loss shifts); all supervised.
        index: the item's index in its data set, which names it in plans and errors.
    """

    input_ids: Tensor
    labels: Tensor
    index: int


class DocumentDataset(Dataset[Any], ABC):
    """Documents as samples; each is read and tokenised when asked for.

    Args:
        documents: the documents, in order.
        max_length: tokens a sample is cut at.
    """

    def __init__(self, documents: Sequence[Document], *, max_length: int) -> None:
        self.documents = tuple(documents)
        self.max_length = max_length

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample: nothing is read."""

    @abstractmethod
    def sample(self, index: int) -> Any:
        """The sample of the document at an index from 0."""

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside this data set of {len(self)} documents")
        return self.sample(index % len(self))


class TokenDataset(DocumentDataset):
    """Documents as token sequences; every token is supervised.

    Args:
        documents: the documents, in order.
        max_length: tokens a sample is cut at. A sample that is cut loses its end-of-sequence token.
        tokenizer: byte-level, so that lengths follow from file sizes.
    """

    def __init__(
        self, documents: Sequence[Document], *, max_length: int, tokenizer: ByteTokenizer | None = None
    ) -> None:
        super().__init__(documents, max_length=max_length)
        self.tokenizer = tokenizer or ByteTokenizer()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, from the sizes of the documents: nothing is read."""
        return tuple(min(self.tokenizer.encoded_length(d.size), self.max_length) for d in self.documents)

    def sample(self, index: int) -> TokenSample:
        """The text of one document, between its first and its last token."""
        # cut before encoding: a view of a longer encoding would drag all of it through the workers' queue
        text = self.documents[index].read()[: self.max_length]
        ids = self.tokenizer.encode(text)[: self.max_length]
        return {"input_ids": ids, "labels": ids.clone(), "index": index}
