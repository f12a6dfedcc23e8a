"""Data: documents of very mixed lengths, chats, byte-level tokens, collate functions, and loaders that can be resumed."""

from lightning_dcp.data.chat import (
    DENSITIES,
    ChatByteTokenizer,
    ChatDataModule,
    ChatDataset,
    ChatDocument,
    ChatSample,
    MadeUpChatDataModule,
    MessagesDataModule,
    made_up_chat,
)
from lightning_dcp.data.collate import COLLATORS, BatchFormat, collate_jagged, collate_packed, collate_padded
from lightning_dcp.data.dataset import TokenDataset, TokenSample
from lightning_dcp.data.documents import Document, python_library_documents, text_documents
from lightning_dcp.data.modules import DocumentDataModule, PythonLibraryDataModule, TextDataModule
from lightning_dcp.data.resumable import ResumableLoader
from lightning_dcp.data.sampler import EpochSampler
from lightning_dcp.data.split import pick_documents, split_of
from lightning_dcp.data.tokenizer import ByteTokenizer

__all__ = [
    "COLLATORS",
    "DENSITIES",
    "BatchFormat",
    "ByteTokenizer",
    "ChatByteTokenizer",
    "ChatDataModule",
    "ChatDataset",
    "ChatDocument",
    "ChatSample",
    "Document",
    "DocumentDataModule",
    "EpochSampler",
    "MadeUpChatDataModule",
    "MessagesDataModule",
    "PythonLibraryDataModule",
    "ResumableLoader",
    "TextDataModule",
    "TokenDataset",
    "TokenSample",
    "collate_jagged",
    "collate_packed",
    "collate_padded",
    "made_up_chat",
    "pick_documents",
    "python_library_documents",
    "split_of",
    "text_documents",
]
