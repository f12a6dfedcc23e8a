"""Stable choices among documents: each depends on the document's id alone, never on order or on other documents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from lightning_dcp.data.documents import Document


def split_of(document_id: str, val_fraction: float) -> Literal["train", "val"]:
    """Whether a document is for training or for validation.

    The id is hashed to a number in [0, 1), and numbers below ``val_fraction`` are for validation. So adding or
    removing documents never moves another one, and raising ``val_fraction`` moves documents to validation only.
    """
    return "val" if unit_hash(document_id, salt="split") < val_fraction else "train"


def pick_documents(documents: Sequence[Document], *, limit: int | None) -> list[Document]:
    """At most ``limit`` documents, chosen by hash so that a few are still a mix of lengths; their order is kept."""
    if limit is None or limit >= len(documents):
        return list(documents)
    # another salt than the split's: the smallest split hashes would all be for validation
    ranked = sorted(documents, key=lambda document: unit_hash(document.id, salt="limit"))
    chosen = {document.id for document in ranked[:limit]}
    return [document for document in documents if document.id in chosen]


def unit_hash(text: str, *, salt: str) -> float:
    """A number in [0, 1) that is the same on every machine and in every process, unlike :func:`hash`."""
    raw = text.encode("utf-8", errors="surrogateescape")  # file names need not be UTF-8
    digest = hashlib.blake2b(raw, digest_size=8, salt=salt.encode()).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53  # 53 bits: a float holds them exactly, and stays below 1
