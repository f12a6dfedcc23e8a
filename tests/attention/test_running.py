"""Gradients of keys that grow while those of other ranks are under way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dcp.attention.running import KeyValueGradients


class Incoming:
    """A transfer of gradients that are all 100; counts how often it was waited for."""

    def __init__(self, *like: Tensor) -> None:
        self.tensors, self.waits = [torch.full_like(t, 100.0, dtype=torch.float32) for t in like], 0

    def wait(self) -> list[Tensor]:
        self.waits += 1
        return self.tensors


def keys_and_values() -> tuple[Tensor, Tensor]:
    return torch.zeros(6, 2, 3, dtype=torch.bfloat16), torch.zeros(6, 2, 5, dtype=torch.bfloat16)


def parts(tokens: int, value: float) -> tuple[Tensor, Tensor]:
    return torch.full((tokens, 2, 3), value, dtype=torch.bfloat16), torch.full((tokens, 2, 5), -value).bfloat16()


def test_without_a_transfer_parts_are_added_to_zeros() -> None:
    found = KeyValueGradients(*keys_and_values(), torch.float32)
    found.add(slice(1, 3), *parts(2, 1.0))
    found.add(torch.tensor([2, 2, 5]), *parts(3, 4.0))
    dk, dv = found.sums()
    assert dk[:, 0, 0].tolist() == [0, 1, 9, 0, 0, 4]
    assert dv[:, 1, 4].tolist() == [0, -1, -9, 0, 0, -4]
    assert dk.dtype == dv.dtype == torch.float32


def test_parts_wait_for_what_is_under_way_and_go_into_its_memory() -> None:
    k, v = keys_and_values()
    incoming = Incoming(k, v)
    found = KeyValueGradients(k, v, torch.float32, incoming)
    found.add(slice(0, 2), *parts(2, 1.0))
    found.add(slice(2, 6), *parts(4, 2.0))
    assert incoming.waits == 0  # as many numbers as there are gradients
    dk, dv = found.sums()
    assert dk is incoming.tensors[0] and dv is incoming.tensors[1]
    assert dk[:, 1, 2].tolist() == [101, 101, 102, 102, 102, 102]
    assert dv[:, 0, 0].tolist() == [99, 99, 98, 98, 98, 98]
    assert found.sums()[0] is dk
    assert incoming.waits == 1


@pytest.mark.parametrize("tokens", [(4, 3), (6, 1, 1), (7,)])
def test_no_more_is_kept_than_the_gradients_themselves(tokens: tuple[int, ...]) -> None:
    k, v = keys_and_values()
    incoming = Incoming(k, v)
    found = KeyValueGradients(k, v, torch.float32, incoming)
    for count in tokens:
        assert incoming.waits <= 1
        found.add(torch.zeros(count, dtype=torch.int64), *parts(count, 1.0))
    assert incoming.waits == 1
    assert found.sums()[0][:, 0, 0].tolist() == [100 + sum(tokens), 100, 100, 100, 100, 100]
