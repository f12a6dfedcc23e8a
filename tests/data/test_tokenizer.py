import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dcp.data import ByteTokenizer
from lightning_dcp.errors import DataError


def test_bos_first_eos_last():
    ids = ByteTokenizer().encode("aé")
    assert ids.dtype == torch.int64
    assert ids.tolist() == [256, 97, 0xC3, 0xA9, 257]
    assert ByteTokenizer.vocab_size == 258
    assert ByteTokenizer().encode("").tolist() == [256, 257]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == tokenizer.encoded_length(len(text.encode()))


@given(st.binary())
def test_bytes_come_back(raw):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode_bytes(tokenizer.encode(raw)) == raw


def test_errors():
    with pytest.raises(DataError, match="token id 258 is outside"):
        ByteTokenizer().decode([97, 258])
    with pytest.raises(DataError, match="token id -100 is outside"):
        ByteTokenizer().decode(torch.tensor([97, -100]))
    with pytest.raises(DataError, match="UTF-8"):
        ByteTokenizer().encode("\ud800")
    assert ByteTokenizer().decode(b"a\xff") == "a\ufffd"
