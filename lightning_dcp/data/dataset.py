"""A map-style data set of tokenised documents, whose lengths are known before anything is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

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


class TokenDataset(Dataset[TokenSample]):
    """Documents as token sequences; each is read and tokenised when asked for.

    Args:
        documents: the documents, in order.
        max_length: tokens a sample is cut at. A sample that is cut loses its end-of-sequence token.
        tokenizer: byte-level, so that lengths follow from file sizes.
    """

    def __init__(
        self, documents: Sequence[Document], *, max_length: int, tokenizer: ByteTokenizer | None = None
    ) -> None:
        self.documents = tuple(documents)
        self.max_length = max_length
        self.tokenizer = tokenizer or ByteTokenizer()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, from the sizes of the documents: nothing is read."""
        return tuple(min(self.tokenizer.encoded_length(d.size), self.max_length) for d in self.documents)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> TokenSample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside this data set of {len(self)} documents")
        # cut before encoding: a view of a longer encoding would drag all of it through the workers' queue
        text = self.documents[index].read()[: self.max_length]
        ids = self.tokenizer.encode(text)[: self.max_length]
        return {"input_ids": ids, "labels": ids.clone(), "index": index % len(self)}
