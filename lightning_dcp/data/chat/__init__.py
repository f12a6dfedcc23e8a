"""Chats: messages with roles and tool calls as tokens, labels and segments."""

from lightning_dcp.data.chat.byte_turns import ChatByteTokenizer
from lightning_dcp.data.chat.densities import DENSITIES
from lightning_dcp.data.chat.documents import ChatDataset, ChatDocument
from lightning_dcp.data.chat.made_up import made_up_chat
from lightning_dcp.data.chat.modules import ChatDataModule, MadeUpChatDataModule, MessagesDataModule
from lightning_dcp.data.chat.pieces import ChatSample

__all__ = [
    "DENSITIES",
    "ChatByteTokenizer",
    "ChatDataModule",
    "ChatDataset",
    "ChatDocument",
    "ChatSample",
    "MadeUpChatDataModule",
    "MessagesDataModule",
    "made_up_chat",
]
