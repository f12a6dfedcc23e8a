"""A byte-level tokenizer: nothing to train or download, and lengths follow from file sizes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_dcp.errors import DataError

NUM_BYTES = 256


class ByteTokenizer:
    """One token a byte of UTF-8, between a beginning-of-sequence and an end-of-sequence token.

    Token ids 0..255 are the bytes themselves, 256 is ``bos_id`` and 257 is ``eos_id``.
    """

    bos_id = NUM_BYTES
    eos_id = NUM_BYTES + 1
    vocab_size = NUM_BYTES + 2

    def encode(self, text: str | bytes) -> Tensor:
        """Token ids of a text, int64 ``[2 + bytes]``: ``bos_id`` first, then the bytes, ``eos_id`` last.

        Raises:
            DataError: a string that UTF-8 cannot encode (lone surrogates).
        """
        raw = text if isinstance(text, bytes) else utf8(text)
        ids = torch.empty(self.encoded_length(len(raw)), dtype=torch.int64)
        ids[0], ids[-1] = self.bos_id, self.eos_id
        if raw:  # torch.frombuffer refuses empty buffers
            ids[1:-1] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return ids

    def encoded_length(self, num_bytes: int) -> int:
        """Tokens :meth:`encode` makes of a text of that many bytes, without looking at the text."""
        return num_bytes + 2

    def decode_bytes(self, ids: Tensor | Iterable[int]) -> bytes:
        """The bytes behind token ids; special tokens are dropped.

        Raises:
            DataError: an id outside the vocabulary.
        """
        values = ids.flatten().tolist() if isinstance(ids, Tensor) else list(ids)
        unknown = next((i for i in values if not 0 <= i < self.vocab_size), None)
        if unknown is not None:
            raise DataError(f"token id {unknown} is outside the vocabulary of {self.vocab_size} byte-level tokens")
        return bytes(i for i in values if i < NUM_BYTES)

    def decode(self, ids: Tensor | Iterable[int]) -> str:
        """The text behind token ids; special tokens are dropped, bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def utf8(text: str) -> bytes:
    """UTF-8 bytes of a string; :class:`DataError` where there are none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the text cannot be encoded as UTF-8 ({error.reason} at character {error.start})") from error
